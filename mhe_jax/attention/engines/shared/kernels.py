"""The Pallas TPU kernels of `tpu`: attention of one head whose values are the columns of all heads.

q [N, T, D], k [N, S, D] and columns [N·C, S, X + Y] for C groups of H heads, with padded axes. The
first X columns are values `w[h] ⊙ v[h]`, E wide each; the other Y are weights w in four parts of H
columns (see `tpu`). With s the scores and m the maximum over the keys that a query sees,

    E = exp(s - m)    sums = E·columns    output = sums of values / sums of weights

and backward, with dsums the gradient of the sums,

    ds = E ⊙ (dsums·columnsᵀ)    dq = ds·k    dk = dsᵀ·q    dcolumns = Eᵀ·dsums

Nothing of size T·S leaves the chip's own memory. Of the padding, keys are hidden here, columns and
dsums are 0.
"""

import functools
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
    weights: int  # Y, more than 4H
    block_queries: int
    block_keys: int
    is_causal: bool
    interpret: bool


class Marks(NamedTuple):
    """Parts of a mask as integers: of keys [N or 1, 1, S], of queries [N or 1, T, 1]."""

    key_valid: Any
    of_queries: Any
    of_keys: Any


def forward(sizes: Sizes, q, k, columns, marks: Marks):
    """The output [N·C, T, X]; and [N·C, T, Y], the sums of weights, with m in the last place."""
    rows, T = columns.shape[0], q.shape[1]
    # For each value the weights that its denominator is the sum of.
    of_heads = np.kron(np.eye(sizes.heads), np.ones(sizes.width))
    spread = np.zeros((sizes.weights, sizes.values), np.float32)
    spread[: 2 * sizes.heads, : of_heads.shape[1]] = np.tile(of_heads, (2, 1))
    grid = _Grid(sizes, rows, T, k.shape[1])
    outputs = [
        jax.ShapeDtypeStruct((rows, T, sizes.values), columns.dtype),
        jax.ShapeDtypeStruct((rows, T, sizes.weights), jnp.float32),
    ]
    return _call(
        _forward_kernel,
        grid,
        (q, k, columns, marks, jnp.asarray(spread)),
        (*grid.inputs(q, k, columns, marks), pl.BlockSpec(spread.shape, lambda *_: (0, 0))),
        outputs,
        [grid.queries(x) for x in outputs],
        [(sizes.block_queries, 1), (sizes.block_queries, columns.shape[2])],
    )


def gradient_of_queries(sizes: Sizes, q, k, columns, marks: Marks, saved, dsums):
    """dq [N·C, T, D], one for each group."""
    grid = _Grid(sizes, columns.shape[0], q.shape[1], k.shape[1])
    inputs = (q, k, columns, marks, saved, dsums)
    dq = jax.ShapeDtypeStruct((grid.rows, *q.shape[1:]), jnp.float32)
    specs = (*grid.inputs(q, k, columns, marks), grid.queries(saved), grid.queries(dsums))
    return _call(_queries_kernel, grid, inputs, specs, [dq], [grid.queries(dq)])[0]


def gradient_of_keys(sizes: Sizes, q, k, columns, marks: Marks, saved, dsums):
    """dk [N·C, S, D], one for each group, and dcolumns [N·C, S, X + Y]."""
    grid = _Grid(sizes, columns.shape[0], q.shape[1], k.shape[1], keys_first=True)
    inputs = (q, k, columns, marks, saved, dsums)
    dk = jax.ShapeDtypeStruct((grid.rows, *k.shape[1:]), jnp.float32)
    dcolumns = jax.ShapeDtypeStruct(columns.shape, jnp.float32)
    specs = (*grid.inputs(q, k, columns, marks), grid.queries(saved), grid.queries(dsums))
    outputs = [grid.keys(dk), grid.keys(dcolumns)]
    return _call(_keys_kernel, grid, inputs, specs, [dk, dcolumns], outputs)


def _forward_kernel(
    sizes, q, k, columns, marks, spread, output, saved, highest, sums
):  # fmt: skip
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def start():
        highest[...] = jnp.full(highest.shape, -jnp.inf)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(_meet(sizes, i, j))
    def add():
        s = _scores(sizes, i, j, q, k, marks)
        before = highest[...]
        highest[...] = jnp.maximum(before, s.max(1, keepdims=True))
        m = _finite(highest[...])
        e = jnp.exp(s - m).astype(columns.dtype)
        sums[...] = jnp.exp(before - m) * sums[...] + _product(e, columns[...], 1, 0)

    @pl.when(j == pl.num_programs(2) - 1)
    def finish():
        weights = sums[:, sizes.values :]
        denominator = _product(weights, spread[...], 1, 0, jax.lax.Precision.HIGHEST)
        # 0 where the query sees no key, and at columns that are padding.
        denominator = jnp.where(denominator > 0, denominator, 1)
        output[...] = (sums[:, : sizes.values] / denominator).astype(output.dtype)
        place = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
        saved[...] = jnp.where(place == sizes.weights - 1, _finite(highest[...]), weights)


