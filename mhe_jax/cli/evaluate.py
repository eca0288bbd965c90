"""`eval.py RUN`: score a trained run, or translate, continue or label standard input with it."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mhe_jax.cli.arguments import parse_fields
from mhe_jax.cli.process import output
from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.config.fields import load_json
from mhe_jax.config.files import CONFIG
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check

USAGE = "RUN [--field value ...] [--translate | --generate | --predict]"
ACTIONS = ("translate", "generate", "predict")


def main(places: list[str], options: list[str]) -> dict[str, Any] | None:
    """Scores a run, or translates, continues or labels text with it.

    RUN is the --workdir of a training run. `eval RUN --help` explains every field. With an action
    it reads lines of standard input, and the JSON of the result goes to standard error.

    --distributed auto joins the processes of a pod or cluster, as of `train`.
    """
    # jax starts only once the arguments are right.
    from mhe_jax.training.distributed import joined, take_flags

    processes, options = take_flags(options)
    run, evaluation, action = parse(places[0], options)
    with joined(processes) as writes:
        from mhe_jax.evaluation import answer_lines, evaluate, in_words

        if action is None:
            result = evaluate(run, evaluation)
            if writes and sys.stderr is not None and sys.stderr.isatty():
                words = in_words(load_json(run / CONFIG), result)
                print(f"{result['split']}: {words}", file=sys.stderr)
            return result if writes else None
        lines, chunk = input_lines(sys.stdin.buffer), 1 if sys.stdin.isatty() else None
        summary = answer_lines(action, run, evaluation, lines, output, chunk=chunk)
        print(json.dumps(summary), file=sys.stderr)
        return None


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


def parse(run: str, options: list[str]) -> tuple[Path, EvaluationConfig, str | None]:
    """Run directory, settings and one of `ACTIONS`; what is not given is as in the run's config."""
    config = config_of(run)
    default = _EvaluationArguments(**dataclasses.asdict(config.evaluation))
    values = dataclasses.asdict(parse_fields(default, options, "eval", run, bare_flags=True))
    given = [action for action in ACTIONS if values.pop(action)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(f'--{action}' for action in given)}: give only one")
    evaluation = EvaluationConfig(**values)
    check(dataclasses.replace(config, evaluation=evaluation), trains=False)
    for name in ("sources", "split"):
        if given and getattr(evaluation, name) != getattr(default, name):
            raise InputError(f"--{name} is given with --{given[0]}, which reads standard input")
    return path_of(run), evaluation, given[0] if given else None


def input_lines(file: BinaryIO) -> Iterator[str]:
    """The lines of UTF-8 text, as many as `wc -l` counts, without a byte order mark.

    Nothing but a line feed ends a line, with or without a carriage return before it.
    """
    for number, line in enumerate(file, 1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        try:
            yield line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            byte = error.start + 1
            raise InputError(f"standard input, line {number}: is not UTF-8 (byte {byte})") from None
