"""`eval.py RUN`: score a trained run, or translate, continue or label standard input with it.

`eval.py compare` and `eval.py paper` are in `report.py`.
"""

import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mhe_jax.cli import report
from mhe_jax.cli.arguments import PROCESSES, parse_fields
from mhe_jax.cli.process import called, output
from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check

ARGUMENTS = "RUN [--field value ...] [--translate | --generate | --predict]"
Action = typing.Literal["score", "translate", "generate", "predict"]


def main(arguments: Sequence[str]) -> None:
    """Ends with a line of JSON: on standard output, or on standard error if the output is text."""
    if arguments and arguments[0] in ("compare", "paper"):
        command = report.compare if arguments[0] == "compare" else report.paper
        return command(arguments[1:])
    # jax starts only once the arguments are right.
    from mhe_jax.training.cluster.distributed import joined, take_flags

    processes, arguments = take_flags(arguments)
    run, evaluation, action = parse(arguments)
    with joined(processes) as writes:
        from mhe_jax.evaluation import evaluate, generate, in_words, predict, translate

        if action == "score":
            result = evaluate(run, evaluation)
            if writes:
                if sys.stderr is not None and sys.stderr.isatty():
                    words = in_words(load_json(run / CONFIG), result)
                    print(f"{result['split']}: {words}", file=sys.stderr)
                output(json.dumps(result) + "\n")
            return
        lines = input_lines(sys.stdin.buffer)
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
        print(f"\n{called('compare')} {report.ARGUMENTS}")
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
    for name in ("sources", "split"):
        if given and getattr(evaluation, name) != getattr(default, name):
            raise InputError(f"--{name} is given with --{action}, which reads standard input")
    return run, evaluation, action


def input_lines(file: BinaryIO) -> Iterator[str]:
    """The lines of UTF-8 text: a line feed ends one, with or without a carriage return before it.

    Nothing else ends a line, so the number of lines is that of `wc -l` (plus a last one without
    an end). A byte order mark at the beginning is dropped.

    Raises:
      InputError: a line is not UTF-8; the message names it.
    """
    for number, line in enumerate(file, 1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        try:
            yield line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            byte = error.start + 1
            raise InputError(f"standard input, line {number}: is not UTF-8 (byte {byte})") from None
