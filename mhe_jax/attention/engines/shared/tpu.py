"""Shared scores by Pallas kernels on a TPU: `xla`, with no score matrix in memory.

The call is that of `xla`, with its factored softmax, bound and way out of it. The columns

    X[h, j] = w[h, j] v[j, h]        w[h, j] = exp(b[h, j] - c[h])

are made here, and `kernels` takes them as the values of one head. Denominators, and their
gradients d, ask for more than the bfloat16 of a matrix unit. They ride along with the values, as
columns in parts that bfloat16 holds: with w = w₁ + w₂ and d = d₁ + d₂,

    E w = E w₁ + E w₂        d w = [d₁, d₁, d₂, d₂]·[w₁, w₂, w₁, w₂]
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines.blocks import KEPT, Seen, Static
from mhe_jax.attention.engines.mesh import over_rows, platform
from mhe_jax.attention.engines.shared import factored, head_by_head, kernels
from mhe_jax.attention.engines.shared.kernels import Sizes
from mhe_jax.attention.mask import Mask

LANES = 128
PARTS = 4
MAX_WIDTH = 1024
# Columns of a kernel, and queries or keys of a block: few steps, each with much to do.
GROUP_WIDTH = 1152
BLOCK = 512
# A block has keys, values, and weights twice (their sums are saved); five bytes for a bfloat16 and
# seven for a float32, as gradients are float32 in any case. A kernel, with two buffers for each
# array, is then within the 16 MiB that every chip has.
BLOCK_BYTES = 2**22


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why the kernels cannot do this call, or None."""
    if platform() != "tpu":
        return f"needs a TPU, this is {platform()}"
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        names = ", ".join(sorted(map(str, dtypes)))
        return f"needs query, key and value in one of bfloat16 and float32, not {names}"
    D, E = query.shape[-1], value.shape[-1]
    if max(D, E) > MAX_WIDTH:
        return f"needs heads no wider than {MAX_WIDTH}, not {D} and {E}"
    if options.dropout_rate > 0:
        return "draws no dropout mask (attention dropout is not 0)"
    if options.precision is not None:
        return "has no precision setting"
    if mask.allowed is not None:
        return "takes a mask in parts only: causal, padding, segments; not a dense array"
    if mask.is_causal and mask.offset is not None:
        return "takes a causal mask without an offset only"
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale, blocks=None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend_shared`; `interpret` runs the kernels on any device, slowly."""
    T, S = query.shape[1], key.shape[1]

    def run(q, k, v, b, seen):
        sizes = _sizes(T, S, q.shape[2], b.shape[2], v, mask, blocks, interpret)
        return _shared(Static(scale, 1.0, None), sizes, q, k, v, b, seen)

    output = over_rows(run, query, key, value, key_bias.astype(jnp.float32), Seen(mask))
    return output, mask.row_has_key(T, S, output.dtype)


def _sizes(T, S, D, R, v, mask, blocks, interpret) -> Sizes:
    E = v.shape[-1]
    heads = -(-R // -(-R * (E + PARTS) // GROUP_WIDTH))
    values, weights = _up(heads * E, LANES), _up(PARTS * heads + 1, LANES)
    if blocks is None:
        columns = _up(D, LANES) + values + 2 * weights
        most = BLOCK_BYTES // (columns * (v.dtype.itemsize + 3))
        most = max(LANES, min(BLOCK, most // LANES * LANES))
        blocks = _even(T, most), _even(S, most)
    groups, (block_queries, block_keys) = -(-R // heads), blocks
    return Sizes(
        S, groups, heads, E, values, weights, block_queries, block_keys, mask.is_causal, interpret
    )


def _even(length, most):
    """The size of blocks, at most `most`, that leaves the least padding for their number."""
    return _up(-(-length // -(-length // most)), LANES)


def _up(size, step):
    return -(-size // step) * step


def _output(static, sizes, q, k, v, b, seen) -> jax.Array:
    return _forward(static, sizes, q, k, v, b, seen)[0]


def _forward(static, sizes, q, k, v, b, seen):
    def one_by_one(q, k, v, values, b, seen):
        rows = q.shape[0] * sizes.groups, _up(q.shape[1], sizes.block_queries), sizes.weights
        return head_by_head.forward(static, q, k, v, b, seen), jnp.zeros(rows, b.dtype)

    values = factored.values_of(q, v, b, seen)
    fits = factored.fits(static, q, v, values, b, seen)
    kernel = functools.partial(_kernel_forward, static, sizes)
    found = jax.lax.cond(fits, kernel, one_by_one, q, k, v, values, b, seen)
    output, saved = checkpoint_name(found, KEPT)
    return output, (q, k, v, b, seen, output, saved, fits)


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
    """The output [N, T, R, E], and what the kernel saves."""
    w, columns = factored.columns_of(values, b, factored.seen_keys(q, b, seen))
    output, saved = kernels.forward(sizes, *_inputs(static, sizes, q, k, v, w, columns, seen))
    output = _heads_of(sizes, output, q.shape[1], b.shape[2], v.shape[3])
    return factored.multiplied(values, output).astype(v.dtype), saved


def _kernel_gradient(static, sizes, q, k, v, values, b, seen, output, saved, cotangent):
    """Gradients of q, k, v and b; see `factored.gradient`."""
    (N, T, _), (_, S, R), E = q.shape, b.shape, v.shape[3]
    w, columns = factored.columns_of(values, b, factored.seen_keys(q, b, seen))
    inputs = _inputs(static, sizes, q, k, v, w, columns, seen)
    into, back = factored.cotangent_powers(values, cotangent)

    def of_part(x, part, length):
        return _heads_of(sizes, x[:, :, part * sizes.heads :], length, R, 1)[..., 0]

    denominator = of_part(saved, 0, T) + of_part(saved, 1, T)
    denominator = jnp.where(denominator > 0, denominator, 1)
    of_n = factored.times_any_power(cotangent, into) / denominator[..., None]
    of_d = -(of_n * factored.divided(values, output)).sum(-1)
    first, second = _parts(of_d)
    dsums = _side_by_side(sizes, of_n, [first, first, second, second], v.dtype)
    inputs = *inputs, saved, _pad(dsums, saved.shape[1])

    dq = kernels.gradient_of_queries(sizes, *inputs)[:, :T].reshape(N, sizes.groups, T, -1)
    dq = dq.sum(1)[..., : q.shape[2]]
    dk, dcolumns = kernels.gradient_of_keys(sizes, *inputs)
    dk = dk[:, :S].reshape(N, sizes.groups, S, -1).sum(1)[..., : k.shape[2]]
    of_weights = dcolumns[..., sizes.values :]
    dw = of_part(of_weights, 0, S) + of_part(of_weights, 2, S)
    dcolumns = _heads_of(sizes, dcolumns, S, R, E)
    dv, db = factored.columns_gradient(static, values, w, columns, dw, dcolumns, into, back)
    dq = factored.times_any_power(static.scale * dq, back[..., 0])
    dk = factored.times_any_power(dk, back[..., 0])
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, db


def _inputs(static, sizes, q, k, v, w, columns, seen):
    """The inputs of all kernels, padded to whole blocks."""
    T, S = _up(q.shape[1], sizes.block_queries), _up(sizes.keys, sizes.block_keys)
    D = _up(q.shape[2], LANES)
    first, second = _parts(w)
    columns = columns.reshape(*w.shape, -1)
    columns = _side_by_side(sizes, columns, [first, second, first, second], v.dtype)
    mask = seen.mask
    key_valid, of_queries, of_keys = mask.key_valid, *(mask.segment_ids or (None, None))
    marks = kernels.Marks(
        None if key_valid is None else _marks(key_valid, sizes.keys, S)[:, None],
        None if of_queries is None else _marks(of_queries, q.shape[1], T)[..., None],
        None if of_keys is None else _marks(of_keys, sizes.keys, S)[:, None],
    )
    scaled = q * jnp.asarray(static.scale, q.dtype)
    return _pad(scaled, T, D), _pad(k, S, D), _pad(columns, S), marks


def _marks(x, length, padded):
    """Part of a mask, [N, length] or one mark for the whole length, to integers [N, padded]."""
    return _pad(jnp.broadcast_to(x.astype(jnp.int32), (len(x), length)), padded)


def _parts(x):
    """Two numbers that add up to x, the first of which bfloat16 holds."""
    # Not a cast to and fro, which XLA may leave out.
    first = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return first, x - first


def _side_by_side(sizes, values, weights, dtype):
    """values [N, L, R, E] and four weights [N, L, R] to [N·C, L, X + Y]."""
    weights = jnp.concatenate([_grouped(sizes, w[..., None]) for w in weights], -1)
    values = _grouped(sizes, values)
    L = values.shape[1]
    both = _pad(values, L, sizes.values), _pad(weights, L, sizes.weights)
    return jnp.concatenate([x.astype(dtype) for x in both], -1)


def _grouped(sizes, x):
    """[N, L, R, E] to [N·C, L, H·E]; heads beyond R are 0."""
    N, L, R, E = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, sizes.groups * sizes.heads - R), (0, 0)))
    x = x.reshape(N, L, sizes.groups, -1).swapaxes(1, 2)
    return x.reshape(N * sizes.groups, L, -1)


def _heads_of(sizes, x, L, R, E):
    """The first columns of x [N·C, ≥ L, ≥ H·E] as [N, L, R, E]."""
    x = x[:, :L, : sizes.heads * E].reshape(-1, sizes.groups, L, sizes.heads * E)
    return x.swapaxes(1, 2).reshape(x.shape[0], L, -1, E)[:, :, :R]


def _pad(x, *sizes):
    """x [N, ...] with zeros behind its next axes, up to these sizes."""
    after = [0, *(size - n for n, size in zip(x.shape[1:], sizes, strict=False))]
    return jnp.pad(x, [(0, n) for n in after] + [(0, 0)] * (x.ndim - len(after)))
