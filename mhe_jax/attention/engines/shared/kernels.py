"""The Pallas TPU kernels of `tpu`: attention of one head whose values are the columns of all heads.

q [N, T, D], k [N, S, D] and columns [N·C, S, X + Y] for C groups of H heads, with padded axes. The
first X columns are values `w[h] ⊙ v[h]`, E wide each; the other Y are weights w in parts of H
columns (see `tpu`). With s the scores, m the maximum over the keys that a query sees, and E' the E
that dropout keeps,

    E = exp(s - m)    sums = [E'·values, E·weights]    output = sums of values / sums of weights

and backward, with dsums the gradient of the sums, [dvalues, dweights],

    ds = E' ⊙ (dvalues·valuesᵀ) + E ⊙ (dweights·weightsᵀ)    dq = ds·k    dk = dsᵀ·q
    dcolumns = [E'ᵀ·dvalues, Eᵀ·dweights]

Nothing of size T·S leaves the chip's own memory. Keys of the padding are hidden here; its columns
and dsums are 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhe_jax.attention.engines.blocks import is_kept
from mhe_jax.attention.engines.shared.grid import Grid, Marks, Sizes, call, is_of_queries, meet

# Gradients of queries that stay on the chip while a kernel runs; more take several kernels.
QUERIES_BYTES = 2**21


def forward(sizes: Sizes, q, k, columns, marks: Marks):
    """The output [N·C, T, X]; and [N·C, T, Y], the sums of weights, with m in the last place."""
    rows, T = columns.shape[0], q.shape[1]
    sizes = sizes._replace(block_keys=sizes.forward_keys)
    # For each value, the weights that sum to its denominator.
    of_heads = np.kron(np.eye(sizes.heads), np.ones(sizes.width))
    spread = np.zeros((sizes.weights, sizes.values), np.float32)
    spread[: 3 * sizes.heads, : of_heads.shape[1]] = np.tile(of_heads, (3, 1))
    grid = Grid(sizes, rows, T, k.shape[1])
    marks, lengths = marks._replace(lengths=None), marks.lengths
    outputs = [
        jax.ShapeDtypeStruct((rows, T, sizes.values), jnp.float32),
        jax.ShapeDtypeStruct((rows, T, sizes.weights), jnp.float32),
    ]
    return call(
        _forward_kernel,
        grid,
        lengths,
        (q, k, columns, marks, jnp.asarray(spread, jnp.bfloat16)),
        (*grid.inputs(q, k, columns, marks), pl.BlockSpec(spread.shape, lambda *_: (0, 0))),
        outputs,
        [grid.queries(x) for x in outputs],
        [(sizes.block_queries, 1), (sizes.block_queries, columns.shape[2])],
    )


def gradient(sizes: Sizes, q, k, columns, marks: Marks, saved, dsums):
    """dq [N·C, T, D] and dk [N·C, S, D], one for each group, and dcolumns [N·C, S, X + Y]."""
    most = max(1, QUERIES_BYTES // (4 * q.shape[2] * sizes.block_queries)) * sizes.block_queries
    of_queries, of_keys = [], []
    for first in range(0, q.shape[1], most):
        part = slice(first, first + most)
        own = jax.tree.map(lambda x, part=part: x[:, part] if is_of_queries(x) else x, marks)
        dq, *found = _gradient(
            sizes._replace(first=first), q[:, part], k, columns, own, saved[:, part], dsums[:, part]
        )
        of_queries.append(dq)
        of_keys = jax.tree.map(jnp.add, of_keys, found) if of_keys else found
    return jnp.concatenate(of_queries, 1), *of_keys


def _gradient(sizes: Sizes, q, k, columns, marks: Marks, saved, dsums):
    grid = Grid(sizes, columns.shape[0], q.shape[1], k.shape[1], keys_first=True)
    marks, lengths = marks._replace(lengths=None), marks.lengths
    inputs = (q, k, columns, marks, saved, dsums)
    dq = jax.ShapeDtypeStruct((grid.rows, *q.shape[1:]), jnp.float32)
    dk = jax.ShapeDtypeStruct((grid.rows, *k.shape[1:]), jnp.float32)
    dcolumns = jax.ShapeDtypeStruct(columns.shape, jnp.float32)
    specs = (*grid.inputs(q, k, columns, marks), grid.queries(saved), grid.queries(dsums))
    outputs = [grid.all_queries(dq), grid.keys(dk), grid.keys(dcolumns)]
    return call(_gradient_kernel, grid, lengths, inputs, specs, [dq, dk, dcolumns], outputs)


def _forward_kernel(
    sizes, limit, q, k, columns, marks, spread, output, saved, highest, sums
):  # fmt: skip
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def start():
        highest[...] = jnp.full(highest.shape, -jnp.inf)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(meet(sizes, limit, i, j))
    def add():
        s = _scores(sizes, limit, i, j, q, k, marks)
        before = highest[...]
        highest[...] = jnp.maximum(before, s.max(1, keepdims=True))
        m = _finite(highest[...])
        e = jnp.exp(s - m)
        more = _sums(sizes, e, _kept(sizes, e, marks), columns[...], (1, 0), columns.dtype)
        sums[...] = jnp.exp(before - m) * sums[...] + more

    @pl.when(j == pl.num_programs(2) - 1)
    def finish():
        weights = sums[:, sizes.values :]
        place = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
        denominator = weights + pltpu.roll(weights, sizes.weights - sizes.heads, 1)
        # 1 where the query sees no key, and at columns that are padding.
        denominator = jnp.where(denominator > 0, denominator, 1)
        # The inverse of each head in three parts, side by side, which bfloat16 holds.
        rest, parts = jnp.where(place < sizes.heads, 1 / denominator, 0), jnp.zeros_like(weights)
        for n in range(3):
            part = _first_bits(rest) if n < 2 else rest
            rest, parts = rest - part, parts + pltpu.roll(part, n * sizes.heads, 1)
        inverse = _product(parts.astype(jnp.bfloat16), spread[...], 1, 0)
        output[...] = sums[:, : sizes.values] * inverse
        saved[...] = jnp.where(place == sizes.weights - 1, _finite(highest[...]), weights)


def _gradient_kernel(sizes, limit, q, k, columns, marks, saved, dsums, dq, dk, dcolumns):
    j, i = pl.program_id(1), pl.program_id(2)
    here = pl.ds(i * sizes.block_queries, sizes.block_queries)

    @pl.when(i == 0)
    def start():
        dk[...] = jnp.zeros(dk.shape, jnp.float32)
        dcolumns[...] = jnp.zeros(dcolumns.shape, jnp.float32)

    @pl.when(j == 0)
    def start_queries():
        dq[here, :] = jnp.zeros((sizes.block_queries, dq.shape[1]), jnp.float32)

    @pl.when(meet(sizes, limit, i, j))
    def add():
        e = jnp.exp(_scores(sizes, limit, i, j, q, k, marks) - saved[:, sizes.weights - 1 :])
        # Rounded as in the forward pass, so that what cancels there cancels here.
        e = e.astype(dsums.dtype).astype(jnp.float32)
        if sizes.keep == 1:
            kept = e
            ds = e * _product(dsums[...], columns[...], 1, 1)
        else:
            kept = _kept(sizes, e, marks)
            of_values, of_weights = (
                _product(dsums[:, part], columns[:, part], 1, 1)
                for part in (slice(sizes.values), slice(sizes.values, None))
            )
            ds = kept * of_values + e * of_weights
        ds = ds.astype(q.dtype)
        dq[here, :] += _product(ds, k[...], 1, 0)
        dk[...] += _product(ds, q[...], 0, 0)
        dcolumns[...] += _sums(sizes, e, kept, dsums[...], (0, 0), dsums.dtype)


def _sums(sizes, e, kept, columns, axes, dtype):
    """[E'·values, E·weights], over these axes."""
    if sizes.keep == 1:
        return _product(e.astype(dtype), columns, *axes)
    values = _product(kept.astype(dtype), columns[:, : sizes.values], *axes)
    weights = _product(e.astype(dtype), columns[:, sizes.values :], *axes)
    return jnp.concatenate([values, weights], 1)


def _kept(sizes, e, marks):
    """E where dropout keeps it; the same in both passes, whatever the blocks and devices."""
    if sizes.keep == 1:
        return e
    of_queries, of_keys = marks.words
    return jnp.where(is_kept(of_queries[...], of_keys[...], sizes.keep), e, 0)


def _first_bits(x):
    """x cut to what bfloat16 holds; not a cast there and back, which a compiler may remove."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**16))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _scores(sizes, limit, i, j, q, k, marks):
    """Scores of block i of queries and block j of keys, -inf where a key is hidden."""
    s = _product(q[...], k[...], 1, 1)
    key = j * sizes.block_keys + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
    if not isinstance(limit, int) or limit % sizes.block_keys:
        s = jnp.where(key < limit, s, -jnp.inf)
    if sizes.before is not None or sizes.after is not None:
        first = sizes.first + i * sizes.block_queries
        query = first + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
        if sizes.after is not None:
            s = jnp.where(key <= query + sizes.after, s, -jnp.inf)
        if sizes.before is not None:
            s = jnp.where(key >= query - sizes.before, s, -jnp.inf)
    if marks.first_key is not None:
        s = jnp.where(key >= marks.first_key[...], s, -jnp.inf)
    if marks.last_key is not None:
        s = jnp.where(key <= marks.last_key[...], s, -jnp.inf)
    if marks.key_valid is not None:
        s = jnp.where(marks.key_valid[...] != 0, s, -jnp.inf)
    if marks.segments is not None:
        of_queries, of_keys = marks.segments
        s = jnp.where(of_queries[...] == of_keys[...], s, -jnp.inf)
    return s


def _finite(m):
    """m; 0 for a query that has met no key, as exp(-inf - 0) is 0."""
    return jnp.where(m == -jnp.inf, 0, m)


def _product(a, b, axis_a, axis_b):
    """The product over one axis of each, added up in float32."""
    axes = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
