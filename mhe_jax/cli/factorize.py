"""`python -m mhe_jax factorize RUN NEW`: a trained run with its matrices factorized."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mhe_jax.cli.arguments import parse_fields
from mhe_jax.cli.process import called, output
from mhe_jax.config import InputError, KroneckerConfig
from mhe_jax.config.places import path_of

USAGE = "{command} RUN NEW [--attention N] [--mlp N] [--embedding N]"
HELP = """\
NEW is RUN with its matrices as sums of Kronecker products, of these numbers of terms: to be
evaluated, or trained further by the command of RUN with NEW as --workdir and these terms.

    {command} RUN NEW --attention 8 --mlp 16 --embedding 128
    {eval} NEW --checkpoint last
    {train} CONFIG ... --workdir NEW --model.kronecker.attention 8 ...

The last line is one JSON object: the relative error (Frobenius) of each matrix, and the numbers
of parameters. `{command} RUN NEW --help` explains every field."""


def main(arguments: Sequence[str]) -> None:
    """Writes the run NEW, each matrix's error to standard error, and a line of JSON as result."""
    run, new, kronecker = parse(arguments)
    from mhe_jax.training.run.factorize import factorize

    result = factorize(run, new, kronecker)
    for path, error in result["errors"].items():
        print(f"{error:10.6f}  {path}", file=sys.stderr)
    output(json.dumps(result) + "\n")


def parse(arguments: Sequence[str]) -> tuple[Path, Path, KroneckerConfig]:
    """The run, the new run and its ranks, of `factorize RUN NEW [--attention N] ...`.

    Raises:
      InputError: not two directories, or a field or value that is not allowed.
    """
    command = called("factorize")
    usage = USAGE.format(command=command)
    if not arguments or arguments[0] in ("-h", "--help"):
        text = HELP.format(command=command, eval=called("eval"), train=called("train"))
        print(f"usage: {usage}\n\n{text}")
        raise SystemExit(0)
    if len(arguments) < 2 or any(path.startswith("-") for path in arguments[:2]):
        raise InputError(f"two directories come first; usage: {usage}")
    run, new, *options = arguments
    given = parse_fields(KroneckerConfig, KroneckerConfig(), options, f"{command} RUN NEW")
    return path_of(run), path_of(new), given
