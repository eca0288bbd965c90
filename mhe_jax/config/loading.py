"""Loads a `Config` from files, without jax, so that a mistake costs no start-up time."""

import contextlib
import dataclasses
import traceback
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import checked, load_json
from mhe_jax.config.files import CONFIG
from mhe_jax.config.places import path_of


def load_config(name: str) -> Config:
    """The config of a file or a shipped one, as `NAME:variant`; its rules are not yet checked.

    Of the directory of a run it is the run's own, which goes on there.

    The type of the parameter of the file's `get_config` lists the variants, as in
    `def get_config(variant: Literal["", "local"] = "")`.
    """
    if _is_run(name):
        return dataclasses.replace(config_of(name), workdir=name)
    path, variant = config_file(name)
    names, variants = _defined_in(path)
    if variants and variant not in variants:
        raise InputError(f"{path}: no variant {variant!r}; it has {', '.join(map(repr, variants))}")
    with _naming_the_line(path):
        config = names["get_config"](variant) if variant else names["get_config"]()
        if not isinstance(config, Config):
            raise InputError(f"get_config() returned {type(config).__name__}, not a Config")
        return checked(Config, dataclasses.asdict(config))  # Python itself checks no types


def about_config(name: str) -> tuple[str, list[str]]:
    """The docstring of a config file that `load_config` takes, and its variants with a name."""
    if _is_run(name):
        return f"The run in {name}.", []
    names, variants = _defined_in(config_file(name)[0])
    return names.get("__doc__") or "", [variant for variant in variants if variant]


def _is_run(name: str) -> bool:
    return name not in shipped_configs() and (path_of(name) / CONFIG).is_file()


def _defined_in(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    with _naming_the_line(path):
        exec(compile(path.read_bytes(), str(path), "exec"), names)
        if not callable(names.get("get_config")):
            raise InputError("has no function get_config(variant)")
        return names, typing.get_args(typing.get_type_hints(names["get_config"]).get("variant"))


@contextlib.contextmanager
def _naming_the_line(path: Path) -> Iterator[None]:
    """Turns whatever the code of `path` raises into one line with its line number."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        where = f"{path}:{lines[-1]}" if lines else str(path)
        what = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise InputError(f"{where}: {' '.join(what.split())}") from error


def config_file(name: str) -> tuple[Path, str]:
    """The file and the variant of a config that `load_config` takes."""
    short, _, variant = name.partition(":")
    shipped = shipped_configs()
    path = shipped.get(short, Path(short))
    if not path.is_file():
        raise InputError(
            f"no config file or run {path}; those that come along: {', '.join(shipped)}"
        )
    return path, variant


def shipped_configs() -> dict[str, Path]:
    """The configs that come with this package, by their names."""
    package = Path(__file__).parents[1]
    files = [*package.glob("configs/[!_]*.py")] or package.parent.glob("configs/[!_]*.py")
    return {path.stem: path for path in sorted(files)}


def config_of(run: str | Path, field: str = "") -> Config:
    """The config of the run in a directory; messages name `field` if it is given."""
    try:
        return load_json(f"{run}/{CONFIG}")
    except InputError as error:
        gone = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
        reason = f"no run at {run}: there is no {CONFIG}" if gone else str(error)
        place = path_of(run)
        if gone and place.is_dir() and (below := sorted(place.glob(f"*/{CONFIG}"))):
            reason += f"; there are runs below, such as {below[0].parent}"
        raise InputError(f"{field}: {reason}" if field else reason) from None
