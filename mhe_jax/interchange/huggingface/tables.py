"""Where the plain parameters of a run lie in the files of another library: tables for both ways.

A table says which plain parameters each tensor of a file holds, side by side, and whether it is
transposed: a `torch.nn.Linear` stores [out, in].
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mhe_jax.config import InputError, ModelConfig
from mhe_jax.interchange.plain import Tensors, require_all
from mhe_jax.training.checkpoint.tensors import WEIGHTS, write_tensors

CONFIG = "config.json"


class Slot(NamedTuple):
    """The content of one tensor of a file."""

    parts: tuple[str, ...]  # plain parameters, side by side along their last axis
    transposed: bool = False
    row: bool = False  # with a leading axis of 1
    twin: bool = False  # read as another name of the same numbers, and not written


Table = dict[str, Slot]


def linear(name: str, *ours: str, transposed: bool = True, bias: bool = True) -> Table:
    """A matrix [in, out], or several side by side, stored as [out, in]; with its bias."""
    table = {f"{name}.weight": Slot(tuple(f"{part}/kernel" for part in ours), transposed)}
    if bias:
        table[f"{name}.bias"] = Slot(tuple(f"{part}/bias" for part in ours))
    return table


def norm(name: str, ours: str, bias: bool = True) -> Table:
    """A LayerNorm, or an RMSNorm, which has no bias."""
    table = {f"{name}.weight": Slot((f"{ours}/scale",))}
    if bias:
        table[f"{name}.bias"] = Slot((f"{ours}/bias",))
    return table


def output(model: ModelConfig) -> Slot:
    """The matrix of the logits, [V, M]: if it is tied, the table of tokens by another name."""
    if model.tie_embeddings:
        return Slot(("embeddings/token",), twin=True)
    return Slot(("embeddings/output",), transposed=True)


def lay_out(table: Table, tensors: Tensors, home: str) -> Tensors:
    """The tensors of the file, from plain parameters; `home` names the architecture.

    Raises:
      InputError: a parameter has no place in the table.

    >>> table = linear("fc", "up", "gate", bias=False)
    >>> plain = {"up/kernel": np.zeros((3, 2)), "gate/kernel": np.ones((3, 2))}
    >>> lay_out(table, plain, "a home")["fc.weight"].shape
    (4, 3)
    """
    found = {}
    require_all(tensors, (part for slot in table.values() for part in slot.parts), home)
    table = {name: slot for name, slot in table.items() if not slot.twin}
    for name, (parts, transposed, row, _) in table.items():
        array = np.concatenate([tensors[part] for part in parts], -1)
        found[name] = array.T if transposed else array[None] if row else array
    return found


def take_in(
    table: Table, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], source: Path
) -> Tensors:
    """The inverse of `lay_out`: the plain parameters, of `shapes`, in the tensors of a file.

    Of twins, a file has one or more.

    Raises:
      InputError: a tensor is missing, differs from its twin or has another shape, or there is one
        that is not in the table.
    """
    found, came_in = {}, {}
    for name, (parts, transposed, row, _) in table.items():
        if name not in tensors:
            continue
        widths = [shapes[part][-1] for part in parts]
        expected = (*shapes[parts[0]][:-1], sum(widths))
        expected = expected[::-1] if transposed else (1, *expected) if row else expected
        array = tensors[name]
        if array.shape != expected:
            raise InputError(
                f"{source}: {name} has shape {array.shape}: {CONFIG} asks for {expected}"
            )
        array = array.T if transposed else array[0] if row else array
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(f"{source}: {name} is {array.dtype}: takes floats")
        ends = np.cumsum(widths)[:-1]
        for part, piece in zip(parts, np.split(array, ends, -1), strict=True):
            piece = piece.astype(np.float32)
            if not np.array_equal(found.setdefault(part, piece), piece):
                raise InputError(f"{source}: {name} differs from {came_in[part]}, its twin")
            came_in.setdefault(part, name)
    for part in (part for slot in table.values() for part in slot.parts if part not in found):
        names = " or ".join(name for name, slot in table.items() if part in slot.parts)
        raise InputError(f"{source}: has no tensor {names}")
    for name in tensors:
        if name not in table:
            raise InputError(f"{source}: has a tensor {name}, for which the model has no place")
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file as others lay it out."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_files(directory: Path, tensors: Tensors, config: Mapping[str, Any]) -> int:
    """Writes the weights and `config.json`; returns how many numbers there are."""
    # Without the metadata, transformers does not know which framework wrote the tensors.
    write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
    write_json(directory / CONFIG, config)
    return sum(array.size for array in tensors.values())
