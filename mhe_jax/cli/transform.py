"""Commands that read a run and make something of it: export, convert, factorize."""

import dataclasses
import sys
from typing import Any

from mhe_jax import interchange
from mhe_jax.cli.arguments import parse_fields
from mhe_jax.config import ConversionConfig, InputError, KroneckerConfig
from mhe_jax.config.places import path_of


@dataclasses.dataclass(frozen=True)
class ExportArguments:
    """Writes a trained run as files that other programs read."""

    # The format, one of those that `export --help` lists.
    to: str = ""
    # `best` on the validation split, `last`, or a step number; None: the run's own
    # evaluation.checkpoint.
    checkpoint: str | None = None
    # Mean of this many checkpoints ending with the newest (needs checkpoint=last); None likewise.
    average_checkpoints: int | None = None


def export(places: list[str], options: list[str]) -> dict[str, Any]:
    given = parse_fields(ExportArguments(), options, "export", *places)
    return interchange.export(*places, **dataclasses.asdict(given))


FORMATS = "\n".join(f"    {name:12}  {said}" for name, said in interchange.FORMATS.items())
export.__doc__ = f"""A trained run as files that other programs read.

OUT is a new directory with RUN's best parameters in one of these formats:

{FORMATS}

What a format cannot hold is refused with the reason. The last line is one JSON object.
`export RUN OUT --help` explains every field; docs/export.md has examples.
"""


def convert(places: list[str], options: list[str]) -> dict[str, Any]:
    """A trained run with another attention, or a transformers model as a run.

    NEW is RUN with each attention sublayer replaced by the closest one of KIND. Evaluate it, or
    train it further for a part of the steps that RUN took (uptraining).

        convert RUN NEW --kind gqa --num_kv_heads 2
        eval NEW --checkpoint last
        train CONFIG ... --train.init_from NEW --workdir NEWER

    It is fitted on 1,000 rows of RUN's training text, or on `--rows N`; `--rows 0` needs no text.
    The last line is one JSON object: the relative error (Frobenius) of each sublayer's output on
    those rows, before and after the fit, and the numbers of parameters in attention.

        convert SOURCE NEW

    makes a run of a transformers model, from the weights and the tokenizer.json in the directory
    SOURCE. Another attention is a second step: `convert` of that run, with a --kind.

    `convert RUN NEW --help` explains every field.
    """
    wanted = parse_fields(ConversionConfig(), options, "convert", *places)
    run, new = map(path_of, places)
    from mhe_jax.interchange import uptraining
    from mhe_jax.interchange.huggingface.reading import is_foreign, make_run

    if is_foreign(run):
        if wanted != ConversionConfig():
            first = f"first `convert {run} NEW`, then `convert NEW` with --kind"
            raise InputError(f"{run} is not a run yet: {first}")
        return make_run(run, new)
    result = uptraining.convert(run, new, wanted)
    for path, errors in result["errors"].items() if wanted.rows else ():
        print(f"{errors['before']:.6f} -> {errors['after']:.6f}  {path}", file=sys.stderr)
    return result


def factorize(places: list[str], options: list[str]) -> dict[str, Any]:
    """A trained run with matrices of fewer parameters.

    NEW is RUN with its matrices as sums of Kronecker products with the given numbers of terms.
    Evaluate it, or train it further by RUN's command with NEW as --workdir and these terms.

        factorize RUN NEW --attention 8 --mlp 16 --embedding 128
        eval NEW --checkpoint last
        train CONFIG ... --workdir NEW --model.kronecker.attention 8 ...

    The last line is one JSON object: the relative error (Frobenius) of each matrix, and the numbers
    of parameters. `factorize RUN NEW --help` explains every field.
    """
    terms = parse_fields(KroneckerConfig(), options, "factorize", *places)
    run, new = map(path_of, places)
    from mhe_jax.training.from_run import factorize

    result = factorize(run, new, terms)
    for path, error in result["errors"].items():
        print(f"{error:10.6f}  {path}", file=sys.stderr)
    return result
