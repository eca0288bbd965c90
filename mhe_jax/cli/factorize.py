"""`python -m mhe_jax factorize RUN NEW`: a trained run with its matrices factorized."""

import json
import sys
from collections.abc import Sequence

from mhe_jax.cli.arguments import parse_factorize_arguments
from mhe_jax.cli.process import output


def main(arguments: Sequence[str]) -> None:
    """Writes the run NEW, each matrix's error to standard error, and a line of JSON as result."""
    run, new, kronecker = parse_factorize_arguments(arguments)
    from mhe_jax.training.run.factorize import factorize

    result = factorize(run, new, kronecker)
    for path, error in result["errors"].items():
        print(f"{error:10.6f}  {path}", file=sys.stderr)
    output(json.dumps(result) + "\n")
