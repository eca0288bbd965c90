"""Options of command lines, parsed by tyro and checked by pydantic, before jax is loaded."""

import contextlib
import io
import os
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from mhe_jax.cli.process import called
from mhe_jax.config import Config, InputError, Target
from mhe_jax.config.fields import checked, did_you_mean, set_field, value_of
from mhe_jax.config.files import CONFIG
from mhe_jax.config.loading import about_config, config_of, load_config
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check

T = TypeVar("T")
# What a run that starts from another does not take from it.
OWN = ("dropout_rate", "num_classes", "num_spans", "pooling", "dtype", "remat", "scan_layers")
OWN += ("kronecker.apply",)
# What most people change first.
FIRST = "workdir data.directory data.train data.validation model.attention.kind "
FIRST += "model.attention.num_heads model.features model.num_layers "
FIRST += "optimizer.learning_rate train.num_steps"
ATTENTIONS = ("attention", *(f"attention_by_role.{r}" for r in ("encoder", "decoder", "cross")))
OWN += tuple(f"{a}.{f}" for a in ATTENTIONS for f in ("dropout_rate", "form", "engine"))


def parse_train_arguments(arguments: Sequence[str]) -> Config:
    """The checked config of `train.py CONFIG [--dotted.field value ...]`."""
    name, *options = arguments
    default, (about, _) = load_config(name), about_config(name)
    for place, option in enumerate(options):
        if option in ("-h", "--help"):
            _print_help(default, " ".join(options[place + 1 : place + 2]), name, about)
            raise SystemExit(0)
    config = parse_fields(default, options, "train", name, about=about)
    if config.train.init_from is not None:
        begun = (path_of(config.workdir) / CONFIG).is_file()
        theirs = config_of(config.workdir if begun else config.train.init_from, "train.init_from")
        shaped = set_field(default, "model", theirs.model)
        for own in (f"model.{field}" for field in OWN):
            shaped = set_field(shaped, own, value_of(default, own))
        config = parse_fields(shaped, options, "train", name)
    check(config)
    return config


def _print_help(default: Config, word: str, name: str, about: str) -> None:
    """The fields that most people change; or those with `word` in name or comment; or 'all'."""
    box = io.StringIO()
    with contextlib.redirect_stdout(box), contextlib.suppress(SystemExit):
        parse_fields(default, ["--help"], "train", name, about=about)
    # Off a terminal, a field is indented by two blanks, and its comment by more.
    head, text = box.getvalue().split("\n options ", 1)
    fields = re.findall(r"^  (--\w.*\n(?:  (?!-).*\n)*)", text, re.MULTILINE)
    fields = [re.sub(r" *\n  ", "\n", field).rstrip() for field in fields]
    if word in ("", "all"):
        named = {field[2:].split()[0]: field for field in fields}
        found = fields if word else [named[name] for name in FIRST.split()]
    else:
        # Those of each role repeat those of all.
        found = [f for f in fields if word.lower() in f.lower() and "_by_role." not in f]
    if not found:
        raise InputError(f"--help {word}: no field has this in its name or description")
    print(head.rstrip(), "\n".join(found), sep="\n\n")
    print("\nAll fields: --help all. Those about something: --help WORD, such as --help rotary.")


def parse_target(options: Sequence[str]) -> tuple[Target | None, list[str]]:
    """The target of `train.py CONFIG --compile_only --topology ...`, and the other options.

    None without `--compile_only`. With it, jax, which has not started, is restricted to the CPU.
    """
    how = {"add_help": False, "return_unknown_args": True}
    target, others = _parsed(Target(), options, bare_flags=True, **how)
    target = checked(Target, target)
    if target == Target():
        return None, others
    if not (target.compile_only and target.topology):
        raise InputError("--compile_only and --topology go together; see --help")
    os.environ["JAX_PLATFORMS"] = "cpu"
    return target, others


def parse_fields(
    default: T, options: Sequence[str], *command: str, bare_flags: bool = False, about: str = ""
) -> T:
    """The dataclass `default` with the overrides of a command line, each in the range of its field.

    With `bare_flags` the name of a boolean field sets it. `--help` shows `command` and `about`.
    """
    how = {"prog": called(*command), "description": about or None}
    return checked(type(default), _parsed(default, options, bare_flags, **how))


def _parsed(default: Any, options: Sequence[str], bare_flags: bool, **how: Any) -> Any:
    import tyro  # slow

    flags = tyro.conf.FlagCreatePairsOff if bare_flags else tyro.conf.FlagConversionOff
    how |= {"default": default, "args": options, "config": [flags], "use_underscores": True}
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(type(default), **how)
    except SystemExit as stop:
        if not stop.code:
            raise
    # The complaint out of its box, which is a title and rules unless standard output is UTF-8, and
    # of what may have been meant the names alone.
    text = re.sub(r"^[╭╰].*$|│|\A .*\n -{9,} *$", "", box.getvalue(), flags=re.MULTILINE)
    text = text.replace("Unrecognized options:", "unknown field")
    complaint, *rest = re.split(r"─+|-{9,}|Got errors:", text)
    near = ""
    complaint = " ".join(complaint.split())
    if complaint.startswith("unknown field"):  # without the values that were given to it
        complaint = re.sub(r", (?!--)[^,]*", "", complaint)
        near = did_you_mean(re.findall(r"^ +(--[\w.]+) ", "".join(rest), re.MULTILINE))
        near = near or "; --help lists fields"
    raise InputError(complaint + near)
