"""Fields of a foreign `config.json`: what is read, what is written, and what must hold.

A table of fields has for each of theirs the name of ours in `model`, and what transformers takes
where a file does not say it: None for a size that must be there.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from mhe_jax.config import AttentionConfig, InputError, ModelConfig, Role
from mhe_jax.config.files import CONFIG
from mhe_jax.config.values import Activation
from mhe_jax.training.checkpoint.steps import told

FieldTable = Mapping[str, tuple[str, Any]]
# Our names for their activations; the first of several is the one that is written.
ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def written(table: FieldTable, model: ModelConfig, role: Role) -> dict[str, Any]:
    """The fields of a table for a model whose attention is that of `role`."""
    model = dataclasses.replace(model, attention=model.attention_for(role))
    found = {theirs: attrgetter(ours)(model) for theirs, (ours, _) in table.items()}
    activation = next(theirs for theirs, (ours, _) in table.items() if ours == "activation")
    theirs = next(name for name, ours in ACTIVATIONS.items() if ours == model.activation)
    return found | {activation: theirs}


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    with told(InputError, f"{path}: cannot be read"):
        values = json.loads(path.read_bytes())
    if not isinstance(values, dict):
        raise InputError(f"{path}: is not a JSON object")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file as others lay it out."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Fields:
    """The `config.json` of a directory. What transformers does not compute with is not asked for.

    The types and ranges of what becomes a field of ours are checked with the rest of the config.
    """

    def __init__(self, source: Path):
        self.path = source / CONFIG
        self.values = read_object(self.path)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or `default` where it is null or not there."""
        value = self.values.get(name)
        return default if value is None else value

    def __getitem__(self, name: str) -> Any:
        if (value := self.get(name)) is None:
            raise InputError(f"{self.path}: {name} is missing")
        return value

    def must(self, name: str, allowed: Collection[Any]) -> None:
        """Raises InputError for a value that is not allowed; None stands for one not there."""
        if (value := self.get(name)) not in allowed:
            takes = " or ".join("null" if value is None else repr(value) for value in allowed)
            raise InputError(f"{self.path}: {name} is {value!r}: takes {takes}")

    def model(self, table: FieldTable, **fixed: Any) -> ModelConfig:
        """The model of a table, with the fields that it leaves out, `attention` among them."""
        attention = {"use_bias": True, **fixed.pop("attention", {})}
        for theirs, (ours, default) in table.items():
            value = self[theirs] if default is None else self.get(theirs, default)
            if ours == "activation":
                self.must(theirs, (None, *ACTIVATIONS))
                value = ACTIVATIONS[value]
            of, _, name = ours.rpartition(".")
            (attention if of else fixed)[name] = value
        return ModelConfig(attention=AttentionConfig(**attention), **fixed)
