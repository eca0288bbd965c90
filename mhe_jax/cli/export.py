"""`python -m mhe_jax export RUN OUT --to FORMAT`: a trained run as files for other programs."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from mhe_jax.cli.arguments import parse_two_directories
from mhe_jax.cli.process import output
from mhe_jax.config import InputError
from mhe_jax.interchange import FORMATS, export

USAGE = "RUN OUT --to FORMAT [--checkpoint best]"
HELP = """\
OUT is a new directory with RUN's best parameters in a format that other programs read:

{formats}

What a format cannot hold is refused with the reason. The last line is one JSON object.
`{command} RUN OUT --help` explains every field; docs/export.md has examples."""


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


def main(arguments: Sequence[str]) -> None:
    """Writes OUT, and a line of JSON as result."""
    run, out, given = parse(arguments)
    result = export(
        run,
        out,
        given.to,
        checkpoint=given.checkpoint,
        average_checkpoints=given.average_checkpoints,
    )
    output(json.dumps(result) + "\n")


def parse(arguments: Sequence[str]) -> tuple[Path, Path, ExportArguments]:
    """The run, the new directory and the settings, of `export RUN OUT --to FORMAT ...`.

    Raises:
      InputError: not two directories, no format, or a field or value that is not allowed.
    """
    width = max(map(len, FORMATS))
    formats = "\n".join(f"    {name:{width}}  {said}" for name, said in FORMATS.items())
    text = HELP.replace("{formats}", formats)
    run, out, given = parse_two_directories(ExportArguments, arguments, "export", USAGE, text)
    if not given.to:
        raise InputError(f"no format is given: takes --to {' or '.join(FORMATS)}")
    return run, out, given
