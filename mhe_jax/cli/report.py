"""`eval.py compare RUNS...`: tables and pictures of many runs; `eval.py paper`: published ones."""

import importlib.util
import json
from collections.abc import Sequence

from mhe_jax.cli.arguments import parse_fields
from mhe_jax.cli.process import called, output
from mhe_jax.config import Comparison, InputError, not_installed

ARGUMENTS = "RUNS... [--out DIRECTORY] [--field value ...]"


def compare(arguments: Sequence[str]) -> None:
    """Writes the report, and a line of JSON to standard output."""
    paths, comparison = parse(arguments)
    for library in ("pandas", "matplotlib"):
        if importlib.util.find_spec(library) is None:
            raise not_installed(f"compare needs {library}", "report")
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
    return paths, parse_fields(Comparison, Comparison(), rest, f"{program} RUNS...")


def paper(arguments: Sequence[str]) -> None:
    """Writes the published tables beside ours, and a line of JSON, to standard output."""
    if {"-h", "--help"} & {*arguments}:
        print(f"usage: {called('paper')}\n\nThe published tables beside our recomputed values.")
        raise SystemExit(0)
    if arguments:
        raise InputError(f"{called('paper')} takes no arguments, not {arguments[0]}")
    from mhe_jax.report.paper import tables

    text, summary = tables()
    output(f"{text}\n{json.dumps(summary)}\n")
