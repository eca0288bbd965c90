"""`eval.py paper`: the published tables beside our recomputed values."""

import json
from collections.abc import Sequence

from mhe_jax.cli.process import called, output
from mhe_jax.config import InputError


def main(arguments: Sequence[str]) -> None:
    """Writes the tables and a line of JSON to standard output."""
    if {"-h", "--help"} & {*arguments}:
        print(f"usage: {called('paper')}\n\nThe published tables beside our recomputed values.")
        raise SystemExit(0)
    if arguments:
        raise InputError(f"{called('paper')} takes no arguments, not {arguments[0]}")
    from mhe_jax.report import paper

    output(f"{paper.tables()}\n{json.dumps(paper.summary())}\n")
