"""Lines in, lines out: what `eval.py` does with standard input.

Of `translate`, `generate` and `predict`:

Args:
  workdir: of the run.
  evaluation: checkpoint and settings.
  lines: texts, without line ends; each gives one line.
  write: gets a few lines at a time, with their line ends, in order, as soon as they are ready.
  chunk: lines to read before any is answered: more are faster, fewer answer sooner; None is a few
    batches, 1 is for a person at a terminal.
  devices: to compute on; None is all there are.

Returns:
  Counts, speed and settings.

Raises:
  InputError: a run of another task, no such checkpoint, or a line that is wrong.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import EvaluationConfig
from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG
from mhe_jax.config.places import path_of
from mhe_jax.data import EOS
from mhe_jax.evaluation.generation import Generator
from mhe_jax.evaluation.prediction import Prediction, Predictor
from mhe_jax.evaluation.run import Run, check_processes, check_task
from mhe_jax.evaluation.texts import chunks
from mhe_jax.evaluation.translator import Translator
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import Answer

Write = Callable[[str], None]


def translate(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    lines: Iterable[str],
    write: Write,
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Translations; a blank line gives an empty one.

    A line longer than `model.max_length` tokens is cut, with a note on standard error.
    """
    run = _load(workdir, evaluation, "translate", devices)
    translator = Translator(run)
    number = truncated = 0
    for found in _answers(run, translator.translate, lines, chunk, write):
        number += 1
        if found.truncated:
            truncated += 1
            print(f"note: line {number} is cut to {translator.max_length} tokens", file=sys.stderr)
    cost = translator.cost
    return {
        "lines": number,
        "truncated_lines": truncated,
        "output_tokens": cost.tokens,
        "seconds": cost.decode_seconds,
        "compile_seconds": cost.compile_seconds,
        **_settings(run, "beam_size", "length_penalty", "min_length"),
    }


def generate(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    lines: Iterable[str],
    write: Write,
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Each prompt and its continuation, in one line; an empty prompt begins a new text."""
    run = _load(workdir, evaluation, "generate", devices)
    generator = Generator(run, one_line=True)  # a line break would make two lines of one
    number = truncated = tokens = ended = 0
    begin = time.perf_counter()
    for found in _answers(run, generator.generate, lines, chunk, write):
        number += 1
        tokens += len(found.tokens)
        ended += found.tokens[-1:] == [EOS]
        if found.truncated:
            truncated += 1
            print(f"note: of prompt {number} only the end is read", file=sys.stderr)
    return {
        "prompts": number,
        "truncated_prompts": truncated,
        "output_tokens": tokens,
        "ended": ended,
        "seconds": round(time.perf_counter() - begin, 3),  # includes compiling
        **_settings(run, "min_length", "temperature", "top_k", "top_p", "seed"),
    }


def predict(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    lines: Iterable[str],
    write: Write,
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Labels, numbers or answers; a blank line gives an empty one.

        label <tab> label=p <tab> ...       and the probability of each label
        number                              task regression
        text <tab> score <tab> start <tab> end      task span, the place in characters

    If examples have several texts, a line has tabs between them.
    """
    run = _load(workdir, evaluation, "predict", devices)
    predictor = Predictor(run, evaluation)
    several = len(row_of(run.config).texts) > 1

    def example(number: int, line: str) -> Any:
        if not line.strip():
            return None
        item = tuple(line.split("\t")) if several else line
        return predictor.example(item, f"standard input, line {number}")

    def answer(examples: list[Any]) -> list[Any]:
        predictions = iter(predictor.predict([one for one in examples if one is not None]))
        return [None if one is None else next(predictions) for one in examples]

    begin = time.perf_counter()
    examples = (example(number, line) for number, line in enumerate(lines, 1))
    number = sum(1 for _ in _answers(run, answer, examples, chunk, write))
    seconds = round(time.perf_counter() - begin, 3)  # includes compiling
    return {"lines": number, "seconds": seconds, "task": run.config.task, **_settings(run)}


def _load(workdir: str | Path, evaluation: EvaluationConfig, method: str, devices: Any) -> Run:
    """The run, checked to have this method."""
    workdir = path_of(workdir)
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    check_task(workdir, config, method)
    check_processes(f"--{method}")
    return Run.load(workdir, config, devices)


def _answers(
    run: Run,
    answer: Callable[[list[Any]], list[Any]],
    items: Iterable[Any],
    chunk: int | None,
    write: Write,
) -> Iterator[Any]:
    """The answers, each already written."""
    # `items` may wait for a person: what is read is answered before more is asked for.
    for some in chunks(items, run.evaluation.batch_size, chunk):
        found = answer(some)
        write("".join(f"{_shown(one)}\n" for one in found))
        yield from found


def _shown(found: Any) -> str:
    match found:
        case None:
            return ""
        case float():
            return f"{found:.4f}"
        case Answer():
            text = " ".join(found.text.split())
            return f"{text}\t{found.score:.4f}\t{found.start}\t{found.end}"
        case Prediction():
            each = (f"{label}={p:.4f}" for label, p in found.probabilities.items())
            return "\t".join([found.label, *each])
    return found.text


def _settings(run: Run, *names: str) -> dict[str, Any]:
    evaluation = run.evaluation
    about = {"checkpoint": evaluation.checkpoint, "steps": run.steps}
    return {**about, **{name: getattr(evaluation, name) for name in names}}
