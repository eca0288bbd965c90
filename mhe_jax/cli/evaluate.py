"""`eval.py RUN`: score a trained run, or translate, continue or label standard input with it.

`eval.py compare` and `eval.py paper` are in the files of those names.
"""

import codecs
import contextlib
import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mhe_jax.cli import compare, paper
from mhe_jax.cli.arguments import PROCESSES, name_of, options_of, parse_fields
from mhe_jax.cli.process import called, output
from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check

ARGUMENTS = "RUN [--field value ...] [--translate | --generate | --predict]"
Action = typing.Literal["score", "translate", "generate", "predict"]
# Bytes of standard input that are read at once; most characters of a line that is kept whole, and
# of a piece of a tokenizer (ours have 16).
PART, LONGEST_LINE, LONGEST_PIECE = 1 << 16, 1 << 26, 1024


def main(arguments: Sequence[str]) -> None:
    """Ends with a line of JSON: on standard output, or on standard error if the output is text."""
    if arguments and arguments[0] in ("compare", "paper"):
        command = compare if arguments[0] == "compare" else paper
        return command.main(arguments[1:])
    # jax starts only once the arguments are right.
    from mhe_jax.training.cluster.distributed import joined, take_flags

    processes, arguments = take_flags(arguments)
    run, evaluation, action = parse(arguments)
    with joined(processes) as writes:
        from mhe_jax.evaluation import evaluate, generate, in_words, predict, translate
        from mhe_jax.training.tracking import spinner

        if action == "score":
            with spinner(f"scoring {run}") if writes else contextlib.nullcontext():
                result = evaluate(run, evaluation)
            if writes:
                if sys.stderr is not None and sys.stderr.isatty():
                    words = in_words(load_json(run / CONFIG), result)
                    print(f"{result['split']}: {words}", file=sys.stderr)
                output(json.dumps(result) + "\n")
            return
        if sys.stdin is None:
            raise InputError("standard input is closed: takes the lines to read")
        keep = usable(run) if action == "translate" else None
        lines = input_lines(sys.stdin.buffer, keep=keep)
        chunk = 1 if sys.stdin.isatty() else None
        answer = {"translate": translate, "generate": generate, "predict": predict}[action]
        print(json.dumps(answer(run, evaluation, lines, output, chunk=chunk)), file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class _EvaluationArguments(EvaluationConfig):
    """Scores a trained run, or translates, continues or labels standard input with it."""

    # Translate the lines of standard input to standard output instead of scoring.
    translate: bool = False
    # Continue the lines of standard input to standard output instead of scoring.
    generate: bool = False
    # Label the lines of standard input (texts with tabs between them, where examples have several)
    # instead of scoring.
    predict: bool = False


def parse(arguments: Sequence[str]) -> tuple[Path, EvaluationConfig, Action]:
    """Run directory, settings and what to do, of `eval.py RUN [--field value ...]`.

    Settings that are not given are as in the run's own config.

    Raises:
      InputError: no run, or a field or value that is not allowed.
    """
    program = called("eval")
    usage = f"{program} {ARGUMENTS}"
    if not arguments:
        raise InputError(f"no run given; usage: {usage}")
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(f"usage: {usage}\n\nRUN is the --workdir of a training run.")
        print(f"`{program} RUN --help` explains every field.")
        print(f"\n{called('compare')} {compare.ARGUMENTS}")
        print("    tables and plots of many runs, and of sweeps")
        print(f"\n{called('paper')}\n    the published tables beside our recomputed values")
        print(f"\n{PROCESSES}")
        raise SystemExit(0)
    if name.startswith("-"):
        raise InputError(f"the run comes before {name}; usage: {usage}")
    run = path_of(name)
    config = config_of(run)
    default = _EvaluationArguments(**dataclasses.asdict(config.evaluation))
    parsed = parse_fields(_EvaluationArguments, default, rest, f"{program} {name}", bare_flags=True)
    values = dataclasses.asdict(parsed)
    actions: tuple[Action, ...] = ("translate", "generate", "predict")
    given: list[Action] = [action for action in actions if values.pop(action)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(f'--{action}' for action in given)}: give only one")
    evaluation = EvaluationConfig(**values)
    check(dataclasses.replace(config, evaluation=evaluation), trains=False)
    action: Action = given[0] if given else "score"
    named = set(map(name_of, options_of(rest)))
    for name in ("sources", "split"):
        if given and name in named:
            raise InputError(f"--{name} is given with --{action}, which reads standard input")
    return run, evaluation, action


def usable(workdir: Path) -> int:
    """Characters of a line that can matter to `translate`: no piece of a tokenizer holds more."""
    return LONGEST_PIECE * load_json(workdir / CONFIG).model.max_length


def input_lines(file: BinaryIO, *, keep: int | None = None) -> Iterator[str]:
    """The lines of UTF-8 text: a line feed ends one, with or without a carriage return before it.

    Nothing else ends a line, so the number of lines is that of `wc -l` (plus a last one without
    an end). A byte order mark at the beginning is dropped.

    Args:
      file: is read in parts, however long its lines are.
      keep: yields about this many characters of a line; the rest is checked and dropped. None
        keeps all, of a line of at most `LONGEST_LINE` characters.

    Raises:
      InputError: a line is not UTF-8, or too long; the message names it.
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
                raise InputError(
                    f"standard input, line {number}: is not UTF-8 (byte {place})"
                ) from None
            # One character of the dropped text says that the line is not blank.
            texts.append(text if kept <= most else text.strip()[:1] if _blank(texts) else "")
            kept, read = kept + len(text), read + len(part)
            if keep is None and kept > most:
                raise InputError(f"standard input, line {number}: has over {most:,} characters")
            if ended:
                break
            part = file.readline(PART)
        yield "".join(texts).removesuffix("\n").removesuffix("\r")


def _blank(texts: list[str]) -> bool:
    return not any(text.strip() for text in texts)
