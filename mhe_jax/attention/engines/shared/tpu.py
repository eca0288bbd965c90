"""Shared scores by Pallas kernels on a TPU, without a score matrix in memory.

The columns

    X[h, j] = w[h, j] v[j, h]        w[h, j] = exp(b[h, j] - c[h])

are made here, and `kernels` takes them as the values of one head. Denominators, and their gradients
d, need more than the bfloat16 of a matrix unit. They are columns beside the values, in parts that
bfloat16 holds: with w = w₁ + w₂ and d = d₁ + d₂ + d₃,

    E w = E w₁ + E w₂        d w = [d₁, d₁, d₂, d₂, d₃, d₃]·[w₁, w₂, w₁, w₂, w₁, w₂]
"""

import functools

import jax
import jax.numpy as jnp

from mhe_jax.attention.engines import shared, splash
from mhe_jax.attention.engines.blocks import Seen, Static, even, pad, parts, round_up
from mhe_jax.attention.engines.shared import Values, Way, kernels, times_any_power, times_power
from mhe_jax.attention.engines.shared.kernels import Marks, Sizes
from mhe_jax.attention.engines.splash import LANES
from mhe_jax.attention.mask import Mask

PARTS = 6
# Columns of a kernel, and queries or keys of a block: few steps, each with much to do.
GROUP_WIDTH = 1152
BLOCK = 512
# A block has keys, values, and weights twice (their sums are saved), at five bytes per bfloat16 and
# seven per float32: a kernel, with two buffers for each array, fits the 16 MiB that every chip has.
BLOCK_BYTES = 2**22
# More keys, within more bytes, where a mask leaves none out and no dropout is drawn.
# The forward kernel gains the most, and has less in memory.
WIDE_BLOCK = 1024
WIDE_BYTES = 6 * 2**20
FORWARD_BLOCKS = (2048, 1024)
FORWARD_BYTES = 14 * 2**20
# Keys whose gradients, of all columns in float32, are in memory at a time.
BAND = 2**15


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why the kernels cannot do this call, or None."""
    # The weights that dropout leaves sum up in a column of their own.
    widths = query.shape[-1], value.shape[-1] + (options.dropout_rate > 0)
    return splash.unsuited((query, key, value), widths, mask, options)


def attend(query, key, value, key_bias, mask, options, *, scale, blocks=None, interpret=False):
    """See `engines.attend`; `interpret` runs the kernels on any device, slowly."""
    prepare = functools.partial(sizes_of, blocks, interpret)
    return shared.attend(WAY, query, key, value, key_bias, mask, options, scale, prepare)


def sizes_of(blocks, interpret, static: Static, q, k, v, b, mask: Mask) -> Sizes:
    (T, D), (S, R), E = q.shape[1:], b.shape[1:], v.shape[-1]
    heads = -(-R // -(-R * (E + PARTS) // GROUP_WIDTH))
    values, weights = round_up(heads * E, LANES), round_up(PARTS * heads + 1, LANES)
    before, after = mask.static_bounds()
    if blocks is None:
        columns = round_up(D, LANES) + values + 2 * weights
        bytes_of_key = columns * (v.dtype.itemsize + 3)
        most = BLOCK_BYTES // bytes_of_key
        most = max(LANES, min(BLOCK, most // LANES * LANES))
        blocks = even(T, most, LANES), even(S, most, LANES)
        whole = (before, after, static.keep) == (None, None, 1)
        if whole and S % WIDE_BLOCK == 0 and WIDE_BLOCK * bytes_of_key <= WIDE_BYTES:
            blocks = blocks[0], WIDE_BLOCK
        fit = (n for n in FORWARD_BLOCKS if S % n == 0 and n * bytes_of_key <= FORWARD_BYTES)
        if whole and (forward := next(fit, None)):
            blocks = *blocks, forward
    queries, keys, *forward_keys = blocks
    return Sizes(
        *static,
        keys=S,
        groups=-(-R // heads),
        heads=heads,
        width=E,
        values=values,
        weights=weights,
        block_queries=queries,
        block_keys=keys,
        forward_keys=forward_keys[0] if forward_keys else keys,
        before=before,
        after=after,
        interpret=interpret,
    )


def _forward(sizes: Sizes, q, k, values: Values, b, seen: Seen):
    """The output [N·C, T, X] in float32, and what else the kernel saves for its gradient."""
    w, columns = _columns(values, q, b, seen)
    output, saved = kernels.forward(sizes, *_inputs(sizes, q, k, w, columns, seen))
    output = times_power(output, _powers(sizes, values, b.shape[2])) / sizes.keep
    # In the layout of the kernels: by heads it would be padded to twice the size and more.
    return None, (output, saved)


def _placed(sizes, output, b):
    T = round_up(output.shape[1], sizes.block_queries)
    output = pad(_grouped(sizes, output.astype(b.dtype)), T, sizes.values)
    return output, jnp.zeros((len(output), T, sizes.weights), b.dtype)


def _output(sizes, kept, q, b):
    return _heads_of(sizes, kept[0], q.shape[1], b.shape[2]).astype(q.dtype)


def _powers(sizes, values, R):
    """The exponent of each column [N·C, 1, X]."""
    exponent = values.exponent
    exponent = jnp.broadcast_to(exponent, (len(exponent), 1, R, exponent.shape[3]))
    return pad(_grouped(sizes, exponent), 1, sizes.values)


def _gradient(sizes: Sizes, q, k, v, values: Values, b, seen: Seen, kept, cotangent):
    (N, T, _), (_, S, R), (output, saved) = q.shape, b.shape, kept
    w, columns = _columns(values, q, b, seen)
    into, back = shared.cotangent_powers(values, cotangent)
    sums = _weights_of(sizes, saved, T, R)
    denominator = sums[0] + sums[1]
    denominator = jnp.where(denominator > 0, denominator, 1) * sizes.keep
    of_n = times_any_power(cotangent, into) / denominator[..., None]
    # Both parts of the gradient are made from the same rounded numbers: see `xla`.
    of_n = of_n.astype(v.dtype)
    output = times_power(output, -_powers(sizes, values, R)) * sizes.keep
    of_d = -(of_n * _heads_of(sizes, output, T, R)).sum(-1)
    of_d = [part for part in parts(of_d, PARTS // 2) for _ in range(2)]
    dsums = pad(_side_by_side(sizes, of_n, of_d), saved.shape[1])

    def summed(x, length, width):
        x = x[:, :length].reshape(N, sizes.groups, length, -1).sum(1)[..., :width]
        return times_any_power(x, back[..., 0])

    def of_band(first, stop, start):
        """Gradients of the queries from `start` on, and of the keys [first, stop)."""
        here = seen if stop - first == S else seen.block(start, T - start, stop, first)
        before, after = here.mask.static_bounds()
        own = sizes._replace(keys=stop - first, before=before, after=after)
        band = slice(first, stop)
        weights, values = w[:, band], columns[:, band]
        inputs = _inputs(own, q[:, start:], k[:, band], weights, values, here)
        dq, dk, dcolumns = kernels.gradient(own, *inputs, saved[:, start:], dsums[:, start:])
        dq, dk = summed(sizes.scale * dq, T - start, q.shape[2]), summed(dk, own.keys, k.shape[2])
        dw = sum(_weights_of(own, dcolumns, own.keys, R)[::2])
        dcolumns = _heads_of(own, dcolumns, own.keys, R)
        db = times_any_power((dcolumns * values).sum(-1) + weights * dw, back[..., 0])
        dv = dcolumns * weights[..., None]
        dv = times_any_power(dv.sum(2, keepdims=True) if v.shape[2] == 1 else dv, -into)
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype), db)

    dq, of_keys = jnp.zeros(q.shape, jnp.float32), []
    for first in range(0, S, BAND):
        start = 0 if sizes.after is None else min(max(first - sizes.after, 0), T - 1)
        start = start // sizes.block_queries * sizes.block_queries
        # One band after the other, as each needs much memory.
        dsums, of_keys = jax.lax.optimization_barrier((dsums, of_keys))
        more, found = of_band(first, min(first + BAND, S), start)
        dq = dq.at[:, start:].add(more) if S > BAND else more
        of_keys.append(found)
    dk, dv, db = jax.tree.map(lambda *bands: jnp.concatenate(bands, 1), *of_keys)
    return dq.astype(q.dtype), dk, dv, db


def _columns(values, q, b, seen):
    """w [N, S, R], and the columns of values [N, S, R, E]."""
    w, columns = shared.columns_of(values, q, b, seen)
    return w, columns.reshape(*w.shape, -1)


def _inputs(sizes, q, k, w, columns, seen):
    """The inputs of all kernels."""
    T, S = round_up(q.shape[1], sizes.block_queries), round_up(sizes.keys, sizes.block_keys)
    D = round_up(q.shape[2], LANES)
    laid = _side_by_side(sizes, columns, parts(w, 2) * (PARTS // 2))
    scaled = q * jnp.asarray(sizes.scale, q.dtype)
    marks = _marks(sizes, seen, q.shape[1], T, S)
    return pad(scaled, T, D), pad(k, S, D), pad(laid, S), marks


def _marks(sizes, seen: Seen, queries: int, T: int, S: int) -> Marks:
    """Mask and dropout, padded to T queries and S keys."""

    def of_queries(x):
        x = jnp.broadcast_to(x.astype(jnp.int32), (len(x), queries))
        return pad(x, T)[..., None]

    def of_keys(x):
        x = jnp.broadcast_to(x.astype(jnp.int32), (len(x), sizes.keys))
        return pad(x, S)[:, None]

    def of_both(pair):
        return pair and (of_queries(pair[0]), of_keys(pair[1]))

    mask, lengths = seen.mask, seen.mask.key_lengths
    first, last = mask.query_bounds(queries)
    return Marks(
        key_valid=None if mask.key_valid is None else of_keys(mask.key_valid),
        segments=of_both(mask.segment_ids),
        first_key=None if first is None else of_queries(first),
        last_key=None if last is None else of_queries(last),
        words=of_both(seen.words),
        lengths=None if lengths is None else lengths.astype(jnp.int32).clip(0, sizes.keys),
    )


def _side_by_side(sizes, columns, weights):
    """Columns [N, L, R, E] and the parts of weights [N, L, R] as [N·C, L, X + Y]."""
    weights = jnp.concatenate([_grouped(sizes, w[..., None]) for w in weights], -1)
    columns = _grouped(sizes, columns)
    L = columns.shape[1]
    both = pad(columns, L, sizes.values), pad(weights, L, sizes.weights)
    return jnp.concatenate([x.astype(columns.dtype) for x in both], -1)


def _grouped(sizes, x):
    """[N, L, R, E] to [N·C, L, H·E]; heads beyond R are 0."""
    N, L, R, E = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, sizes.groups * sizes.heads - R), (0, 0)))
    if E % LANES == 0:
        # A TPU takes many times longer for the reshape of whole tiles.
        x = jnp.concatenate([x[:, :, h] for h in range(x.shape[2])], -1)
    x = x.reshape(N, L, sizes.groups, -1).swapaxes(1, 2)
    return x.reshape(N * sizes.groups, L, -1)


def _heads_of(sizes, x, L, R):
    """The R heads of x [N·C, ≥ L, ≥ X]: [N, L, R, E]."""
    E = sizes.width
    x = x.reshape(-1, sizes.groups, *x.shape[1:])[:, :, :L]
    if E % LANES == 0:
        places = [divmod(h, sizes.heads) for h in range(R)]
        return jnp.stack([x[:, c, :, h * E : (h + 1) * E] for c, h in places], 2)
    x = x[..., : sizes.heads * E].swapaxes(1, 2)
    return x.reshape(x.shape[0], L, -1, E)[:, :, :R]


def _weights_of(sizes, x, L, R):
    """The parts of weights, each [N, L, R], of x [N·C, ≥ L, .. Y]."""
    x = x[:, :L, -sizes.weights :][..., : PARTS * sizes.heads]
    x = x.reshape(-1, sizes.groups, L, PARTS, sizes.heads)
    x = x.transpose(3, 0, 2, 1, 4).reshape(PARTS, -1, L, sizes.groups * sizes.heads)
    return [part[:, :, :R] for part in x]


WAY = Way(_forward, _gradient, _placed, _output, skips=True)
