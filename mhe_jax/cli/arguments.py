"""Command lines, parsed by tyro and checked by pydantic.

A user's mistake becomes one line: an `InputError` that names the field or file and what is allowed.
Nothing here imports jax, so that a typo costs no start-up time and
`jax.distributed.initialize` can still come first.
"""

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from mhe_jax.cli.process import called
from mhe_jax.config import Config, InputError, Target
from mhe_jax.config.fields import checked, set_field, value_of
from mhe_jax.config.files import CONFIG
from mhe_jax.config.loading import about_config, config_of, load_config, shipped_configs
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check

T = TypeVar("T")
TRAIN_USAGE = "CONFIG[:VARIANT] [--field value ...] [--sweep FIELD=A,B] [--seeds N] [--evaluate]"
PROCESSES = """\
--distributed auto joins the processes of a pod or cluster; elsewhere give
--coordinator HOST:PORT --num_processes N --process_id I. Either may add
--process_timeout SECONDS; see docs/pods.md."""
TRAIN_HELP = f"""\
usage: {{program}} {TRAIN_USAGE}

Trains, or goes on where an earlier run of the same --workdir stopped.
`{{program}} CONFIG --help` explains every field.

--sweep and --seeds run every combination of values and seeds, one after the other;
--evaluate scores each of these runs once it is trained.
--compile_only --topology v5e:16x16 [--num_slices 2] [--search_batch] trains nothing:
it compiles the train step for devices that need not be there, and says whether it
fits.

{PROCESSES}

CONFIG is a file, or the name of a shipped one:
    {{shipped}}"""
# What a run that starts from another does not take from it.
OWN = ("dropout_rate", "num_classes", "num_spans", "pooling", "dtype", "remat", "scan_layers")
OWN += ("kronecker.apply",)
ATTENTIONS = ("attention", *(f"attention_by_role.{r}" for r in ("encoder", "decoder", "cross")))
OWN += tuple(f"{a}.{f}" for a in ATTENTIONS for f in ("dropout_rate", "form", "engine"))


def parse_train_arguments(arguments: Sequence[str]) -> Config:
    """The checked config of `train.py CONFIG [--dotted.field value ...]`."""
    program = called("train")
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        shipped = "\n    ".join(shipped_configs())
        print(TRAIN_HELP.format(program=program, shipped=shipped))
        raise SystemExit(0)
    if not name or name.startswith("-"):
        raise InputError(f"the config comes first; usage: {program} {TRAIN_USAGE}")
    default, (about, _) = load_config(name), about_config(name)

    def parse(default: Config) -> Config:
        return parse_fields(Config, default, rest, f"{program} {name}", about=about)

    config = parse(default)
    if config.train.init_from is not None:
        begun = (path_of(config.workdir) / CONFIG).is_file()
        theirs = config_of(config.workdir if begun else config.train.init_from, "train.init_from")
        shaped = set_field(default, "model", theirs.model)
        for own in (f"model.{field}" for field in OWN):
            shaped = set_field(shaped, own, value_of(default, own))
        config = parse(shaped)
    check(config)
    return config


def parse_target(arguments: Sequence[str]) -> tuple[Target | None, list[str]]:
    """The target of `train.py CONFIG --compile_only --topology ...`, and the other arguments.

    None without `--compile_only`. With it, jax, which has not started, is restricted to the CPU.
    """
    flags = [field.name for field in dataclasses.fields(Target)]
    own, others = [], []
    for option in options_of(arguments):
        name = option[0].partition("=")[0].removeprefix("--").replace("-", "_")
        (own if name in flags else others).extend(option)
    target = parse_fields(Target, Target(), own, called("train"), bare_flags=True)
    if own and not (target.compile_only and target.topology):
        raise InputError("--compile_only and --topology go together; see --help")
    if target.compile_only:
        os.environ["JAX_PLATFORMS"] = "cpu"
    return target if target.compile_only else None, others


def parse_fields(
    cls: type[T],
    default: T,
    arguments: Sequence[str],
    prog: str,
    *,
    bare_flags: bool = False,
    about: str | None = None,
) -> T:
    """`default` with the overrides of a command line, each in the range of its field.

    With `bare_flags` a boolean field takes no value: its name sets it. `--help` begins with
    `about`, else with the docstring of the class.

    Raises:
      InputError: an unknown field, or a value that is not allowed.
    """
    import tyro  # slow

    flags = tyro.conf.FlagCreatePairsOff if bare_flags else tyro.conf.FlagConversionOff
    how = {"default": default, "prog": prog, "description": about, "use_underscores": True}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            found = tyro.cli(cls, args=arguments, config=[flags], **how)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise InputError(_one_line(complaint.getvalue())) from None
    return checked(cls, found)


def _one_line(box: str) -> str:
    """What stands in a box of tyro's: the complaint, and the names of what may have been meant."""
    text = re.sub(r"^[╭╰].*$|[│]", "", box, flags=re.MULTILINE)
    complaint, *more = re.split(r"─+", text)
    near = re.findall(r"(--\S+)", more[0]) if more and "Perhaps" in more[0] else []
    hint = f"; did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
    complaint = complaint.partition("Got errors:")[0]
    complaint = complaint.replace("Unrecognized options:", "unknown field")
    return " ".join(complaint.split()) + hint


def parse_two_directories(
    cls: type[T], arguments: Sequence[str], command: str, usage: str, text: str
) -> tuple[Path, Path, T]:
    """Both directories and the settings, of `COMMAND ONE OTHER [--field value ...]`.

    Below `usage` the help has `text`, with `{command}`, `{eval}` and `{train}` as they are called.

    Raises:
      InputError: not two directories, or a field or value that is not allowed.
    """
    program = called(command)
    if {"-h", "--help"} & {*arguments[:2]}:
        names = {"command": program, "eval": called("eval"), "train": called("train")}
        print(f"usage: {program} {usage}\n\n{text.format(**names)}")
        raise SystemExit(0)
    if len(arguments) < 2 or any(path.startswith("-") for path in arguments[:2]):
        raise InputError(f"two directories come first; usage: {program} {usage}")
    one, other, *options = arguments
    prog = " ".join([program, *usage.split()[:2]])
    return path_of(one), path_of(other), parse_fields(cls, cls(), options, prog)


def options_of(arguments: Sequence[str]) -> list[list[str]]:
    """The command line, split before each `--`."""
    options: list[list[str]] = []
    for token in arguments:
        if token.startswith("--") or not options:
            options.append([token])
        else:
            options[-1].append(token)
    return options
