"""Fields of a foreign `config.json`: what is read, what is written, and what must hold.

A table of fields has for each of theirs the name of ours in `model`, and what transformers takes
where a file does not say it: None for a size that must be there.
"""

import dataclasses
import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from mhe_jax.config import AttentionConfig, InputError, ModelConfig, Role
from mhe_jax.config.files import CONFIG
from mhe_jax.config.values import Activation

FieldTable = Mapping[str, tuple[str, Any]]
# Their names for our activations; the first is the one that is written.
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "relu": ("relu",),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "silu": ("silu", "swish"),
}


def written(table: FieldTable, model: ModelConfig, role: Role) -> dict[str, Any]:
    """The fields of a table for a model whose attention is that of `role`."""
    model = dataclasses.replace(model, attention=model.attention_for(role))
    found = {theirs: attrgetter(ours)(model) for theirs, (ours, _) in table.items()}
    activation = next(theirs for theirs, (ours, _) in table.items() if ours == "activation")
    return found | {activation: ACTIVATIONS[model.activation][0]}


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
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
    """The `config.json` of a directory. What transformers does not compute with is not asked for.

    Every method raises InputError for a value that it does not take.
    """

    def __init__(self, source: Path):
        self.path = source / CONFIG
        self.values = read_object(self.path)

    def get(self, name: str, default: Any) -> Any:
        """The value of a field, of the type of its default."""
        value, kind = self.values.get(name, default), type(default)
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
        """Refuses other values; an absent field has the value `absent`, or the first allowed."""
        value = self.values.get(name, allowed[0] if absent is ... else absent)
        if value not in allowed:
            takes = " or ".join(repr(value) for value in allowed)
            raise InputError(f"{self.path}: {name} is {value!r}: takes {takes}")

    def activation(self, name: str, default: str) -> Activation:
        """Our name for the non-linearity in a field."""
        value = self.get(name, default)
        for ours, theirs in ACTIVATIONS.items():
            if value in theirs:
                return ours
        known = ", ".join(name for names in ACTIVATIONS.values() for name in names)
        raise InputError(f"{self.path}: {name} is {value!r}: takes one of {known}")

    def model(self, table: FieldTable, attention: dict[str, Any], **fixed: Any) -> ModelConfig:
        """The model of a table; `attention` and `fixed` are the fields that it leaves out."""
        attention = {"use_bias": True, **attention}
        for theirs, (ours, default) in table.items():
            if ours == "activation":
                value = self.activation(theirs, default)
            elif default is None or type(default) is int:
                value = self.size(theirs, default)
            else:
                value = self.get(theirs, default)
            of, _, name = ours.rpartition(".")
            (attention if of else fixed)[name] = value
        return ModelConfig(attention=AttentionConfig(**attention), **fixed)
