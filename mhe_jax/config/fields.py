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


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that someone who wrote `name` may have meant, three at most, best first.

    >>> nearest("model.attention.kid", ["model.attention.kind", "data.train"])
    ['model.attention.kind']
    >>> nearest("model.atention.kind", ["model.attention.kind", "model.other.kind"])[0]
    'model.attention.kind'
    >>> nearest("kind", ["model.attention.kind", "data.train"])  # or its last part alone
    ['model.attention.kind']
    """

    def likeness(other: str) -> float:
        last, its = name.rpartition(".")[2], other.rpartition(".")[2]
        pairs = ((name, other), (last, its))
        initials = "".join(word[:1] for word in its.split("_"))
        ratios = (difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() for a, b in pairs)
        return max(last == initials, *ratios)

    def order(other: str) -> tuple[float, float]:
        return likeness(other), difflib.SequenceMatcher(None, name, other).ratio()

    return [other for other in sorted(names, key=order)[:-4:-1] if likeness(other) >= 0.6]


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


def _read(cls: type[T], text: bytes) -> T:
    from pydantic import ValidationError

    try:
        return _adapter(cls).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "unexpected_keyword_argument":
        near = did_you_mean(nearest(name, names_of(cls)))
        raise InputError(f"unknown field {name}{near or '; --help lists all'}")
    reason = first["msg"].replace("Input should", "should")
    raise InputError(f"{name} is {shown(first['input'])}: {reason}" if name else reason)


def checked(cls: type[T], values: Any) -> T:
    """The dataclass of these values, a dictionary or itself one of the class, in nested parts too.

    Fields that a dictionary does not name have their defaults. An unknown name, or a value of
    another type than the field's or out of its range, is an `InputError`.
    """
    from pydantic_core import to_json

    return _read(cls, to_json(values, inf_nan_mode="constants"))


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain dictionaries, lists, texts and numbers."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted name: value} of what `to_dict` gives.

    >>> leaves({"train": {"seed": 0}, "task": "lm"})
    {'train.seed': 0, 'task': 'lm'}
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict)
        found |= leaves(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def names_of(cls: type) -> list[str]:
    """The dotted names of all fields below a dataclass that has defaults for all."""
    return list(leaves(to_dict(cls())))


def save_json(config: Config, path: str | Path) -> None:
    """Writes the config as JSON; the file appears whole or not at all."""
    write_whole(path_of(path), json.dumps(to_dict(config), indent=2) + "\n")


def load_json(path: str | Path) -> Config:
    """Reads what `save_json` wrote; InputError if there is no file, or it is not a config."""
    path = path_of(path)
    try:
        return _read(Config, path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def set_field(config: Config, name: str, value: Any) -> Config:
    """A copy of `config` in which the field of this dotted name has another value.

    >>> set_field(Config(), "model.attention.num_heads", 4).model.attention.num_heads
    4
    """
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


def only(config: Config, name: str, where: object, allowed: str) -> None:
    """`require` of a field that may differ from its default only where the rule holds."""
    require(config, name, where or value_of(config, name) == value_of(Config(), name), allowed)


def short_names(fields: list[str]) -> dict[str, str]:
    """The last part of each name, or the whole name where two share it; `seed` is that of train."""
    lasts = [field.rpartition(".")[2] for field in fields]
    alone = {last for last in lasts if lasts.count(last) == 1} - {"seed"}
    pairs = zip(fields, lasts, strict=True)
    short = {field: last if last in alone else field for field, last in pairs}
    return short | {"train.seed": "seed"}
