"""Shared scores by a Pallas Mosaic GPU kernel on Hopper: `xla`, without a forward score matrix.

The call is that of `xla`, with its factored softmax, bound and fallback; see `one_product` for the
columns. `hopper` has the kernel, which computes their sums; output and denominators are made from
them here. The backward pass is that of `xla`.

It is right on an H200 in the one call that was compared with float64. Its time was not measured, so
`auto` does not take it.
"""

import jax
import jax.numpy as jnp

from mhe_jax.attention.engines.blocks import Seen, Static, parts, round_up
from mhe_jax.attention.engines.mesh import gpu_capability, over_rows, platform, varying
from mhe_jax.attention.engines.shared import factored, xla
from mhe_jax.attention.engines.shared.one_product import OF_WEIGHTS
from mhe_jax.attention.mask import Mask

# From this version on, Pallas' interface to Mosaic GPU, which is not stable, was not tried.
UNTRIED_JAX = 0, 12
# Multiples to which columns, weights, and queries and keys are padded.
COLUMNS, WEIGHTS, LANES = 64, 16, 128
# Most columns of a program by the widest query, for shared memory, and with weights, for registers.
MAX_COLUMNS = {64: 256, 128: 192}
MAX_SUMS = 272


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why the kernel cannot do this call, or None."""
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, this is {platform()}"
    capability = gpu_capability()
    if capability is not None and capability != 9:
        return f"needs a GPU of compute capability 9.0 (Hopper), not {capability}"
    if jax.__version_info__[:2] >= UNTRIED_JAX:
        return f"needs jax before 0.12, not {jax.__version__}"
    for x in (query, key, value):
        if x.dtype != jnp.bfloat16:
            return f"needs bfloat16, not {x.dtype}"
    D = query.shape[-1]
    if max(MAX_COLUMNS) < D:
        return f"needs queries no wider than {max(MAX_COLUMNS)}, not {D}"
    if options.dropout_rate > 0:
        return "draws no dropout mask (attention dropout is not 0)"
    if options.precision is not None:
        return "has no precision setting"
    others = mask.key_valid, mask.segment_ids, mask.allowed, mask.window
    if mask.is_causal or any(part is not None for part in others):
        return "takes no mask but lengths of keys"
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend_shared`."""
    static, seen = Static(scale, 1.0, None), Seen(mask)

    def run(*call):
        return _shared(static, *varying(call, call))

    output = over_rows(run, query, key, value, key_bias.astype(jnp.float32), seen)
    return output, mask.row_has_key(query.shape[1], key.shape[1], output.dtype)


def _output(static, q, k, v, b, seen) -> jax.Array:
    return _forward(static, q, k, v, b, seen)[0]


def _forward(static, q, k, v, b, seen):
    return xla.forward(static, _by_kernel, q, k, v, b, seen)


_shared = jax.custom_vjp(_output, nondiff_argnums=(0,))
_shared.defvjp(_forward, xla.backward)


def _by_kernel(static: Static, q, k, values, b, seen: Seen):
    """See `one_product.forward`."""
    from mhe_jax.attention.engines.shared import hopper  # a later JAX may not have it

    (N, T, D), (_, S, R) = q.shape, b.shape
    w, columns = factored.columns_of(values, b, factored.seen_keys(q, b, seen))
    X, Y = columns.shape[2], OF_WEIGHTS * R
    chunks, V, W = _chunks(X, Y, D)
    lengths, masked = seen.mask.key_lengths, S % LANES > 0 or seen.mask.key_lengths is not None
    # A row without keys has columns of 0, and sees one key.
    lengths = jnp.full(1, S, jnp.int32) if lengths is None else lengths.astype(jnp.int32).clip(1, S)
    keys, width = round_up(S, LANES), round_up(D, COLUMNS)
    sums, of_weights = hopper.forward(
        hopper.Sizes(static.scale, chunks, V, W, masked),
        _pad(q, round_up(T, LANES), width),
        _pad(k, keys, width),
        _pad(columns, keys, chunks * V),
        _pad(jnp.concatenate(parts(w, OF_WEIGHTS), -1).astype(q.dtype), keys, chunks * W),
        jnp.broadcast_to(lengths, N),
    )
    denominator = of_weights[:, :T, :Y].reshape(N, T, OF_WEIGHTS, R).sum(2)
    # 0 where the query sees no key.
    denominator = jnp.where(denominator > 0, denominator, 1)
    heads = sums[:, :T, :X].reshape(N, T, R, -1) / denominator[..., None]
    output = factored.multiplied(values, heads)
    return varying((output.astype(q.dtype), output, denominator), q)


def _chunks(columns: int, weights: int, width: int) -> tuple[int, int, int]:
    """Chunks of columns, and how many columns and weights each has."""
    most = next(columns for widest, columns in MAX_COLUMNS.items() if width <= widest)
    chunks = -(-columns // most)
    while True:
        V, W = round_up(-(-columns // chunks), COLUMNS), round_up(-(-weights // chunks), WEIGHTS)
        if V + W <= MAX_SUMS:
            return chunks, V, W
        chunks += 1


def _pad(x, length: int, width: int):
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, width - x.shape[2])))
