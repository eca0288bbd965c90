"""Fields of a foreign `config.json`: what is read, and what must hold."""

import json
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError
from mhe_jax.config.values import Activation
from mhe_jax.interchange.huggingface.tables import CONFIG

# Their names for our activations; the first is the one that is written.
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "relu": ("relu",),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "silu": ("silu", "swish"),
}


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      InputError: it cannot be read, or is something else.
    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: is not a JSON object")
    return values


class Fields:
    """The fields of a `config.json`.

    Those that transformers' class does not compute with are not asked for.
    """

    def __init__(self, source: Path):
        """Reads the file in the directory `source`.

        Raises:
          InputError: there is none, or it is not a JSON object.
        """
        self.path = source / CONFIG
        self.values = read_object(self.path)

    def get(self, name: str, default: Any, kind: Any = None) -> Any:
        """The value of a field, of the type of its default; `default` if it is absent.

        Raises:
          InputError: it is of another type.
        """
        value = self.values.get(name, default)
        kind = kind or type(default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InputError(
                f"{self.path}: {name} is {value!r}: takes a value of type {kind.__name__}"
            )
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A number above 0; the field is required if there is no default."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise InputError(f"{self.path}: {name} is {value!r}: takes a whole number above 0")
        return value

    def must(self, name: str, *allowed: Any, absent: Any = ...) -> None:
        """Raises InputError unless a field has one of the values.

        An absent field has the value `absent` if one is given, else the first of `allowed`.
        """
        value = self.values.get(name, allowed[0] if absent is ... else absent)
        if value not in allowed:
            takes = " or ".join(repr(value) for value in allowed)
            raise InputError(f"{self.path}: {name} is {value!r}: takes {takes}")

    def alias(self, **names: str) -> None:
        """Takes fields by their other names (`other=ours`), too.

        Raises:
          InputError: a field has two values.
        """
        for other, name in names.items():
            if other in self.values:
                self.values.setdefault(name, self.values[other])
                self.must(other, self.values[name])

    def activation(self, name: str, default: str) -> Activation:
        """Our name for the non-linearity in a field."""
        value = self.get(name, default)
        for ours, theirs in ACTIVATIONS.items():
            if value in theirs:
                return ours
        known = ", ".join(name for names in ACTIVATIONS.values() for name in names)
        raise InputError(f"{self.path}: {name} is {value!r}: takes one of {known}")
