"""The scores of a trained run, and its translations and texts.

    evaluate(workdir, evaluation)                    # scores on a split
    translate(workdir, evaluation, lines, write)     # lines in, lines out
    generate(workdir, evaluation, prompts, write)    # prompts in, texts out

A run is what `train.py` leaves in its workdir; nothing else is needed.
"""

import codecs
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax

from mhe_jax import tasks
from mhe_jax.config import Config, EvaluationConfig, InputError
from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG, write_whole
from mhe_jax.data import EOS, Tokenizer
from mhe_jax.evaluation.generation import Generator
from mhe_jax.evaluation.run import Run, name_of
from mhe_jax.evaluation.translator import Translator
from mhe_jax.training.cluster import group

__all__ = ["evaluate", "generate", "input_lines", "translate", "usable"]

# Batches of lines that `translate` reads before it sorts them by length, and `generate` at once;
# one before the first line comes out.
BATCHES_AHEAD = 4
# Bytes of standard input that are read at once; characters of a line that is kept whole, and of a
# piece of a tokenizer: those of ours have 16.
PART, LONGEST_LINE, LONGEST_PIECE = 1 << 16, 1 << 26, 1024


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
    run = Run.load(workdir, config, evaluation, devices)
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
    workdir = Path(workdir)
    config = load_json(workdir / CONFIG)
    _check_search(workdir, config, "translate")
    if jax.process_count() > 1:
        raise InputError("translating lines takes one process")
    run = Run.load(workdir, config, evaluation, devices)
    assert isinstance(run.tokenizer, Tokenizer)
    translator = Translator(config, evaluation, run.params, run.mesh, run.tokenizer)
    number = truncated = 0
    # `lines` may wait for a person: what is read is translated before more is asked for.
    for texts in _chunks(lines, chunk, evaluation.batch_size):
        found = translator.translate(texts)
        for translation in found:
            number += 1
            if translation.truncated:
                truncated += 1
                print(
                    f"note: line {number} is cut to {config.model.max_length} tokens",
                    file=sys.stderr,
                )
        write("".join(f"{translation.text}\n" for translation in found))
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
    workdir = Path(workdir)
    config = load_json(workdir / CONFIG)
    _check_search(workdir, config, "generate")
    if jax.process_count() > 1:
        raise InputError("generating takes one process")
    run = Run.load(workdir, config, evaluation, devices)
    assert isinstance(run.tokenizer, Tokenizer)
    generator = Generator(config, evaluation, run.params, run.mesh, run.tokenizer)
    number = truncated = tokens = ended = 0
    begin = time.perf_counter()
    for texts in _chunks(prompts, chunk, evaluation.batch_size):
        found = generator.generate(texts)
        for continuation in found:
            number += 1
            tokens += len(continuation.tokens)
            ended += continuation.tokens[-1:] == [EOS]
            if continuation.truncated:
                truncated += 1
                print(f"note: of prompt {number} only the end is read", file=sys.stderr)
        write("".join(f"{continuation.text}\n" for continuation in found))
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


def _check_search(workdir: Path, config: Config, search: str) -> None:
    if tasks.of(config).search != search:
        which = ", ".join(name for name, task in tasks.TASKS.items() if task.search == search)
        raise InputError(f"{workdir} is a run of task {config.task}: only {which} {search}s")


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


def usable(workdir: Path) -> int:
    """Characters of a line that can matter to `translate`: no piece of a tokenizer holds more."""
    return LONGEST_PIECE * load_json(workdir / CONFIG).model.max_length


def input_lines(
    file: BinaryIO, name: str = "standard input", *, keep: int | None = None
) -> Iterator[str]:
    """The lines of UTF-8 text: a line feed ends one, with or without a carriage return before it.

    Nothing else ends a line, so that as many come out as `wc -l` counts (and a last one without
    an end). A byte order mark at the beginning is dropped.

    Args:
      file: read in parts, however long its lines are.
      name: for messages.
      keep: about as many characters of a line come out; what follows is checked and dropped. None
        keeps all, of a line of at most `LONGEST_LINE` characters.

    Raises:
      InputError: a line is not UTF-8, or too long, naming it.
    """
    most, number = LONGEST_LINE if keep is None else keep, 0
    while part := file.readline(PART):
        number += 1
        if number == 1:
            part = part.removeprefix(b"\xef\xbb\xbf")
        decoder = codecs.getincrementaldecoder("utf-8")()
        texts, kept, read = [], 0, 0
        while True:
            # Half a character is left for the next part.
            before = read - len(decoder.getstate()[0])
            ended = part.endswith(b"\n") or not part
            try:
                text = decoder.decode(part, final=ended)
            except UnicodeDecodeError as error:
                place = before + error.start + 1
                raise InputError(f"{name}, line {number}: is not UTF-8 (byte {place})") from None
            # Of what is dropped one character says that the line is not blank.
            texts.append(text if kept <= most else text.strip()[:1] if _blank(texts) else "")
            kept, read = kept + len(text), read + len(part)
            if keep is None and kept > most:
                raise InputError(f"{name}, line {number}: has over {most:,} characters")
            if ended:
                break
            part = file.readline(PART)
        yield "".join(texts).removesuffix("\n").removesuffix("\r")


def _blank(texts: list[str]) -> bool:
    return not any(text.strip() for text in texts)
