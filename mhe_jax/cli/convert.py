"""`python -m mhe_jax convert RUN NEW --kind KIND`: a trained run with another attention.

And `convert SOURCE NEW`: a model of transformers, in the directory SOURCE, as a run.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mhe_jax.cli.arguments import parse_two_directories
from mhe_jax.cli.process import output
from mhe_jax.config import ConversionConfig, InputError

USAGE = "RUN NEW --kind KIND [--num_kv_heads N] [--rows N] ..."
HELP = """\
NEW is RUN with each attention sublayer replaced by the closest one of KIND. Evaluate it, or train
it further for a part of the steps that RUN took (uptraining).

    {command} RUN NEW --kind gqa --num_kv_heads 2
    {eval} NEW --checkpoint last
    {train} CONFIG ... --train.init_from NEW --workdir NEWER

It is fitted on 1,000 rows of RUN's training text, or on `--rows N`; `--rows 0` needs no text.
The last line is one JSON object: the relative error (Frobenius) of each sublayer's output on those
rows, before and after the fit, and the numbers of parameters in attention.

    {command} SOURCE NEW

makes a run of a transformers model, from the weights and the tokenizer.json in the directory
SOURCE. Another attention is a second step: `convert` of that run, with a --kind.

`{command} RUN NEW --help` explains every field."""


def main(arguments: Sequence[str]) -> None:
    """Writes the run NEW, each sublayer's errors to standard error, and a line of JSON."""
    run, new, wanted = parse(arguments)
    from mhe_jax.interchange.huggingface.reading import is_foreign, make_run
    from mhe_jax.interchange.uptraining import convert

    if is_foreign(run):
        if wanted != ConversionConfig():
            raise InputError(
                f"{run} is not a run yet: first `convert {run} NEW`, then `convert NEW` with --kind"
            )
        output(json.dumps(make_run(run, new)) + "\n")
        return
    result = convert(run, new, wanted)
    if not wanted.rows:
        print("errors of the layers: not measured (--rows 0)", file=sys.stderr)
    for path, errors in result["errors"].items() if wanted.rows else ():
        print(f"{errors['before']:.6f} -> {errors['after']:.6f}  {path}", file=sys.stderr)
    output(json.dumps(result) + "\n")


def parse(arguments: Sequence[str]) -> tuple[Path, Path, ConversionConfig]:
    """The run, the new run and its attention, of `convert RUN NEW --kind KIND ...`.

    Raises:
      InputError: not two directories, or a field or value that is not allowed.
    """
    return parse_two_directories(ConversionConfig, arguments, "convert", USAGE, HELP)
