"""`mhe-jax data`: the texts that shipped configs read."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mhe_jax.cli.process import called, output
from mhe_jax.config import InputError
from mhe_jax.config.fields import did_you_mean, nearest
from mhe_jax.config.places import check_scheme

HELP = """\
Without arguments, lists what there is. With a name, checks the files of a text in DIR (data/NAME
unless given), fetches those that are missing, and says what is where; or prepares a data set of
TFDS, where TFDS keeps them ($TFDS_DATA_DIR, else ~/tensorflow_datasets):

    {program} multi30k
    {program} glue/rte                 # then --data.train tfds:glue/rte:train

Nothing that is there is written over. The last line is one JSON object."""
OF_TFDS = "glue/TASK, super_glue/TASK, squad, wmt14_translate/de-en, wiki40b/en and others"


def main(arguments: Sequence[str]) -> None:
    """Lists the texts, or gets one.

    Raises:
      InputError: other arguments, no text of that name, or it cannot be fetched.
    """
    program = called("data")
    usage = f"{program} [NAME [--directory DIR]]"
    match list(arguments):
        case []:
            _list()
        case [*given] if {"-h", "--help"} & set(given):
            print(f"usage: {usage}\n\n{HELP.format(program=program)}")
        case [name] if name and not name.startswith("-"):
            _get(name, None)
        case [name, "--directory", directory] | ["--directory", directory, name]:
            _get(name, directory)
        case [name, option] if option.startswith("--directory="):
            _get(name, option.removeprefix("--directory="))
        case _:
            raise InputError(f"{' '.join(arguments)!r}: takes nothing, or a name; usage: {usage}")


def _list() -> None:
    from mhe_jax.data.published import PUBLISHED

    width = max(map(len, PUBLISHED))
    for name, data in PUBLISHED.items():
        size = sum(text.size for text in data.files.values())
        output(f"{name:{width}}  {data.about}; {size / 1e6:.0f} MB; {data.licence}; {data.url}\n")
    output(f"{'TFDS':{width}}  {OF_TFDS}: any data set that it has\n")


def _get(name: str, directory: str | None) -> None:
    from mhe_jax.data.published import PUBLISHED

    if name in PUBLISHED:
        from mhe_jax.data import fetching

        check_scheme("--directory", directory or "", ())
        place = Path(directory or f"data/{name}").expanduser()
        files = fetching.get(name, place, lambda line: print(line, file=sys.stderr))
        found = {"directory": str(place), "files": [file.name for file in files]}
    elif directory is not None:
        raise InputError(
            f"--directory {directory}: {name} lies where TFDS keeps it ($TFDS_DATA_DIR)"
        )
    else:
        from mhe_jax.data import tfds_source  # slow to import

        try:
            found = tfds_source.prepare(name)
        except InputError as error:
            near = did_you_mean(nearest(name, list(PUBLISHED)))
            raise InputError(f"{error}{near}") from None
    output(json.dumps({"data": name, **found}) + "\n")
