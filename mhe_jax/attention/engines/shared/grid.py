"""Blocks of queries and keys of the Pallas TPU kernels: their order, which are skipped, the call.

Each row N·C has a grid of blocks, queries outside and keys inside or the other way round. A block
that a mask hides entirely is not computed, and nothing is loaded for it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Sizes(NamedTuple):
    """The static part of a call."""

    keys: int  # S without padding
    groups: int  # C
    heads: int  # H, of a group
    width: int  # E
    values: int  # X
    weights: int  # Y, more than 3H
    block_queries: int
    block_keys: int
    before: int | None  # query t sees only keys in [t - before, t + after]
    after: int | None
    keep: float  # share of the weights that dropout keeps
    interpret: bool
    forward_keys: int  # in place of block_keys, of the forward kernel
    first: int = 0  # position of the first of the queries, among all


class Marks(NamedTuple):
    """Parts of a mask as integers: of queries [N or 1, T, 1], of keys [N or 1, 1, S].

    `words` are those of `blocks.is_kept`; `lengths` [N or 1], in scalar memory, are numbers of
    keys; blocks past them are skipped.
    """

    key_valid: Any = None
    segments: Any = None  # a pair, of queries and of keys
    first_key: Any = None  # of queries: the first key that they see, and the last
    last_key: Any = None
    words: Any = None  # a pair
    lengths: Any = None


def is_of_queries(x):
    """Whether marks are of queries."""
    return x.ndim == 3 and x.shape[2] == 1


def meet(sizes, limit, i, j):
    """Whether a query of block i may see a key of block j."""
    query, key = sizes.first + i * sizes.block_queries, j * sizes.block_keys
    meet = True if isinstance(limit, int) else key < limit
    if sizes.after is not None:
        meet &= key < query + sizes.block_queries + sizes.after
    if sizes.before is not None:
        meet &= key + sizes.block_keys > query - sizes.before
    return meet


class Grid(NamedTuple):
    """The order of the blocks, and where each array has its part of a block."""

    sizes: Sizes
    rows: int
    queries_in_all: int
    keys_in_all: int
    keys_first: bool = False  # else each block of queries meets all keys, then the next does

    @property
    def shape(self):
        sizes = self.sizes
        i, j = self.queries_in_all // sizes.block_queries, self.keys_in_all // sizes.block_keys
        return (self.rows, j, i) if self.keys_first else (self.rows, i, j)

    def inputs(self, q, k, columns, marks):
        specs = jax.tree.map(
            lambda x: self.queries(x) if is_of_queries(x) else self._key_marks(x), marks
        )
        return self.queries(q), self.keys(k), self.keys(columns), specs

    def queries(self, x):
        return self._spec(x, (self.sizes.block_queries, x.shape[2]), lambda i, j: (i, 0))

    def all_queries(self, x):
        """Stays on the chip while all blocks of a row add to it."""
        return pl.BlockSpec((None, *x.shape[1:]), lambda n, *_: (n, 0, 0))

    def keys(self, x):
        return self._spec(x, (self.sizes.block_keys, x.shape[2]), lambda i, j: (j, 0))

    def _key_marks(self, x):
        return self._spec(x, (1, self.sizes.block_keys), lambda i, j: (0, j))

    def _spec(self, x, block, axes):
        share = self.rows // x.shape[0]

        def place(n, outer, inner, *lengths):
            return _divided(n, share), *axes(*self._nearest(n, outer, inner, *lengths))

        return pl.BlockSpec((None, *block), place)

    def limit(self, n, lengths):
        """The number of keys of row n."""
        return lengths[_divided(n, self.rows // lengths.shape[0])]

    def _nearest(self, n, outer, inner, *lengths):
        """The blocks (i, j); for skipped ones, those that are at hand or needed next."""
        sizes, i, j = self.sizes, outer, inner
        if self.keys_first:
            i, j = inner, outer
            key = j * sizes.block_keys - sizes.first
            last = self.shape[2] - 1
            if sizes.before is not None:
                last = jnp.minimum(
                    last, _block(key + sizes.block_keys - 1 + sizes.before, sizes.block_queries)
                )
                i = jnp.minimum(i, last)
            if sizes.after is not None:
                i = jnp.maximum(
                    i, jnp.minimum(_block(key - sizes.after, sizes.block_queries), last)
                )
            for each in lengths:
                i = jnp.where(j * sizes.block_keys < self.limit(n, each), i, 0)
            return i, j
        query = sizes.first + i * sizes.block_queries
        last = self.shape[2] - 1
        if sizes.after is not None:
            after = query + sizes.block_queries - 1 + sizes.after
            last = jnp.minimum(last, _block(after, sizes.block_keys))
        for each in lengths:
            last = jnp.minimum(last, _block(self.limit(n, each) - 1, sizes.block_keys))
        if sizes.before is not None:
            j = jnp.maximum(j, _block(query - sizes.before, sizes.block_keys))
        return i, jnp.minimum(j, last)


def _block(place, size):
    """The block of a place; the first block for places before it."""
    return _divided(jnp.maximum(place, 0), size)


def _divided(place, size):
    # `//` asks what device this is, which a program compiled for another one cannot tell.
    return jax.lax.div(place, np.int32(size))


def call(kernel, grid, lengths, inputs, input_specs, outputs, output_specs, scratch=()):
    prefetched = () if lengths is None else (lengths,)

    def run(*refs):
        limit = grid.sizes.keys
        if prefetched:
            limit, refs = grid.limit(pl.program_id(0), refs[0]), refs[1:]
        kernel(grid.sizes, limit, *refs)

    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid.shape,
            in_specs=input_specs,
            out_specs=output_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=grid.sizes.interpret,
        name=kernel.__name__.strip("_"),
    )(*prefetched, *inputs)
