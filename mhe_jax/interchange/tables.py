"""Where the plain parameters of a run lie in the files of another library: tables for both ways.

A table says which plain parameters each tensor of a file holds, side by side, and whether it is
transposed: a `torch.nn.Linear` stores [out, in].
"""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mhe_jax.config import InputError, ModelConfig
from mhe_jax.config.files import CONFIG
from mhe_jax.interchange.plain import Tensors


class Slot(NamedTuple):
    """The content of one tensor of a file."""

    parts: str  # plain parameters, side by side along their last axis
    transposed: bool = False
    row: bool = False  # with a leading axis of 1
    twin: bool = False  # read as another name of the same numbers, and not written


Table = dict[str, Slot]


def modules(
    theirs: str,
    ours: str,
    names: Mapping[str, str],
    transposed: bool = True,
    of_norms: tuple[str, str] = ("weight", "bias"),
) -> Table:
    """Matrices and norms of a file, whose names begin with `theirs`, and those of ours in each.

    >>> [*modules("h.0.", "layer_0/", {"fc": "mlp/up mlp/gate"}).values()][1].parts
    'layer_0/mlp/up/bias layer_0/mlp/gate/bias'
    """
    found = {}
    for name, parts in names.items():
        is_norm = parts.endswith("norm")
        weight, bias = of_norms if is_norm else ("weight", "bias")
        for leaf, our in ((weight, "scale" if is_norm else "kernel"), (bias, "bias")):
            held = " ".join(f"{ours}{part}/{our}" for part in parts.split())
            found[f"{theirs}{name}.{leaf}"] = Slot(held, transposed and our == "kernel")
    return found


def output(model: ModelConfig) -> Slot:
    """The matrix of the logits, [V, M]: if it is tied, the table of tokens by another name."""
    if model.tie_embeddings:
        return Slot("embeddings/token", twin=True)
    return Slot("embeddings/output", transposed=True)


def _slots(table: Table, present: Container[str]) -> Iterator[tuple[str, list[str], Slot]]:
    """The tensors of a table, and their parts, but for biases that a model has none of."""
    for name, slot in table.items():
        parts = slot.parts.split()
        if parts[0] in present or not parts[0].endswith("/bias"):
            yield name, parts, slot


def lay_out(table: Table, tensors: Tensors, home: str) -> Tensors:
    """The tensors of the file, from plain parameters, all of which have a place in it.

    >>> table = modules("", "", {"fc": "up gate"})
    >>> plain = {"up/kernel": np.zeros((3, 2)), "gate/kernel": np.ones((3, 2))}
    >>> lay_out(table, plain, "a home")["fc.weight"].shape
    (4, 3)
    """
    found, left = {}, {*tensors}
    for name, parts, slot in _slots(table, tensors):
        left -= {*parts}
        if not slot.twin:
            array = np.concatenate([tensors[part] for part in parts], -1)
            found[name] = array.T if slot.transposed else array[None] if slot.row else array
    if left:
        raise InputError(f"{min(left)} of the run has no place in {home}")
    return found


def take_in(
    table: Table, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], source: Path
) -> Tensors:
    """The inverse of `lay_out`: the plain parameters, of `shapes`, in the tensors of a file."""
    found, came_in, names = {}, {}, {}
    for name, parts, slot in _slots(table, shapes):
        names[name] = parts
        if name not in tensors:
            continue
        widths, array = [shapes[part][-1] for part in parts], tensors[name]
        expected = (*shapes[parts[0]][:-1], sum(widths))
        expected = expected[::-1] if slot.transposed else (1, *expected) if slot.row else expected
        if array.shape != expected or not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(
                f"{source}: {name} is {array.dtype}{[*array.shape]}: {CONFIG} asks for floats of "
                f"{[*expected]}"
            )
        array = array.T if slot.transposed else array[0] if slot.row else array
        pieces = np.split(array.astype(np.float32), np.cumsum(widths)[:-1], -1)
        for part, piece in zip(parts, pieces, strict=True):
            if not np.array_equal(found.setdefault(part, piece), piece):
                raise InputError(f"{source}: {name} differs from {came_in[part]}, its twin")
            came_in.setdefault(part, name)
    for missing in (part for parts in names.values() for part in parts if part not in found):
        either = " or ".join(name for name, parts in names.items() if missing in parts)
        raise InputError(f"{source}: has no tensor {either}")
    for name in sorted(tensors.keys() - names.keys()):
        raise InputError(f"{source}: has a tensor {name}, for which the model has no place")
    return found
