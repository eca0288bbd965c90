"""Compiled programs of a run: one for each shape."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mhe_jax.data import EvaluationBatches
from mhe_jax.tasks.task import TrainedRun
from mhe_jax.training.sharding import BATCH, replicated, round_up_rows, use_mesh

# The least length of rows.
SHORTEST = 16


def padded_length(longest: int, least: int, most: int) -> int:
    """The power of two that holds `longest`, from `least` to `most`, so few shapes are compiled.

    >>> padded_length(3, 8, 20), padded_length(9, 8, 20), padded_length(17, 8, 20)
    (8, 16, 20)
    """
    return min(max(least, 1 << (longest - 1).bit_length()), most)


def padded_rows(count: int, most: int, mesh: Mesh) -> int:
    """Rows of a batch: the power of two that holds `count`, at most `most`; padded to the mesh."""
    return round_up_rows(min(most, 1 << max(0, count - 1).bit_length()), mesh)


def plan(lengths: Sequence[int] | np.ndarray, size: int, most: int) -> list[tuple[int, np.ndarray]]:
    """The length of each batch of at most `size` rows, and the numbers of its rows.

    Short rows come first.

    >>> [(length, rows.tolist()) for length, rows in plan([30, 3, 17, 2], 2, 100)]
    [(16, [3, 1]), (32, [2, 0])]
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return [(padded_length(int(lengths[rows[-1]]), SHORTEST, most), rows) for rows in batches]


class Programs:
    """`function(params, *arrays)`, compiled once for each name and shape of the arrays.

    Arrays (or dictionaries of them) have a row for each text, [rows, length] or [rows, ...], and
    are the same in every process. A name holds all settings that its function reads beside its
    arguments.
    """

    def __init__(self, params: Any, mesh: Mesh):
        self._params, self._mesh = params, mesh
        self._compiled: dict[Hashable, Any] = {}

    def with_params(self, params: Any) -> "Programs":
        """The same programs, with other parameters of the same shapes and places."""
        other = Programs(params, self._mesh)
        other._compiled = self._compiled
        return other

    def __call__(
        self, name: Hashable, function: Callable[..., Any], *arrays: Any
    ) -> Callable[[], Any]:
        """A call of the program, ready to run; every process gets the whole result."""
        leaves, structure = jax.tree.flatten(arrays)
        key = name, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._compiled:
            whole = NamedSharding(self._mesh, BATCH)
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), arrays
            )
            with use_mesh(self._mesh):
                jitted = jax.jit(function, out_shardings=replicated(self._mesh))
                self._compiled[key] = jitted.lower(self._params, *shapes).compile()
        compiled = self._compiled[key]
        return lambda: compiled(self._params, *jax.tree.map(self._put, arrays))

    def _put(self, rows: np.ndarray) -> jax.Array:
        """Every process has all rows; each device takes its own."""
        return jax.make_array_from_callback(
            rows.shape, NamedSharding(self._mesh, BATCH), lambda index: rows[index]
        )


class CompiledRun(TrainedRun, Protocol):
    """A trained run with its compiled programs; see `evaluation.run`."""

    @property
    def programs(self) -> Programs: ...

    def sums_of(self, batches: EvaluationBatches) -> list[dict[str, Any]]:
        """The output of the evaluation step for each batch."""
        ...
