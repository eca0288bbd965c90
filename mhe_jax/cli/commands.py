"""`mhe-jax COMMAND`, or `python -m mhe_jax COMMAND`: every command by its name."""

from collections.abc import Sequence

from mhe_jax import __version__
from mhe_jax.cli import (
    configs,
    convert,
    data,
    demo,
    evaluate,
    export,
    factorize,
    report,
    train,
)
from mhe_jax.cli.process import called
from mhe_jax.config import InputError
from mhe_jax.config.fields import did_you_mean, nearest

COMMANDS = {
    "train": (train.main, "train a config, or a sweep of it; as train.py"),
    "eval": (
        evaluate.main,
        "score a run, or translate, continue or label text with it; as eval.py",
    ),
    "compare": (report.compare, "tables and plots of many runs; as eval.py compare"),
    "paper": (report.paper, "the published tables, recomputed; as eval.py paper"),
    "configs": (configs.main, "the shipped experiments, and their files"),
    "data": (data.main, "the texts that configs read: where they come from, and fetching them"),
    "export": (export.main, "a trained run as files that other programs read"),
    "convert": (
        convert.main,
        "a trained run with another attention, or a transformers model as a run",
    ),
    "factorize": (factorize.main, "a trained run with matrices of fewer parameters"),
    "demo": (demo.main, "what a run of the demo translates, with a mark beside what is wrong"),
}


def main(arguments: Sequence[str]) -> None:
    """Calls the command that comes first with the arguments after it.

    Raises:
      InputError: no command is given, or an unknown one.
    """
    usage = f"{called('COMMAND')} [arguments]"
    if not arguments:
        raise InputError(
            f"no command given: takes one of {', '.join(COMMANDS)}; usage: {usage}; --help says "
            "what each does"
        )
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(f"usage: {usage}\n")
        for command, (_, summary) in COMMANDS.items():
            print(f"  {command:9}  {summary}")
        print(f"\n`{called('COMMAND')} --help` explains one.")
        raise SystemExit(0)
    if name == "--version":
        print(f"mhe_jax {__version__}")
        raise SystemExit(0)
    if name not in COMMANDS:
        near = did_you_mean(nearest(name, list(COMMANDS)))
        raise InputError(f"no command {name}: takes one of {', '.join(COMMANDS)}{near}")
    command, _ = COMMANDS[name]
    command(rest)
