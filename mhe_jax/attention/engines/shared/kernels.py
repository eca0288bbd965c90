"""The Pallas TPU kernels of `tpu`: attention of one head whose values are the columns of all heads.

q [N, T, D], k [N, S, D] and columns [N·C, S, X + Y] for C groups of H heads, with padded axes. The
first X columns are values `w[h] ⊙ v[h]`, E wide each; the other Y are weights w in parts of H
columns (see `tpu`). With s the scores, m the maximum over the keys that a query sees, and E' the E
that dropout keeps,

    E = exp(s - m)    sums = [E'·values, E·weights]    output = sums of values / sums of weights

and backward, with dsums the gradient of the sums, [dvalues, dweights],

    ds = E' ⊙ (dvalues·valuesᵀ) + E ⊙ (dweights·weightsᵀ)    dq = ds·k    dk = dsᵀ·q
    dcolumns = [E'ᵀ·dvalues, Eᵀ·dweights]

Nothing of size T·S leaves the chip's own memory. Of the padding, keys are hidden here, columns and
dsums are 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Gradients of queries that stay on the chip while a kernel runs; more go in several.
QUERIES_BYTES = 2**21


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
    before: int | None  # a query t sees no key but [t - before, t + after]
    after: int | None
    keep: float  # share of the weights that dropout keeps
    interpret: bool
    first: int = 0  # of the queries, among all


class Marks(NamedTuple):
    """Parts of a mask as integers: of queries [N or 1, T, 1], of keys [N or 1, 1, S].

    `bits` are random ones, of which dropout makes its mask; `lengths` [N or 1], in the memory of
    scalars, are numbers of keys, of which blocks without any are skipped.
    """

    key_valid: Any = None
    segments: Any = None  # a pair, of queries and of keys
    first_key: Any = None  # of queries: the first key that they see, and the last
    last_key: Any = None
    bits: Any = None  # a pair
    lengths: Any = None


def forward(sizes: Sizes, q, k, columns, marks: Marks):
    """The output [N·C, T, X]; and [N·C, T, Y], the sums of weights, with m in the last place."""
    rows, T = columns.shape[0], q.shape[1]
    # For each value the weights that its denominator is the sum of.
    of_heads = np.kron(np.eye(sizes.heads), np.ones(sizes.width))
    spread = np.zeros((sizes.weights, sizes.values), np.float32)
    spread[: 3 * sizes.heads, : of_heads.shape[1]] = np.tile(of_heads, (3, 1))
    grid = _Grid(sizes, rows, T, k.shape[1])
    marks, lengths = marks._replace(lengths=None), marks.lengths
    outputs = [
        jax.ShapeDtypeStruct((rows, T, sizes.values), jnp.float32),
        jax.ShapeDtypeStruct((rows, T, sizes.weights), jnp.float32),
    ]
    return _call(
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
        own = jax.tree.map(lambda x, part=part: x[:, part] if _of_queries(x) else x, marks)
        dq, *found = _gradient(
            sizes._replace(first=first), q[:, part], k, columns, own, saved[:, part], dsums[:, part]
        )
        of_queries.append(dq)
        of_keys = jax.tree.map(jnp.add, of_keys, found) if of_keys else found
    return jnp.concatenate(of_queries, 1), *of_keys


def _gradient(sizes: Sizes, q, k, columns, marks: Marks, saved, dsums):
    grid = _Grid(sizes, columns.shape[0], q.shape[1], k.shape[1], keys_first=True)
    marks, lengths = marks._replace(lengths=None), marks.lengths
    inputs = (q, k, columns, marks, saved, dsums)
    dq = jax.ShapeDtypeStruct((grid.rows, *q.shape[1:]), jnp.float32)
    dk = jax.ShapeDtypeStruct((grid.rows, *k.shape[1:]), jnp.float32)
    dcolumns = jax.ShapeDtypeStruct(columns.shape, jnp.float32)
    specs = (*grid.inputs(q, k, columns, marks), grid.queries(saved), grid.queries(dsums))
    outputs = [grid.all_queries(dq), grid.keys(dk), grid.keys(dcolumns)]
    return _call(_gradient_kernel, grid, lengths, inputs, specs, [dq, dk, dcolumns], outputs)


def _forward_kernel(
    sizes, limit, q, k, columns, marks, spread, output, saved, highest, sums
):  # fmt: skip
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def start():
        highest[...] = jnp.full(highest.shape, -jnp.inf)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(_meet(sizes, limit, i, j))
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
        # The inverse of each head in three parts, side by side, that bfloat16 holds.
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

    @pl.when(_meet(sizes, limit, i, j))
    def add():
        e = jnp.exp(_scores(sizes, limit, i, j, q, k, marks) - saved[:, sizes.weights - 1 :])
        # Rounded as the forward pass has it, so that what cancels there cancels here.
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
    of_queries, of_keys = marks.bits
    # Two words of random bits, mixed as by the finalizers of hash functions.
    x = of_queries[...] ^ of_keys[...]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        x = x ^ jax.lax.shift_right_logical(x, np.int32(shift))
        if factor is not None:
            x = x * np.uint32(factor).astype(np.int32)
    return jnp.where(x < np.int32(round(sizes.keep * 2**32) - 2**31), e, 0)


def _first_bits(x):
    """x cut to what bfloat16 holds; not a cast to and fro, which a compiler may leave out."""
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


def _product(a, b, axis_a, axis_b, precision=None):
    """The product over one axis of each, added up in float32."""
    axes = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)


def _meet(sizes, limit, i, j):
    """Whether a query of block i may see a key of block j."""
    query, key = sizes.first + i * sizes.block_queries, j * sizes.block_keys
    meet = True if isinstance(limit, int) else key < limit
    if sizes.after is not None:
        meet &= key < query + sizes.block_queries + sizes.after
    if sizes.before is not None:
        meet &= key + sizes.block_keys > query - sizes.before
    return meet


def _of_queries(x):
    """Whether marks are of queries."""
    return x.ndim == 3 and x.shape[2] == 1


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
        specs = jax.tree.map(
            lambda x: self.queries(x) if _of_queries(x) else self._key_marks(x), marks
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
        """The blocks (i, j); of those that are skipped, one that is at hand or needed next."""
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
    """The block of a place, the first for those before it."""
    return _divided(jnp.maximum(place, 0), size)


def _divided(place, size):
    # `//` asks what device this is, which a program that is compiled for another cannot tell.
    return jax.lax.div(place, np.int32(size))


def _call(kernel, grid, lengths, inputs, input_specs, outputs, output_specs, scratch=()):
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
