"""`mhe-jax configs`: the experiments that come with the package, and their files."""

from collections.abc import Sequence

from mhe_jax.cli.process import called, output
from mhe_jax.config import InputError
from mhe_jax.config.loading import about_config, config_file, shipped_configs

HELP = """\
Without arguments, lists the shipped configs with a line each, and their variants; any command that
takes a config takes such a name, with a variant as in `multi30k:small`. `show NAME`
prints the file, to change it:

    {program} show multi30k > mine.py
    {train} mine.py --workdir runs/mine"""


def main(arguments: Sequence[str]) -> None:
    """Lists the shipped configs, or prints one.

    Raises:
      InputError: other arguments, or no config of that name.
    """
    program = called("configs")
    usage = f"{program} [show NAME]"
    match list(arguments):
        case []:
            width = max(map(len, shipped_configs()))
            for name in shipped_configs():
                about, variants = about_config(name)
                output(f"{name:{width}}  {about.partition(chr(10))[0]}\n")
                if variants:
                    output(f"{'':{width}}  :{' :'.join(variants)}\n")
        case ["-h" | "--help"] | ["show", "-h" | "--help"]:
            print(f"usage: {usage}\n\n{HELP.format(program=program, train=called('train'))}")
        case ["show", name]:
            path, _ = config_file(name)
            output(path.read_text(encoding="utf-8"))
        case _:
            raise InputError(
                f"{' '.join(arguments)!r}: takes nothing, or show NAME; usage: {usage}"
            )
