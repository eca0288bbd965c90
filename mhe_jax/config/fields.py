"""The fields of a config by dotted name: their types, their nearest names, and their JSON.

Strict both ways: an unknown name or a value of another type is an `InputError` that says what is
allowed, and what was written reads back equal.
"""

import contextlib
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from mhe_jax.config import Config, InputError
from mhe_jax.config.files import write_whole
from mhe_jax.config.places import path_of

T = TypeVar("T")
# Far above what we write.
LARGEST_JSON, DEEPEST_JSON = 1 << 26, 30


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that someone who wrote `name` may have meant, three at most, best first.

    >>> nearest("model.attention.kid", ["model.attention.kind", "data.train"])
    ['model.attention.kind']
    >>> nearest("kind", ["model.attention.kind", "data.train"])
    ['model.attention.kind']
    >>> nearest("optimizer.lr", ["optimizer.name", "optimizer.learning_rate"])[0]
    'optimizer.learning_rate'
    >>> nearest("mhe", ["mha", "mhe_add", "mhe_mul"])  # beginnings come before what is like it
    ['mhe_add', 'mhe_mul', 'mha']
    >>> nearest("bertformaskedlm", ["BertForMaskedLM"])
    ['BertForMaskedLM']
    """

    def likeness(other: str) -> float:
        one, other = name.lower(), other.lower()
        last, other_last = (each.rpartition(".")[2].lstrip("-") for each in (one, other))
        if last == "".join(word[:1] for word in other_last.split("_")):
            return 1.0  # its initials
        whole = difflib.SequenceMatcher(None, one, other).ratio()
        # It, or a word of its last part, begins with what was written.
        if len(last) > 1 and (other.startswith(one) or f"_{last}" in f"_{other_last}"):
            return 0.9 + 0.1 * whole
        return max(whole, 0.95 * difflib.SequenceMatcher(None, last, other_last).ratio())

    ranked = sorted(names, key=lambda other: (-likeness(other), len(other)))
    return [other for other in ranked[:3] if likeness(other) > 0.65]


def did_you_mean(names: Sequence[str]) -> str:
    """The end of a message that names what may have been meant."""
    return f"; did you mean {', '.join(names)}?" if names else ""


def hints_of(cls: type, prefix: str = "") -> dict[str, Any]:
    """{dotted name: type} of every leaf below a dataclass."""
    hints: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        nested = _is_part(hint)
        hints |= hints_of(hint, f"{prefix}{name}.") if nested else {f"{prefix}{name}": hint}
    return hints


def unknown_field(name: str, cls: type, prefix: str = "") -> InputError:
    """The complaint that no field below `cls` has this dotted name."""
    near = nearest(name, list(hints_of(cls, prefix)))
    return InputError(f"unknown field {name}{did_you_mean(near) or '; --help lists all'}")


def _is_part(hint: Any) -> TypeGuard[type]:
    """Whether a field of this type is a dataclass with fields of its own."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def allowed_values(hint: Any) -> str:
    """The values that a field of this type takes, in words.

    >>> allowed_values(int | None), allowed_values(tuple[str, ...])
    ('a whole number or None', 'any number of strings')
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join([allowed_values(a) for a in arguments if a is not type(None)] + ["None"])
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"any number of {allowed_values(arguments[0]).removeprefix('a ')}s"
    if hint is bool:
        return "True or False"
    return {int: "a whole number", float: "a number", str: "a string"}[hint]


def nearest_choices(values: Sequence[str], hint: Any) -> str:
    """The end of a message about a value that is not among the choices of a field of this type.

    >>> nearest_choices(["mha_mul"], typing.Literal["mha", "mhe_mul"] | None)
    '; did you mean mhe_mul?'
    """
    literals = [a for a in (hint, *typing.get_args(hint)) if typing.get_origin(a) is typing.Literal]
    choices = [str(choice) for literal in literals for choice in typing.get_args(literal)]
    return did_you_mean(nearest(values[0], choices)) if len(values) == 1 else ""


def _typed(value: Any, hint: Any, name: str) -> Any:
    """`value` as a field of type `hint` holds it: lists become tuples, dictionaries dataclasses."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _is_part(hint):
        if isinstance(value, hint):
            return value
        if not isinstance(value, dict):
            raise InputError(f"{name} is {shown(value)}: takes a dictionary of its fields")
        return _build(hint, value, f"{name}.")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        fits, inner_value = _try(value, inner, name)
        if fits:
            return inner_value
    elif origin is typing.Literal:
        if any(value == a and type(value) is type(a) for a in arguments):
            return value
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            parts = [_try(part, arguments[0], name) for part in value]
            if all(fits for fits, _ in parts):
                return tuple(part for _, part in parts)
    elif hint is float and type(value) in (int, float):
        with contextlib.suppress(OverflowError):
            return float(value)
    elif type(value) is hint and (hint is not str or "\0" not in value):  # ends a file's name
        return value
    raise InputError(f"{name} is {shown(value)}: takes {allowed_values(hint)}")


