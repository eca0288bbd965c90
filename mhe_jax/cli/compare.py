"""`eval.py compare RUNS...`: tables and plots of many runs, and of sweeps."""

import json
from collections.abc import Sequence

from mhe_jax.cli.arguments import parse_compare_arguments
from mhe_jax.cli.process import output


def main(arguments: Sequence[str]) -> None:
    """Writes the report, and a line of JSON to standard output."""
    paths, comparison = parse_compare_arguments(arguments)
    from mhe_jax.report import report

    output(json.dumps(report.compare(paths, comparison)) + "\n")
