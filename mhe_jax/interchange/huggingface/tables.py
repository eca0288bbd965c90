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

from mhe_jax.config import InputError
from mhe_jax.interchange.plain import Tensors, require_all
from mhe_jax.training.checkpoint.tensors import WEIGHTS, write_tensors

CONFIG = "config.json"


class Slot(NamedTuple):
    """The content of one tensor of a file."""

    parts: tuple[str, ...]  # plain parameters, side by side along their last axis
    transposed: bool = False
    row: bool = False  # with a leading axis of 1


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
    for name, (parts, transposed, row) in table.items():
        array = np.concatenate([tensors[part] for part in parts], -1)
        found[name] = array.T if transposed else array[None] if row else array
    return found


def take_in(
    table: Table, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], source: Path
) -> Tensors:
    """The inverse of `lay_out`: the plain parameters, of `shapes`, in the tensors of a file.

    Raises:
      InputError: a tensor is missing or has another shape, or there is one that is not in the
        table.
    """
    found = {}
    for name, (parts, transposed, row) in table.items():
        if name not in tensors:
            raise InputError(f"{source}: has no tensor {name}")
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
        if not np.isfinite(array.astype(np.float32)).all():
            raise InputError(f"{source}: {name} holds NaN or infinity")
        ends = np.cumsum(widths)[:-1]
        for part, piece in zip(parts, np.split(array, ends, -1), strict=True):
            if part in found and not np.array_equal(found[part], piece):
                raise InputError(f"{source}: {name} differs from a tensor that must equal it")
            found[part] = piece.astype(np.float32)
    for name in tensors:
        if name not in table:
            raise InputError(f"{source}: has a tensor {name}, for which the model has no place")
    return found


def untied(tensors: Tensors, same: Mapping[str, str], source: Path) -> Tensors:
    """The tensors without those that only repeat another, whose name `same` gives.

    Raises:
      InputError: one does not repeat the other, and our models have one for both.
    """
    found = dict(tensors)
    for name, of in same.items():
        if name in found and of in found and not np.array_equal(found.pop(name), found[of]):
            raise InputError(
                f"{source}: {name} differs from {of}: {CONFIG} says that they are tied"
            )
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