def _queries_kernel(sizes, q, k, columns, marks, saved, dsums, dq):
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def start():
        dq[...] = jnp.zeros(dq.shape, jnp.float32)

    @pl.when(_meet(sizes, i, j))
    def add():
        _, ds = _gradient_of_scores(sizes, i, j, q, k, columns, marks, saved, dsums)
        dq[...] += _product(ds, k[...], 1, 0)


def _keys_kernel(sizes, q, k, columns, marks, saved, dsums, dk, dcolumns):
    j, i = pl.program_id(1), pl.program_id(2)

    @pl.when(i == 0)
    def start():
        dk[...] = jnp.zeros(dk.shape, jnp.float32)
        dcolumns[...] = jnp.zeros(dcolumns.shape, jnp.float32)

    @pl.when(_meet(sizes, i, j))
    def add():
        e, ds = _gradient_of_scores(sizes, i, j, q, k, columns, marks, saved, dsums)
        dk[...] += _product(ds, q[...], 0, 0)
        dcolumns[...] += _product(e.astype(dsums.dtype), dsums[...], 0, 0)


def _gradient_of_scores(sizes, i, j, q, k, columns, marks, saved, dsums):
    """E and ds of a block."""
    e = jnp.exp(_scores(sizes, i, j, q, k, marks) - saved[:, sizes.weights - 1 :])
    return e, (e * _product(dsums[...], columns[...], 1, 1)).astype(q.dtype)


def _scores(sizes, i, j, q, k, marks):
    """Scores of block i of queries and block j of keys, -inf where a key is hidden."""
    s = _product(q[...], k[...], 1, 1)
    key = j * sizes.block_keys + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
    if sizes.keys % sizes.block_keys:
        s = jnp.where(key < sizes.keys, s, -jnp.inf)
    if sizes.is_causal:
        query = i * sizes.block_queries + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
        s = jnp.where(key <= query, s, -jnp.inf)
    if marks.key_valid is not None:
        s = jnp.where(marks.key_valid[...] != 0, s, -jnp.inf)
    if marks.of_queries is not None:
        s = jnp.where(marks.of_queries[...] == marks.of_keys[...], s, -jnp.inf)
    return s


def _finite(m):
    """m; 0 for a query that has met no key, as exp(-inf - 0) is 0."""
    return jnp.where(m == -jnp.inf, 0, m)


def _product(a, b, axis_a, axis_b, precision=None):
    """The product over one axis of each, added up in float32."""
    axes = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)


def _meet(sizes, i, j):
    """Whether a query of block i may see a key of block j."""
    return not sizes.is_causal or j * sizes.block_keys < (i + 1) * sizes.block_queries


class _Grid(NamedTuple):
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
        marks = Marks(
            None if marks.key_valid is None else self._key_marks(marks.key_valid),
            None if marks.of_queries is None else self.queries(marks.of_queries),
            None if marks.of_keys is None else self._key_marks(marks.of_keys),
        )
        return self.queries(q), self.keys(k), self.keys(columns), marks

    def queries(self, x):
        return self._spec(x, (self.sizes.block_queries, x.shape[2]), lambda i, j: (i, 0))

    def keys(self, x):
        return self._spec(x, (self.sizes.block_keys, x.shape[2]), lambda i, j: (j, 0))

    def _key_marks(self, x):
        return self._spec(x, (1, self.sizes.block_keys), lambda i, j: (0, j))

    def _spec(self, x, block, axes):
        share = self.rows // x.shape[0]

        def place(n, *at):
            return _divided(n, share), *axes(*self._nearest(*at))

        return pl.BlockSpec((None, *block), place)

    def _nearest(self, outer, inner):
        """The blocks (i, j); of those that are skipped, one that is at hand or needed next."""
        sizes, i, j = self.sizes, outer, inner
        if self.keys_first:
            i, j = inner, outer
        if sizes.is_causal and self.keys_first:
            first = _divided(j * sizes.block_keys, sizes.block_queries)
            i = jnp.maximum(i, jnp.minimum(first, self.shape[2] - 1))
        elif sizes.is_causal:
            last = _divided((i + 1) * sizes.block_queries - 1, sizes.block_keys)
            j = jnp.minimum(j, last)
        return i, j


def _divided(place, size):
    # `//` asks what device this is, which a program that is compiled for another cannot tell.
    return jax.lax.div(place, np.int32(size))


def _call(kernel, grid, inputs, input_specs, outputs, output_specs, scratch=()):
    return pl.pallas_call(
        functools.partial(kernel, grid.sizes),
        grid=grid.shape,
        in_specs=input_specs,
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=grid.sizes.interpret,
    )(*inputs)
