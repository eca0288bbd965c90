"""Loads a `Config` from files and JSON, without jax, so that a mistake costs no start-up time."""

import ast
import contextlib
import dataclasses
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import did_you_mean, from_dict, load_json, nearest
from mhe_jax.config.files import CONFIG
from mhe_jax.config.places import path_of


def load_config(name: str) -> Config:
    """The config that `name` refers to, a file or a shipped one, optionally with a `:variant`.

    It is not yet checked. The file's `get_config(variant)` is called; the type of its parameter
    lists the variants, as in `def get_config(variant: Literal["", "local"] = "")`.

    Raises:
      InputError: no such file or variant, the file fails (the message names the line), or a value
        has another type than its field.
    """
    path, variant = config_file(name)
    file = str(path)
    get_config, allowed = _get_config(path)
    if allowed and variant not in allowed:
        named = [v for v in allowed if v]
        which = f"one of {', '.join(named)}, or none" if named else "it has none"
        raise InputError(f"{file}: no variant {variant!r}: {which}")
    with _naming_the_line(path):
        config = get_config(variant) if variant else get_config()
    if not isinstance(config, Config):
        raise InputError(f"{file}: get_config() returned {type(config).__name__}, not a Config")
    try:
        return from_dict(dataclasses.asdict(config))  # Python itself checks no types
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def _get_config(path: Path) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The function of that name, and the variants that its parameter's type lists, if it does."""
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    with _naming_the_line(path):
        exec(compile(path.read_bytes(), str(path), "exec"), namespace)
    get_config = namespace.get("get_config")
    if not callable(get_config):
        raise InputError(f"{path}: has no function get_config(variant)")
    with _naming_the_line(path):
        hint = typing.get_type_hints(get_config).get("variant")
    return get_config, typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def variants_of(name: str) -> list[str]:
    """The variants of a config that `load_config` takes, beside the one without a name."""
    _, allowed = _get_config(config_file(name)[0])
    return [variant for variant in allowed if variant]


def config_file(name: str) -> tuple[Path, str]:
    """The file and the variant of a config that `load_config` takes.

    A name without `.py` that is no file is that of a shipped config: `demo` is configs/demo.py in a
    clone, or in the installed package.

    Raises:
      InputError: there is no such file.
    """
    file, _, variant = name.rpartition(":") if ".py:" in name else (name, "", "")
    path = Path(file)
    if not path.is_file() and ".py" not in name:
        short, _, variant = name.partition(":")
        shipped = shipped_configs()
        if short in shipped:
            return shipped[short], variant
        if Path(short).name == short and not path.exists():
            near = nearest(short, [*map(str, Path().glob("*.py")), *shipped])
            which = did_you_mean(near) or f": takes a file, or one of {', '.join(shipped)}"
            raise InputError(f"no config file {short}{which}")
    if not path.is_file():
        raise InputError(f"no config file {file}{neighbours(path, '*.py')}")
    return path, variant


def shipped_configs() -> dict[str, Path]:
    """The configs that come with this package, by their names."""
    package = Path(__file__).parents[1]
    for place in (package / "configs", package.parent / "configs"):
        if place.is_dir():
            return {path.stem: path for path in sorted(place.glob("[!_]*.py"))}
    return {}


def about_config(name: str) -> str:
    """The docstring of the file of a config that `load_config` takes; empty if it has none."""
    path, _ = config_file(name)
    return ast.get_docstring(ast.parse(path.read_bytes())) or ""


@contextlib.contextmanager
def _naming_the_line(path: Path):
    """Turns whatever the code of `path` raises into one line with its line number."""
    try:
        yield
    except SyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, InputError) and not lines:
            raise
        where = f"{path}:{lines[-1]}" if lines else str(path)
        what = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise InputError(f"{where}: {' '.join(what.split())}") from error


def config_of(run: str | Path, field: str = "") -> Config:
    """The config of the run in a directory; messages name `field` if it is given.

    Raises:
      InputError: there is no run, or its config is not one.
    """
    run = path_of(run)
    try:
        there = (run / CONFIG).is_file()
    except OSError as error:
        raise InputError(
            f"{f'{field}: ' if field else ''}{run / CONFIG}: {error.strerror}"
        ) from None
    if not there:
        hint = f": it has no {CONFIG}" if run.is_dir() else ""
        hint += neighbours(run, f"*/{CONFIG}")
        raise InputError(f"{f'{field}: ' if field else ''}no run at {run}{hint}")
    return load_json(run / CONFIG)


def neighbours(path: Path, pattern: str) -> str:
    """Suggestions for the missing `path`, as "; did you mean a, b?", from what lies near it."""
    directory = path if path.is_dir() else path.parent
    if not directory.is_dir():
        return f": there is no directory {directory}"
    found = (p.parent if p.name == CONFIG else p for p in directory.glob(pattern))
    found = (p for p in found if not p.name.startswith("_"))
    # By the names alone: the directory and suffix, which all share, say nothing.
    names = {p.stem if p.suffix == ".py" else p.name: str(p) for p in sorted(found)}
    near = nearest(path.stem if path.suffix == ".py" else path.name, [*names])
    return did_you_mean([names[name] for name in near or [*names][:5]])
