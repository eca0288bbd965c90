"""Lines in, lines out: what `eval.py` does with standard input."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import EvaluationConfig
from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG
from mhe_jax.config.places import path_of
from mhe_jax.evaluation.forward import Prediction, predict
from mhe_jax.evaluation.generation import Continuation, Generator
from mhe_jax.evaluation.run import SETTINGS, Run, check_processes, check_task
from mhe_jax.evaluation.texts import chunks
from mhe_jax.evaluation.translator import Translator
from mhe_jax.tasks.labelled.examples import given_example
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import Answer


def answer_lines(
    method: str,
    workdir: str | Path,
    evaluation: EvaluationConfig,
    lines: Iterable[str],
    write: Callable[[str], Any],
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Answers lines with a run, a line each, and returns counts, speed and settings.

        translate    the translation; a blank line gives an empty one
        generate     the prompt and its continuation; an empty prompt begins a new text
        predict      label <tab> label=p <tab> ...               and the probability of each label
                     number                                      task regression
                     text <tab> score <tab> start <tab> end      task span, the place in characters

    Where examples have several texts, a line to predict has tabs between them; a blank one gives an
    empty one. Of a line that the model cannot read whole, a note goes to standard error.

    Args:
      lines: texts, without line ends.
      write: gets a few lines at a time, with their line ends, in order, as soon as they are ready.
      chunk: lines to read before any is answered: more are faster, fewer answer sooner; None is a
        few batches, 1 is for a person at a terminal.
      devices: to compute on; None is all there are.

    Raises:
      InputError: a run of another task, no such checkpoint, or a line that is wrong.
    """
    workdir = path_of(workdir)
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    check_task(workdir, config, method)
    check_processes(f"--{method}")
    run = Run.load(workdir, config, devices)
    items: Iterable[Any] = lines
    if method == "predict":
        items = _examples(run, lines)
        answer = functools.partial(_predictions, run)
    elif method == "generate":
        answer = Generator(run, evaluation).generate
    else:
        answer = Translator(run, evaluation).translate
    number = truncated = tokens = 0
    begin = time.perf_counter()
    # `items` may wait for a person: what is read is answered before more is asked for.
    for some in chunks(items, evaluation.batch_size, chunk):
        found = answer(some)
        write("".join(f"{_line(*pair)}\n" for pair in zip(some, found, strict=True)))
        for one in found:
            number += 1
            tokens += len(getattr(one, "tokens", ()))
            if getattr(one, "truncated", False):
                truncated += 1
                print(f"note: line {number} is too long and was cut", file=sys.stderr)
    return {
        "task": config.task,
        "checkpoint": evaluation.checkpoint,
        "steps": run.steps,
        "lines": number,
        "truncated_lines": truncated,
        "output_tokens": tokens,
        "seconds": round(time.perf_counter() - begin, 3),  # includes compiling
        **{name: getattr(evaluation, name) for name in SETTINGS[method]},
    }


def _examples(run: Run, lines: Iterable[str]) -> Iterator[Any]:
    """Lines as examples, None for a blank one."""
    row = row_of(run.config)
    for number, line in enumerate(lines, 1):
        item = tuple(line.split("\t")) if len(row.texts) > 1 else line
        where = f"standard input, line {number}"
        yield given_example(row, item, where) if line.strip() else None


def _predictions(run: Run, examples: list[Any]) -> list[Any]:
    found = iter(predict(run, run.evaluation, [one for one in examples if one is not None]))
    return [None if one is None else next(found) for one in examples]


def _line(asked: Any, found: Any) -> str:
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
        case Continuation():  # a line break in it would make two lines of one
            return asked + " ".join(found.text.removeprefix(asked).splitlines())
    return found.text
