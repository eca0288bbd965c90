"""The Pallas TPU kernels of `tpu`: attention of one head whose values are the columns of all heads.

q [N, T, D], k [N, S, D] and columns [N·C, S, X + Y] for C groups of H heads, with padded axes. The
first X columns are values `w[h] ⊙ v[h]`, E wide each; the other Y are weights w in parts of H
columns (see `tpu`). With s the scores, m the maximum over the keys that a query sees, and E' the E
that dropout keeps,

    E = exp(s - m)    sums = [E'·values, E·weights]    output = sums of values / sums of weights

and backward, with dsums the gradient of the sums, [dvalues, dweights],

    ds = E' ⊙ (dvalues·valuesᵀ) + E ⊙ (dweights·weightsᵀ)    dq = ds·k    dk = dsᵀ·q
    dcolumns = [E'ᵀ·dvalues, Eᵀ·dweights]

Keys of the padding are hidden here; its columns and dsums are 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mhe_jax.attention.engines.blocks import is_kept

# Gradients of queries that stay on the chip while a kernel runs; more take several kernels.
QUERIES_BYTES = 2**21


class Sizes(NamedTuple):
    """The static part of a call; the first three as of `blocks.Static`."""

    scale: float
    keep: float
    precision: Any
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
    interpret: bool
    forward_keys: int  # in place of block_keys, of the forward kernel
    first: int = 0  # position of the first of the queries, among all


class Marks(NamedTuple):
    """Parts of a mask as integers: of queries [N or 1, T, 1], of keys [N or 1, 1, S]."""

    key_valid: Any = None
    segments: Any = None  # a pair, of queries and of keys
    first_key: Any = None  # of queries: the first key that they see, and the last
    last_key: Any = None
    words: Any = None  # a pair, of `blocks.is_kept`
    lengths: Any = None  # [N or 1], in scalar memory; blocks of keys past them are skipped


def _of_queries(x):
    """Whether marks are of queries."""
    return x.ndim == 3 and x.shape[2] == 1


def _meet(sizes, limit, i, j):
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

    def queries(self, x):
        return self._spec(x, (self.sizes.block_queries, x.shape[2]), lambda i, j: (i, 0))

    def all_queries(self, x):
        """Stays on the chip while all blocks of a row add to it."""
        return pl.BlockSpec((None, *x.shape[1:]), lambda n, *_: (n, 0, 0))

    def keys(self, x):
        return self._spec(x, (self.sizes.block_keys, x.shape[2]), lambda i, j: (j, 0))

    def key_marks(self, x):
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
        sizes, last = self.sizes, self.shape[2] - 1
        size, step, before, after = sizes.block_queries, sizes.block_keys, sizes.before, sizes.after
        place = sizes.first + outer * size
        if self.keys_first:
            size, step, before, after = step, size, after, before
            place = outer * size - sizes.first
        if after is not None:
            last = jnp.minimum(last, _block(place + size - 1 + after, step))
        for each in () if self.keys_first else lengths:
            last = jnp.minimum(last, _block(self.limit(n, each) - 1, step))
        if before is not None:
            inner = jnp.maximum(inner, _block(place - before, step))
        inner = jnp.minimum(inner, last)
        if not self.keys_first:
            return outer, inner
        for each in lengths:
            inner = jnp.where(outer * size < self.limit(n, each), inner, 0)
        return inner, outer


def _block(place, size):
    """The block of a place; the first block for places before it."""
    return _divided(jnp.maximum(place, 0), size)


def _divided(place, size):
    # `//` asks what device this is, which a program compiled for another one cannot tell.
    return jax.lax.div(place, np.int32(size))


def _call(kernel, grid, q, k, columns, marks: Marks, more, outputs, scratch=()):
    """`more` arrays and the types of `outputs` each come with their `pl.BlockSpec`."""
    prefetched = () if marks.lengths is None else (marks.lengths,)
    marks = marks._replace(lengths=None)
    specs = jax.tree.map(lambda x: grid.queries(x) if _of_queries(x) else grid.key_marks(x), marks)
    specs = grid.queries(q), grid.keys(k), grid.keys(columns), specs, *(spec for _, spec in more)

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
            in_specs=specs,
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[of_type for of_type, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=grid.sizes.interpret,
        name=kernel.__name__.strip("_"),
    )(*prefetched, q, k, columns, marks, *(x for x, _ in more))


def forward(sizes: Sizes, q, k, columns, marks: Marks):
    """The output [N·C, T, X]; and [N·C, T, Y], the sums of weights, with m in the last place."""
    rows, T = columns.shape[0], q.shape[1]
    sizes = sizes._replace(block_keys=sizes.forward_keys)
    # For each value, the weights that sum to its denominator.
    of_heads = np.kron(np.eye(sizes.heads), np.ones(sizes.width))
    spread = np.zeros((sizes.weights, sizes.values), np.float32)
    spread[: 3 * sizes.heads, : of_heads.shape[1]] = np.tile(of_heads, (3, 1))
    grid = Grid(sizes, rows, T, k.shape[1])
    more = [(jnp.asarray(spread, jnp.bfloat16), pl.BlockSpec(spread.shape, lambda *_: (0, 0)))]
    outputs = [_float32(rows, T, width) for width in (sizes.values, sizes.weights)]
    outputs = [(x, grid.queries(x)) for x in outputs]
    scratch = (sizes.block_queries, 1), (sizes.block_queries, columns.shape[2])
    return _call(_forward_kernel, grid, q, k, columns, marks, more, outputs, scratch)


def gradient(sizes: Sizes, q, k, columns, marks: Marks, saved, dsums):
    """dq [N·C, T, D] and dk [N·C, S, D], one for each group, and dcolumns [N·C, S, X + Y]."""
    rows, (_, T, D) = columns.shape[0], q.shape
    most = max(1, QUERIES_BYTES // (4 * D * sizes.block_queries)) * sizes.block_queries
    dk, dcolumns = _float32(rows, *k.shape[1:]), _float32(*columns.shape)
    of_queries, of_keys = [], []
    for first in range(0, T, most):
        part = slice(first, first + most)
        own = jax.tree.map(lambda x, part=part: x[:, part] if _of_queries(x) else x, marks)
        dq = _float32(rows, min(most, T - first), D)
        grid = Grid(sizes._replace(first=first), rows, dq.shape[1], k.shape[1], keys_first=True)
        # One kernel after the other: what each gives for all keys is large.
        own_q, of_keys = jax.lax.optimization_barrier((q[:, part], of_keys))
        more = [(x[:, part], grid.queries(x)) for x in (saved, dsums)]
        outputs = (dq, grid.all_queries(dq)), *((x, grid.keys(x)) for x in (dk, dcolumns))
        found = _call(_gradient_kernel, grid, own_q, k, columns, own, more, outputs)
        of_queries.append(found[0])
        of_keys = jax.tree.map(jnp.add, of_keys, found[1:]) if of_keys else found[1:]
    return jnp.concatenate(of_queries, 1), *of_keys


def _float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


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

    @pl.when(_meet(sizes, limit, i, j))
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
