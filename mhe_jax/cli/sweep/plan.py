"""The runs that a command line asks for."""

import itertools
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhe_jax.cli.arguments import options_of, parse_train_arguments
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import (
    hints_of,
    leaves,
    load_json,
    short_names,
    to_dict,
    unknown_field,
)
from mhe_jax.config.files import CONFIG, RESULT
from mhe_jax.config.places import check_scheme, path_of
from mhe_jax.report.results import read_result

MOST_SEEDS = 1000
# Fields that train.py takes from the data set of a labelled task, if they are not given.
OF_DATA = ("data.labels", "model.num_classes", "model.num_spans")


@dataclass(frozen=True)
class PlannedRun:
    """One combination: its directory below the sweep's, its config, and train.py's arguments."""

    name: str
    config: Config
    arguments: list[str]
    values: dict[str, Any]

    @property
    def workdir(self) -> Path:
        return path_of(self.config.workdir)

    def result(self) -> dict[str, Any] | None:
        """Its result by train.py, None until it is finished as its config says."""
        try:
            result = read_result(self.workdir / RESULT)
            config = load_json(self.workdir / CONFIG)
        except InputError:
            return None
        if result.get("steps") != self.config.train.num_steps:
            return None
        ran, asked = (leaves(to_dict(c)) for c in (config, self.config))
        differing = {name for name, value in asked.items() if ran[name] != value}
        same = all(name in OF_DATA and not asked[name] for name in differing)
        return result if same else None


@dataclass(frozen=True)
class Sweep:
    """All runs, in their order: every combination with the first seed, then with the next."""

    workdir: Path
    runs: list[PlannedRun]
    evaluate: bool = False  # whether eval.py scores each run once it is trained


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether a command line of train.py asks for a sweep."""
    names = {argument.partition("=")[0] for argument in arguments}
    return bool(names & {"--sweep", "--seeds"}) and not names & {"-h", "--help"}


def parse(arguments: Sequence[str]) -> Sweep:
    """The sweep of `train.py CONFIG [--sweep FIELD=A,B,...]... [--seeds N] [--evaluate] [...]`.

    Every combination is checked as train.py itself would, before any of them runs.

    Raises:
      InputError: a field or value that is not allowed, a combination that breaks a rule, the same
        run twice, or a workdir that holds a run itself.
    """
    evaluate = "--evaluate" in arguments
    config, *options = options_of([part for part in arguments if part != "--evaluate"])
    swept, seeds, kept = _take_out(options)
    base = parse_train_arguments([*config, *kept])
    given = any(option[0].partition("=")[0] == "--workdir" for option in options)
    check_scheme("workdir", base.workdir, ())  # the log of each run grows line by line
    workdir = Path(base.workdir if given else f"{base.workdir}-sweep")
    if (workdir / CONFIG).exists():
        raise InputError(f"{workdir} holds a run: a sweep needs a --workdir of its own")
    names = short_names(list(swept))
    runs: dict[str, PlannedRun] = {}
    for seed in range(base.train.seed, base.train.seed + seeds):
        for texts in itertools.product(*swept.values()):
            pairs = [*zip(swept, texts, strict=True), ("train.seed", str(seed))]
            own = [part for field, text in pairs for part in (f"--{field}", text)]
            found = leaves(to_dict(parse_train_arguments([*config, *kept, *own])))
            values = {field: found[field] for field, _ in pairs}
            name = ",".join(f"{names[field]}={_plain(value)}" for field, value in values.items())
            if name in runs:
                raise InputError(f"--sweep gives the run {name} twice")
            own += ["--workdir", str(workdir / name)]
            full = [*config, *kept, *own]
            runs[name] = PlannedRun(name, parse_train_arguments(full), full, values)
    for run in runs.values() if evaluate else ():
        e = run.config.evaluation
        if not (e.sources or getattr(run.config.data, e.split)):
            raise InputError(f"--evaluate: data.{e.split} names nothing to score")
    return Sweep(workdir, list(runs.values()), evaluate)


def _take_out(options: list[list[str]]) -> tuple[dict[str, list[str]], int, list[str]]:
    """{swept field: its values}, the number of seeds, and what is left for train.py."""
    swept: dict[str, list[str]] = {}
    seeds, kept = 1, []
    for option in options:
        flag, equals, text = option[0].partition("=")
        values = [text, *option[1:]] if equals else option[1:]
        if flag == "--seeds":
            given = " ".join(values)
            if not given.isdecimal() or len(given) > 4 or not 1 <= int(given) <= MOST_SEEDS:
                raise InputError(
                    f"--seeds is {given[:99]!r}: takes a whole number from 1 to {MOST_SEEDS}"
                )
            seeds = int(given)
        elif flag == "--sweep":
            if not values:
                raise InputError("--sweep has no value: takes FIELD=VALUE,VALUE,...")
            for value in values:
                name, found = _swept(value)
                if name in swept:
                    raise InputError(f"--sweep {name} is given twice")
                swept[name] = found
        else:
            kept.append(option)
    for option in kept:
        name = option[0].partition("=")[0].removeprefix("--").replace("-", "_")
        if name in ("compile_only", "distributed"):
            raise InputError(f"--{name} goes with one run: leave out --sweep and --seeds")
        if name in swept:
            raise InputError(f"--{name} is given, and swept too: give only one")
    return swept, seeds, [part for option in kept for part in option]


def _swept(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    name = name.replace("-", "_")
    hints = hints_of(Config)
    if name not in hints:
        raise unknown_field(name, Config)
    if typing.get_origin(hints[name]) is tuple or name in ("workdir", "train.seed"):
        why = {
            "train.seed": "--seeds does that",
            "workdir": "each run has its own below --workdir",
        }.get(name, "takes fields of one value")
        raise InputError(f"--sweep {name}: {why}")
    found = values.split(",")
    if not equals or "" in found:
        raise InputError(f"--sweep is {text!r}: takes FIELD=VALUE,VALUE,...")
    return name, found


def _plain(value: Any) -> str:
    """A value as part of a file's name."""
    return re.sub(r"[^\w.+-]", "_", str(value))
