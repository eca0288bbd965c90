"""The fields of a config by dotted name, and a config as JSON, read and checked by pydantic."""

import dataclasses
import difflib
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from mhe_jax.config import Config, InputError
from mhe_jax.config.files import write_whole
from mhe_jax.config.places import path_of

T = TypeVar("T")


def did_you_mean(names: Sequence[str]) -> str:
    """The end of a message that names what may have been meant."""
    return f"; did you mean {', '.join(names)}?" if names else ""


def shown(value: Any) -> str:
    """A value as messages show it: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


@functools.cache
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter  # slow to import, and attention needs none

    return TypeAdapter(cls)


def checked(cls: type[T], values: Any) -> T:
    """The dataclass of these values: a dictionary, JSON in bytes, or one of the class itself.

    An unknown name, or a value out of its field's type or range, is an `InputError`, in parts too.
    """
    from pydantic import ValidationError
    from pydantic_core import to_json

    text = values if isinstance(values, bytes) else to_json(values, inf_nan_mode="constants")
    try:
        return _adapter(cls).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "unexpected_keyword_argument":
        near = difflib.get_close_matches(name, leaves(to_dict(cls())))
        raise InputError(f"unknown field {name}{did_you_mean(near)}")
    reason = first["msg"].replace("Input should", "should")
    raise InputError(f"{name} is {shown(first['input'])}: {reason}" if name else reason)


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain dictionaries, lists, texts and numbers."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted name: value} of what `to_dict` gives."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict)
        found |= leaves(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def save_json(config: Config, path: str | Path) -> None:
    """Writes the config as JSON; the file appears whole or not at all."""
    write_whole(path_of(path), json.dumps(to_dict(config), indent=2) + "\n")


def load_json(path: str | Path) -> Config:
    """Reads what `save_json` wrote; InputError if there is no file, or it is not a config."""
    path, text = path_of(path), b""
    try:
        text = path.read_bytes()
        return checked(Config, text)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except InputError as error:
        foreign = str(error).startswith("unknown field") and ";" not in str(error)
        foreign = foreign and b'"task"' not in text
        reason = "; it is not the config of a run" if foreign else ""
        raise InputError(f"{path}: {error}{reason}") from error


def set_field(config: Config, name: str, value: Any) -> Config:
    """A copy of `config` in which a field, such as `model.features`, has another value."""
    tree = part = dataclasses.asdict(config)
    *parents, last = name.split(".")
    for parent in parents:
        part = part.setdefault(parent, {})
    part[last] = value
    return checked(Config, tree)


def value_of(config: Config, name: str) -> Any:
    """The value of the field of this dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def require(config: Config, name: str, holds: object, allowed: str) -> None:
    """Raises InputError unless a rule holds, with the field, its value, and what is allowed."""
    if not holds:
        value = value_of(config, name)
        given = "not set" if value in (None, ()) else shown(value)
        raise InputError(f"{name} is {given}: {allowed}")


def short_names(fields: list[str]) -> dict[str, str]:
    """The last part of each name, or the whole name where two share it; `seed` is that of train."""
    lasts = ["seed", *(field.rpartition(".")[2] for field in fields)]
    pairs = zip(fields, lasts[1:], strict=True)
    short = {field: last if lasts.count(last) == 1 else field for field, last in pairs}
    return short | {"train.seed": "seed"}
