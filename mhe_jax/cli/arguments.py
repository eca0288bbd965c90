"""Command lines, parsed by tyro and checked.

A user's mistake becomes one line: an `InputError` that names the field or file and what is allowed.
Nothing here imports jax, so that a typo costs no start-up time and
`jax.distributed.initialize` can still come first.
"""

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from mhe_jax.cli.process import called
from mhe_jax.config import (
    Config,
    InputError,
    Target,
)
from mhe_jax.config.fields import allowed_values, hints_of, nearest_choices, unknown_field
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
TARGET_USAGE = "--compile_only --topology v5e:16x16 [--num_slices 2] [--search_batch]"


def parse_train_arguments(arguments: Sequence[str]) -> Config:
    """The checked config of `train.py CONFIG [--dotted.field value ...]`."""
    program = called("train")
    usage = f"{program} {TRAIN_USAGE}"
    if not arguments:
        raise InputError(f"no config given; usage: {usage}")
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(f"usage: {usage}\n")
        print("Trains, or goes on where an earlier run of the same --workdir stopped.")
        print(f"`{program} CONFIG --help` explains every field.\n")
        print("--sweep and --seeds run every combination of values and seeds, one after the other;")
        print("--evaluate scores each of these runs once it is trained.")
        print(f"{TARGET_USAGE} trains nothing:")
        print("it compiles the train step for devices that need not be there, and says whether it")
        print(f"fits.\n\n{PROCESSES}")
        print("\nCONFIG is a file, or the name of a shipped one:")
        for shipped in shipped_configs():
            print(f"    {shipped}")
        raise SystemExit(0)
    if name.startswith("-"):
        raise InputError(f"the config comes before {name}; usage: {usage}")

    def parse(default: Config) -> Config:
        return parse_fields(Config, default, rest, f"{program} {name}", about=about_config(name))

    default = load_config(name)
    config = parse(default)
    if config.train.init_from is not None:
        begun = (path_of(config.workdir) / CONFIG).is_file()
        config = parse(_shaped_as(config.workdir if begun else config.train.init_from, default))
    check(config)
    return config


def _shaped_as(run: str, config: Config) -> Config:
    """`config` with the encoder of another run, but its own head, dropout rates and computation."""

    def kept(given: Any, own: Any, *names: str) -> Any:
        return dataclasses.replace(given, **{name: getattr(own, name) for name in names})

    theirs, ours = config_of(run, "train.init_from").model, config.model
    head, computed = ("num_classes", "num_spans", "pooling"), ("dtype", "remat", "scan_layers")
    attention = "dropout_rate", "form", "engine"
    by_role = {
        role: kept(given, getattr(ours.attention_by_role, role), *attention)
        for role, given in vars(theirs.attention_by_role).items()
    }
    model = dataclasses.replace(
        kept(theirs, ours, "dropout_rate", *head, *computed),
        attention=kept(theirs.attention, ours.attention, *attention),
        attention_by_role=type(theirs.attention_by_role)(**by_role),
        kronecker=kept(theirs.kronecker, ours.kronecker, "apply"),
    )
    return dataclasses.replace(config, model=model)


def parse_target(arguments: Sequence[str]) -> tuple[Target | None, list[str]]:
    """The target of `train.py CONFIG --compile_only --topology ...`, and the other arguments.

    None without `--compile_only`. With it, jax, which has not started, is restricted to the CPU.
    """
    own: dict[str, list[str]] = {}
    others: list[str] = []
    for option in options_of(arguments):
        name = name_of(option)
        if name in ("compile_only", *hints_of(Target)):
            own[name] = option
        else:
            others += option
    if "compile_only" not in own:
        for option in own.values():
            raise InputError(f"{option[0]} goes with --compile_only; usage: {TARGET_USAGE}")
        return None, others
    if len(own["compile_only"]) > 1:
        raise InputError(f"--compile_only is {own['compile_only'][1]!r}: takes no value")
    del own["compile_only"]
    tokens = [token for option in own.values() for token in option]
    target = parse_fields(Target, Target(), tokens, called("train"), bare_flags=True)
    if not target.topology:
        raise InputError(f"--compile_only needs --topology; usage: {TARGET_USAGE}")
    if target.num_slices < 1:
        raise InputError(f"--num_slices is {target.num_slices}: takes 1 or more")
    os.environ["JAX_PLATFORMS"] = "cpu"
    return target, others


def parse_fields(
    cls: type[T],
    default: T,
    arguments: Sequence[str],
    prog: str,
    *,
    bare_flags: bool = False,
    about: str | None = None,
) -> T:
    """`default` with the overrides of a command line, by tyro; its boxed errors become one line.

    With `bare_flags` a boolean field takes no value: its name sets it. `--help` begins with
    `about`, else with the docstring of the class.
    """
    import tyro

    if about is not None and sys.stdout is not None:  # a terminal may show ASCII only
        about = about.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
    how = (tyro.conf.FlagCreatePairsOff if bare_flags else tyro.conf.FlagConversionOff,)

    def parse(tokens: Sequence[str]) -> T:
        return tyro.cli(
            cls,
            default=default,
            args=tokens,
            prog=prog,
            description=about,
            config=how,
            use_underscores=True,
        )

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return parse(arguments)
    except SystemExit as stop:
        if not stop.code:
            raise
    # To find the wrong option, each goes through tyro once more, alone.
    for option in options_of(arguments):
        name, hints = name_of(option), hints_of(cls)
        if not option[0].startswith("--"):
            raise InputError(f"cannot place {option[0]!r}: every value follows its --dotted.field")
        if name not in hints:
            raise unknown_field(f"--{name}", cls, "--")
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                parse(option)
        except SystemExit:
            values = [*option[0].split("=", 1)[1:], *option[1:]]
            given = f"is {' '.join(values)!r}" if values else "has no value"
            is_flag = bare_flags and hints[name] is bool
            allowed = "no value" if is_flag else allowed_values(hints[name])
            near = nearest_choices(values, hints[name])
            raise InputError(f"--{name} {given}: takes {allowed}{near}") from None
    raise InputError(" ".join("".join(c for c in complaint.getvalue() if c.isprintable()).split()))


def parse_two_directories(
    cls: type[T], arguments: Sequence[str], command: str, usage: str, text: str
) -> tuple[Path, Path, T]:
    """Both directories and the settings, of `COMMAND ONE OTHER [--field value ...]`.

    Args:
      cls: the class of the settings; each has a default.
      arguments: the command line, without the command.
      command: its name.
      usage: two names of directories, and what follows them.
      text: the help below the usage, with `{command}`, `{eval}` and `{train}` as they are called.

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


def name_of(option: Sequence[str]) -> str:
    """`dotted.field_name` of `["--dotted.field-name=value"]`; empty for what is no option."""
    name = option[0].partition("=")[0]
    return name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
