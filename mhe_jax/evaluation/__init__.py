"""The scores of a trained run, and its translations and texts.

    evaluate(workdir, evaluation)                    # scores on a split
    translate(workdir, evaluation, lines, write)     # lines in, lines out
    generate(workdir, evaluation, prompts, write)    # prompts in, texts out

A run is what `train.py` leaves in its workdir; nothing else is needed.
"""

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from mhe_jax import tasks
from mhe_jax.attention import recording
from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG, write_whole
from mhe_jax.data import EOS
from mhe_jax.evaluation.generation import Continuation, Generator
from mhe_jax.evaluation.run import Run, name_of
from mhe_jax.evaluation.translator import Translation, Translator
from mhe_jax.training.cluster import group

__all__ = ["evaluate", "generate", "translate"]

# Batches of lines that `translate` reads before it sorts them by length, and `generate` at once;
# one before the first line comes out.
BATCHES_AHEAD = 4
# What a search gives for a line.
A = TypeVar("A", Translation, Continuation)


def evaluate(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    *,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """The results on `evaluation.split`, also written to WORKDIR/eval_SPLIT.json.

    Where `evaluation.sources` take the place of the split's, the first one's name takes SPLIT's.

    Args:
      workdir: of the run.
      evaluation: checkpoint, split and search.
      devices: to compute on; None is all there are.

    Raises:
      InputError: no such run, checkpoint or split, or something is wrong with the text.
    """
    workdir = Path(workdir)
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    # The cache is the evaluator's own: a run from somebody else could name any directory.
    data = dataclasses.replace(config.data, cache_directory=None)
    if evaluation.sources:
        data = dataclasses.replace(data, **{evaluation.split: evaluation.sources})
    config = dataclasses.replace(config, data=data)
    group.check()
    run = Run.load(workdir, config, devices)
    with recording():
        result = tasks.of(config).evaluate(run)
    if jax.process_index() == 0:
        path = workdir / f"eval_{name_of(evaluation)}.json"
        write_whole(path, json.dumps(result, indent=2) + "\n")
    return result


def translate(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    lines: Iterable[str],
    write: Callable[[str], None],
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """One line out for each line in, in their order; a blank line stays an empty one.

    Args:
      workdir: of a translation run.
      evaluation: checkpoint and search.
      lines: texts, without their ends.
      write: gets a few translated lines at a time, each with its end, as soon as they are there.
      chunk: lines to read before any is translated: more are faster, fewer answer sooner; None is
        a few batches, 1 is for a person at a terminal.
      devices: to compute on; None is all there are.

    A line longer than `model.max_length` tokens is cut, with a note on standard error.

    Returns:
      Counts and speed.

    Raises:
      InputError: not a translation run, or no such checkpoint.
    """
    run = _load(Path(workdir), evaluation, "translate", "translating lines", devices)
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
    """One line out for each prompt, in their order: the prompt and what follows it.

    Args:
      workdir: of a run of task `lm`.
      evaluation: checkpoint, temperature, top_k, top_p, seed, and extra_length new tokens at most.
      prompts: texts, without their ends; an empty one is a text from its beginning.
      write: gets lines, each with its end, as soon as they are there.
      chunk: prompts to read before any is continued; None is a few batches.
      devices: to compute on; None is all there are.

    Returns:
      Counts, speed and settings.

    Raises:
      InputError: not a run of task `lm`, or no such checkpoint.
    """
    run = _load(Path(workdir), evaluation, "generate", "generating", devices)
    generator = Generator(run)
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
        # With compiling.
        "seconds": round(time.perf_counter() - begin, 3),
        "checkpoint": evaluation.checkpoint,
        "steps": run.steps,
        "temperature": evaluation.temperature,
        "top_k": evaluation.top_k,
        "top_p": evaluation.top_p,
        "seed": evaluation.seed,
    }


def _load(workdir: Path, evaluation: EvaluationConfig, search: str, name: str, devices: Any) -> Run:
    """A run whose task has this search; `name` is for messages."""
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    if tasks.of(config).search != search:
        which = ", ".join(name for name, task in tasks.TASKS.items() if task.search == search)
        raise InputError(f"{workdir} is a run of task {config.task}: only {which} {search}s")
    if jax.process_count() > 1:
        raise InputError(f"{name} takes one process")
    return Run.load(workdir, config, devices)


def _answers(
    answer: Callable[[list[str]], list[A]],
    lines: Iterable[str],
    chunk: int | None,
    run: Run,
    note: str,
    write: Callable[[str], None],
) -> Iterator[A]:
    """The answers to lines, each already written; `note` tells of one that was truncated."""
    number = 0
    # `lines` may wait for a person: what is read is answered before more is asked for.
    for texts in _chunks(lines, chunk, run.evaluation.batch_size):
        found = answer(texts)
        for one in found:
            number += 1
            if one.truncated:
                print(f"note: {note.format(number)}", file=sys.stderr)
        write("".join(f"{one.text}\n" for one in found))
        yield from found


def _chunks(lines: Iterable[str], chunk: int | None, batch: int) -> Iterator[list[str]]:
    """Some lines at a time; those before a bad one still come out before its error."""
    iterator = iter(lines)
    sizes = itertools.chain([chunk or batch], itertools.repeat(chunk or BATCHES_AHEAD * batch))
    failure = None
    while failure is None:
        texts: list[str] = []
        try:
            texts.extend(itertools.islice(iterator, next(sizes)))
        except InputError as error:
            failure = error
        if texts:
            yield texts
        elif failure is None:
            return
    raise failure
