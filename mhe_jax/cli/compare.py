"""`eval.py compare RUNS...`: tables and plots of many runs, and of sweeps."""

import json
from collections.abc import Sequence

from mhe_jax.cli.arguments import parse_fields
from mhe_jax.cli.process import called, output
from mhe_jax.config import Comparison, InputError

ARGUMENTS = "RUNS... [--out DIRECTORY] [--field value ...]"


def main(arguments: Sequence[str]) -> None:
    """Writes the report, and a line of JSON to standard output."""
    paths, comparison = parse(arguments)
    from mhe_jax.report import report

    output(json.dumps(report.compare(paths, comparison)) + "\n")


def parse(arguments: Sequence[str]) -> tuple[list[str], Comparison]:
    """The paths of runs and the settings of `eval.py compare RUNS... [--field value ...]`.

    Raises:
      InputError: no runs, or a field or value that is not allowed.
    """
    program = called("compare")
    first = next((i for i, part in enumerate(arguments) if part.startswith("-")), len(arguments))
    paths, rest = list(arguments[:first]), arguments[first:]
    if not paths and not {"-h", "--help"} & set(rest):
        raise InputError(f"no runs given; usage: {program} {ARGUMENTS}")
    settings = parse_fields(Comparison, Comparison(), rest, f"{program} RUNS...")
    if any(length < 1 for length in settings.lengths):
        raise InputError(f"--lengths is {settings.lengths}: takes 1 or more")
    return paths, settings
