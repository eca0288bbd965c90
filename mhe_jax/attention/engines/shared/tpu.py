"""Shared scores by Pallas kernels on a TPU: `xla`, without a score matrix in memory.

The call is that of `xla`, with its factored softmax, bound and fallback. The columns

    X[h, j] = w[h, j] v[j, h]        w[h, j] = exp(b[h, j] - c[h])

are made here, and `kernels` takes them as the values of one head. Denominators, and their gradients
d, need more than the bfloat16 of a matrix unit. They are columns beside the values, in parts that
bfloat16 holds: with w = w₁ + w₂ and d = d₁ + d₂ + d₃,

    E w = E w₁ + E w₂        d w = [d₁, d₁, d₂, d₂, d₃, d₃]·[w₁, w₂, w₁, w₂, w₁, w₂]
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines.blocks import KEPT, Seen, Static, even, parts, round_up, seen_by
from mhe_jax.attention.engines.mesh import over_rows, platform
from mhe_jax.attention.engines.shared import factored, head_by_head, kernels
from mhe_jax.attention.engines.shared.grid import Marks, Sizes
from mhe_jax.attention.mask import Mask

LANES = 128
PARTS = 6
MAX_WIDTH = 1024
# Columns of a kernel, and queries or keys of a block: few steps, each with much to do.
GROUP_WIDTH = 1152
BLOCK = 512
# A block has keys, values, and weights twice (their sums are saved), at five bytes per bfloat16 and
# seven per float32, as gradients are always float32. A kernel, with two buffers for each array,
# then fits the 16 MiB that every chip has.
BLOCK_BYTES = 2**22
# More keys of a block, within more bytes, where a mask leaves none out and no dropout is drawn: the
# matrix units have more to do for what begins and ends a block (docs/fit.md). The forward kernel
# gains the most, and has less in memory.
WIDE_BLOCK = 1024
WIDE_BYTES = 6 * 2**20
FORWARD_BLOCKS = (2048, 1024)
FORWARD_BYTES = 14 * 2**20


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why the kernels cannot do this call, or None."""
    if platform() != "tpu":
        return f"needs a TPU, this is {platform()}"
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        names = ", ".join(sorted(map(str, dtypes)))
        return f"needs query, key and value in one of bfloat16 and float32, not {names}"
    # The weights that dropout leaves sum up in a column of their own.
    D, E = query.shape[-1], value.shape[-1] + (options.dropout_rate > 0)
    if max(D, E) > MAX_WIDTH:
        return f"needs heads no wider than {MAX_WIDTH}, not {D} and {E}"
    if options.precision is not None:
        return "has no precision setting"
    if mask.allowed is not None:
        return "takes a mask in parts only: causal, windows, padding, segments; not a dense array"
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale, blocks=None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend_shared`; `interpret` runs the kernels on any device, slowly."""
    B, T, S = *query.shape[:2], key.shape[1]
    static, seen = Static(scale, 1.0 - options.dropout_rate, None), seen_by(mask, options, B, T, S)
    if options.dropout_rate > 0:
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)

    def run(q, k, v, b, seen):
        sizes = _sizes(static, T, S, q.shape[2], b.shape[2], v, mask, blocks, interpret)
        return _shared(static, sizes, q, k, v, b, seen)

    output = over_rows(run, query, key, value, key_bias.astype(jnp.float32), seen)
    if options.dropout_rate > 0:
        return output[..., :-1], output[..., -1:]
    return output, mask.row_has_key(T, S, output.dtype)


def _sizes(static, T, S, D, R, v, mask, blocks, interpret) -> Sizes:
    E = v.shape[-1]
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
        keep=static.keep,
        interpret=interpret,
    )


def _output(static, sizes, q, k, v, b, seen) -> jax.Array:
    return _forward(static, sizes, q, k, v, b, seen)[0]


def _forward(static, sizes, q, k, v, b, seen):
    def one_by_one(q, k, v, values, b, seen):
        T = round_up(q.shape[1], sizes.block_queries)
        output = head_by_head.forward(static, q, k, v, b, seen).astype(b.dtype)
        output = _pad(_grouped(sizes, output), T, sizes.values)
        return output, jnp.zeros((len(output), T, sizes.weights), b.dtype)

    values = factored.values_of(q, v, b, seen)
    fits = factored.fits(static, q, v, values, b, seen)
    kernel = functools.partial(_kernel_forward, static, sizes)
    # Saved in the layout of the kernels: by heads it would be padded to twice the size and more.
    found = jax.lax.cond(fits, kernel, one_by_one, q, k, v, values, b, seen)
    output, saved = checkpoint_name(found, KEPT)
    heads = _heads_of(sizes, output, q.shape[1], b.shape[2]).astype(v.dtype)
    return heads, (q, k, v, b, seen, output, saved, fits)


def _backward(static, sizes, residuals, cotangent):
    def one_by_one(q, k, v, values, b, seen, output, saved, cotangent):
        return head_by_head.gradient(static, q, k, v, b, seen, cotangent)

    q, k, v, b, seen, *residuals, fits = residuals
    values = factored.values_of(q, v, b, seen)
    by_kernels = functools.partial(_kernel_gradient, static, sizes)
    call = q, k, v, values, b, seen, *residuals, cotangent
    return *jax.lax.cond(fits, by_kernels, one_by_one, *call), None


_shared = jax.custom_vjp(_output, nondiff_argnums=(0, 1))
_shared.defvjp(_forward, _backward)


def _kernel_forward(static, sizes, q, k, v, values, b, seen):
    """The output [N·C, T, X] in float32, and what else the kernel saves for its gradient."""
    *_, inputs = _inputs(static, sizes, q, k, values, b, seen)
    output, saved = kernels.forward(sizes, *inputs)
    return factored.times_power(output, _powers(sizes, values, b.shape[2])) / static.keep, saved


def _powers(sizes, values, R):
    """The exponent of each column [N·C, 1, X]."""
    exponent = values.exponent
    exponent = jnp.broadcast_to(exponent, (len(exponent), 1, R, exponent.shape[3]))
    return _pad(_grouped(sizes, exponent), 1, sizes.values)


def _kernel_gradient(static, sizes, q, k, v, values, b, seen, output, saved, cotangent):
    """Gradients of q, k, v and b; see `factored.gradient`."""
    (N, T, _), (_, S, R) = q.shape, b.shape
    w, columns, inputs = _inputs(static, sizes, q, k, values, b, seen)
    into, back = factored.cotangent_powers(values, cotangent)
    sums = _weights_of(sizes, saved, T, R)
    denominator = sums[0] + sums[1]
    denominator = jnp.where(denominator > 0, denominator, 1) * static.keep
    of_n = factored.times_any_power(cotangent, into) / denominator[..., None]
    # Both parts of the gradient are made from the same rounded numbers: see `factored.gradient`.
    of_n = of_n.astype(v.dtype)
    output = factored.times_power(output, -_powers(sizes, values, R)) * static.keep
    of_d = -(of_n * _heads_of(sizes, output, T, R)).sum(-1)
    of_d = [part for part in parts(of_d, PARTS // 2) for _ in range(2)]
    dsums = _pad(_side_by_side(sizes, of_n, of_d), saved.shape[1])
    dq, dk, dcolumns = kernels.gradient(sizes, *inputs, saved, dsums)

    def summed(x, length, width):
        x = x[:, :length].reshape(N, sizes.groups, length, -1).sum(1)[..., :width]
        return factored.times_any_power(x, back[..., 0])

    dq, dk = summed(static.scale * dq, T, q.shape[2]), summed(dk, S, k.shape[2])
    dw = sum(_weights_of(sizes, dcolumns, S, R)[::2])
    dcolumns = _heads_of(sizes, dcolumns, S, R)
    db = factored.times_any_power((dcolumns * columns).sum(-1) + w * dw, back[..., 0])
    dv = dcolumns * w[..., None]
    dv = factored.times_any_power(dv.sum(2, keepdims=True) if v.shape[2] == 1 else dv, -into)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), db


def _inputs(static, sizes, q, k, values, b, seen):
    """w [N, S, R], the columns of values [N, S, R, E], and the inputs of all kernels."""
    T, S = round_up(q.shape[1], sizes.block_queries), round_up(sizes.keys, sizes.block_keys)
    D = round_up(q.shape[2], LANES)
    w = factored.weights_of(b, factored.seen_keys(q, b, seen))
    w = jnp.broadcast_to(w, b.shape)
    columns = (w[..., None] * values.divided).astype(values.divided.dtype)
    laid = _side_by_side(sizes, columns, parts(w, 2) * (PARTS // 2))
    scaled = q * jnp.asarray(static.scale, q.dtype)
    marks = _marks(sizes, seen, q.shape[1])
    return w, columns, (_pad(scaled, T, D), _pad(k, S, D), _pad(laid, S), marks)


def _marks(sizes, seen: Seen, queries: int) -> Marks:
    """Mask and dropout, padded to whole blocks."""
    T, S = round_up(queries, sizes.block_queries), round_up(sizes.keys, sizes.block_keys)

    def of_queries(x):
        x = jnp.broadcast_to(x.astype(jnp.int32), (len(x), queries))
        return _pad(x, T)[..., None]

    def of_keys(x):
        x = jnp.broadcast_to(x.astype(jnp.int32), (len(x), sizes.keys))
        return _pad(x, S)[:, None]

    mask = seen.mask
    marks = Marks()
    if mask.key_valid is not None:
        marks = marks._replace(key_valid=of_keys(mask.key_valid))
    if mask.segment_ids is not None:
        queries_ids, keys_ids = mask.segment_ids
        marks = marks._replace(segments=(of_queries(queries_ids), of_keys(keys_ids)))
    first, last = mask.query_bounds(queries)
    if first is not None:
        marks = marks._replace(first_key=of_queries(first))
    if last is not None:
        marks = marks._replace(last_key=of_queries(last))
    if mask.key_lengths is not None:
        lengths = mask.key_lengths.astype(jnp.int32).clip(0, sizes.keys)
        marks = marks._replace(lengths=lengths)
    if seen.words is not None:
        marks = marks._replace(words=(of_queries(seen.words[0]), of_keys(seen.words[1])))
    return marks


def _side_by_side(sizes, columns, weights):
    """Columns [N, L, R, E] and the parts of weights [N, L, R] as [N·C, L, X + Y]."""
    weights = jnp.concatenate([_grouped(sizes, w[..., None]) for w in weights], -1)
    columns = _grouped(sizes, columns)
    L = columns.shape[1]
    both = _pad(columns, L, sizes.values), _pad(weights, L, sizes.weights)
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


def _pad(x, *sizes):
    """x [N, ...] with its next axes padded with zeros at the end, up to these sizes."""
    after = [0, *(size - n for n, size in zip(x.shape[1:], sizes, strict=False))]
    return jnp.pad(x, [(0, n) for n in after] + [(0, 0)] * (x.ndim - len(after)))