def shown(value: Any) -> str:
    """A value as messages show it: the beginning of a long one."""
    try:
        text = repr(value)
    except RecursionError:
        text = type(value).__name__
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _try(value: Any, hint: Any, name: str) -> tuple[bool, Any]:
    try:
        return True, _typed(value, hint, name)
    except InputError:
        return False, None


def _build(cls: type[T], values: dict[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in hints:
            raise unknown_field(f"{prefix}{name}", cls, prefix)
    return cls(**{name: _typed(v, hints[name], f"{prefix}{name}") for name, v in values.items()})


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


def from_dict(values: dict[str, Any]) -> Config:
    """The config that `to_dict` turned into `values`; fields not named have their defaults.

    >>> from_dict(to_dict(Config(task="lm"))) == Config(task="lm")
    True

    Raises:
      InputError: an unknown name, or a value of another type than the field's.
    """
    return _build(Config, values, "")


def save_json(config: Config, path: str | Path) -> None:
    """Writes the config as JSON; the file appears whole or not at all."""
    write_whole(path_of(path), json.dumps(to_dict(config), indent=2) + "\n")


def parse_json(path: Path) -> Any:
    """Reads a JSON file, written by us or by somebody else.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not JSON, or not as we write it: over `LARGEST_JSON` bytes, or too deep.
    """
    if not path.is_file():
        path.stat()  # raises if there is nothing
        raise ValueError("not a regular file")
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"has over {LARGEST_JSON:,} bytes")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    level = [found]
    for _ in range(DEEPEST_JSON):
        level = [part for value in level for part in _parts(value)]
    if level:
        raise ValueError(f"is nested more than {DEEPEST_JSON} deep")
    return found


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def load_json(path: str | Path) -> Config:
    """Reads what `save_json` wrote."""
    path = path_of(path)
    try:
        values = parse_json(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: not a config: takes a dictionary of fields")
    if values and not values.keys() & {part.name for part in dataclasses.fields(Config)}:
        hint = ""
        if "model_type" in values:
            hint = f"; `convert {path.parent} NEW` makes a run of a transformers model"
        raise InputError(f"{path}: not the config of a run, but of another program{hint}")
    try:
        return from_dict(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def set_field(config: T, name: str, value: Any) -> T:
    """A copy of `config` in which the field of this dotted name has another value.

    >>> set_field(Config(), "model.attention.num_heads", 4).model.attention.num_heads
    4
    """

    def change(part: Any, names: list[str]) -> Any:
        hints = typing.get_type_hints(type(part))
        first, *rest = names
        if first not in hints or (rest and not _is_part(hints[first])):
            raise unknown_field(name, type(config))
        inner = change(getattr(part, first), rest) if rest else _typed(value, hints[first], name)
        return dataclasses.replace(part, **{first: inner})

    return change(config, name.split("."))


def short_names(fields: list[str]) -> dict[str, str]:
    """The last part of each name, or the whole name where two share it."""
    lasts = [field.rpartition(".")[2] for field in fields]
    short = {
        field: field if lasts.count(last) > 1 or last == "seed" else last
        for field, last in zip(fields, lasts, strict=True)
    }
    return short | {"train.seed": "seed"}
