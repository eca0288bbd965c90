"""`python -m mhe_jax factorize RUN NEW`: a trained run with its matrices factorized."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mhe_jax.cli.arguments import parse_two_directories
from mhe_jax.cli.process import output
from mhe_jax.config import KroneckerConfig

USAGE = "RUN NEW [--attention N] [--mlp N] [--embedding N]"
HELP = """\
NEW is RUN with its matrices as sums of Kronecker products with the given numbers of terms. Evaluate
it, or train it further by RUN's command with NEW as --workdir and these terms.

    {command} RUN NEW --attention 8 --mlp 16 --embedding 128
    {eval} NEW --checkpoint last
    {train} CONFIG ... --workdir NEW --model.kronecker.attention 8 ...

The last line is one JSON object: the relative error (Frobenius) of each matrix, and the numbers
of parameters. `{command} RUN NEW --help` explains every field."""


def main(arguments: Sequence[str]) -> None:
    """Writes the run NEW, each matrix's error to standard error, and a line of JSON as result."""
    run, new, kronecker = parse(arguments)
    from mhe_jax.training.run.fresh import factorize

    result = factorize(run, new, kronecker)
    for path, error in result["errors"].items():
        print(f"{error:10.6f}  {path}", file=sys.stderr)
    output(json.dumps(result) + "\n")


def parse(arguments: Sequence[str]) -> tuple[Path, Path, KroneckerConfig]:
    """The run, the new run and its ranks, of `factorize RUN NEW [--attention N] ...`.

    Raises:
      InputError: not two directories, or a field or value that is not allowed.
    """
    return parse_two_directories(KroneckerConfig, arguments, "factorize", USAGE, HELP)
