"""Lines in, lines out: what `eval.py` does with standard input."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mhe_jax.config import EvaluationConfig
from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG
from mhe_jax.config.places import path_of
from mhe_jax.data import EOS
from mhe_jax.evaluation.generation import Continuation, Generator
from mhe_jax.evaluation.prediction import Prediction, Predictor
from mhe_jax.evaluation.run import Run, check_processes, check_task
from mhe_jax.evaluation.texts import chunks
from mhe_jax.evaluation.translator import Translation, Translator
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import Answer

# The answer to a line.
A = TypeVar("A", Translation, Continuation)


def translate(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    lines: Iterable[str],
    write: Callable[[str], None],
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """One line out for each line in, in order; a blank line gives an empty one.

    Args:
      workdir: of a translation run.
      evaluation: checkpoint and search.
      lines: texts, without line ends.
      write: gets a few translated lines at a time, with their line ends, as soon as they are ready.
      chunk: lines to read before any is translated: more are faster, fewer answer sooner; None is
        a few batches, 1 is for a person at a terminal.
      devices: to compute on; None is all there are.

    A line longer than `model.max_length` tokens is cut, with a note on standard error.

    Returns:
      Counts and speed.

    Raises:
      InputError: not a translation run, or no such checkpoint.
    """
    run = _load(path_of(workdir), evaluation, "translate", devices)
    translator = Translator(run)
    note = f"line {{}} is cut to {translator.max_length} tokens"
    number = truncated = 0
    for translation in _answers(translator.translate, lines, chunk, run, note, write):
        number += 1
        truncated += translation.truncated
    cost = translator.cost
    return {
        "lines": number,
        "truncated_lines": truncated,
        "output_tokens": cost.tokens,
        "seconds": cost.decode_seconds,
        "compile_seconds": cost.compile_seconds,
        "checkpoint": evaluation.checkpoint,
        "steps": run.steps,
        "beam_size": evaluation.beam_size,
        "length_penalty": evaluation.length_penalty,
        "min_length": evaluation.min_length,
    }


def generate(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    prompts: Iterable[str],
    write: Callable[[str], None],
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """One line out for each prompt, in order: the prompt, and its continuation in one line.

    Args:
      workdir: of a run of task `lm`.
      evaluation: checkpoint, temperature, top_k, top_p, seed, and extra_length new tokens at most.
      prompts: texts, without line ends; an empty one begins a new text.
      write: gets lines, each with its line end, as soon as they are ready.
      chunk: prompts to read before any is continued; None is a few batches.
      devices: to compute on; None is all there are.

    Returns:
      Counts, speed and settings.

    Raises:
      InputError: not a run of task `lm`, or no such checkpoint.
    """
    run = _load(path_of(workdir), evaluation, "generate", devices)
    generator = Generator(run, one_line=True)  # a line break would make two lines of one
    note = "of prompt {} only the end is read"
    number = truncated = tokens = ended = 0
    begin = time.perf_counter()
    for continuation in _answers(generator.generate, prompts, chunk, run, note, write):
        number += 1
        truncated += continuation.truncated
        tokens += len(continuation.tokens)
        ended += continuation.tokens[-1:] == [EOS]
    return {
        "prompts": number,
        "truncated_prompts": truncated,
        "output_tokens": tokens,
        "ended": ended,
        # Includes compiling.
        "seconds": round(time.perf_counter() - begin, 3),
        "checkpoint": evaluation.checkpoint,
        "steps": run.steps,
        "min_length": evaluation.min_length,
        "temperature": evaluation.temperature,
        "top_k": evaluation.top_k,
        "top_p": evaluation.top_p,
        "seed": evaluation.seed,
    }


def predict(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    lines: Iterable[str],
    write: Callable[[str], None],
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """One line out for each line in, in order; a blank line gives an empty one.

        label <tab> label=p <tab> ...       and the probability of each label
        number                              task regression
        text <tab> score <tab> start <tab> end      task span, the place in characters

    Args:
      workdir: of a run on labelled examples.
      evaluation: checkpoint, and for task span answer_length and no_answer_threshold.
      lines: texts, without line ends; if examples have several, with tabs between them.
      write: gets lines, each with its line end, as soon as they are ready.
      chunk: lines to read before any is answered; None is a few batches.
      devices: to compute on; None is all there are.

    Returns:
      Counts and speed.

    Raises:
      InputError: not such a run, no such checkpoint, or a line with the wrong number of texts.
    """
    run = _load(path_of(workdir), evaluation, "predict", devices)
    predictor = Predictor(run, evaluation)
    several = len(row_of(run.config).texts) > 1

    def example(number: int, line: str) -> Any:
        if not line.strip():
            return None
        item = tuple(line.split("\t")) if several else line
        return predictor.example(item, f"standard input, line {number}")

    begin, number = time.perf_counter(), 0
    examples = (example(number, line) for number, line in enumerate(lines, 1))
    for found in chunks(examples, evaluation.batch_size, chunk):
        predictions = iter(predictor.predict([one for one in found if one is not None]))
        shown = ("" if one is None else _shown(next(predictions)) for one in found)
        write("".join(f"{line}\n" for line in shown))
        number += len(found)
    return {
        "lines": number,
        # Includes compiling.
        "seconds": round(time.perf_counter() - begin, 3),
        "task": run.config.task,
        "checkpoint": evaluation.checkpoint,
        "steps": run.steps,
    }


def _shown(found: Prediction | float | Answer) -> str:
    if isinstance(found, Answer):
        text = " ".join(found.text.split())
        return f"{text}\t{found.score:.4f}\t{found.start}\t{found.end}"
    if isinstance(found, Prediction):
        each = (f"{label}={p:.4f}" for label, p in found.probabilities.items())
        return "\t".join([found.label, *each])
    return f"{found:.4f}"


def _load(workdir: Path, evaluation: EvaluationConfig, method: str, devices: Any) -> Run:
    """The run, checked to have this method."""
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    check_task(workdir, config, method)
    check_processes(f"--{method}")
    return Run.load(workdir, config, devices)


def _answers(
    answer: Callable[[list[str]], list[A]],
    lines: Iterable[str],
    chunk: int | None,
    run: Run,
    note: str,
    write: Callable[[str], None],
) -> Iterator[A]:
    """The answers to lines, each already written; `note` is printed for each truncated one."""
    number = 0
    # `lines` may wait for a person: what is read is answered before more is asked for.
    for texts in chunks(lines, run.evaluation.batch_size, chunk):
        found = answer(texts)
        for one in found:
            number += 1
            if one.truncated:
                print(f"note: {note.format(number)}", file=sys.stderr)
        write("".join(f"{one.text}\n" for one in found))
        yield from found
