"""Softmax attention by cuDNN's fused kernels on an NVIDIA GPU."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.engines.blocks import BIAS_PARTS, with_bias_columns
from mhe_jax.attention.engines.mesh import gpu_capability, parts_of_heads, platform
from mhe_jax.attention.mask import Mask

# The name of its primitive in `jax.nn.dot_product_attention`.
SAVED = ("dot_product_attention_fwd_wrapper",)
# Of a head: below compute capability 9.0 (Hopper), and from 9.0 on.
MAX_WIDTH = 128, 256


def unsuited(dtype, widths: tuple[int, ...], options) -> str | None:
    """Why cuDNN can do no call of this type and these widths of heads here, or None."""
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, this is {platform()}"
    if dtype not in (jnp.float16, jnp.bfloat16):
        return f"needs float16 or bfloat16, not {dtype}"
    capability = gpu_capability()
    if capability is not None and capability < 8:
        return f"needs a GPU of compute capability 8.0 or more, not {capability}"
    # JAX asks the device that is here, and assumes an old one where there is none.
    most = MAX_WIDTH[capability is not None and capability >= 9]
    if max(widths) > most:
        found = " and ".join(map(str, widths))
        return f"needs heads no wider than {most} on this GPU, not {found}"
    if options.dropout_rate > 0:
        return "does not draw the dropout mask of this package (attention dropout is not 0)"
    if options.sow is not None:
        return "keeps no attention weights to sow"
    if options.precision is not None:
        return "has no precision setting"
    return None


def runs_by_itself(dtype, queries: int, width: int, mask: Mask, options) -> bool:
    """Whether cuDNN runs self-attention of heads that share keys, with no mask in memory."""
    if unsuited(dtype, (width,), options) is not None or parts_of_heads() > 1:
        return False
    rest = _split(mask, queries, queries)[1]
    others = rest.window, rest.key_valid, rest.segment_ids, rest.allowed
    if rest.is_causal or any(part is not None for part in others):
        return False
    head = jax.ShapeDtypeStruct((1, queries, 1, width), dtype)
    return missing(*jax.eval_shape(_padded, head, head, head)) is None


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why cuDNN cannot do this call, or None."""
    D, E = query.shape[-1] + BIAS_PARTS * (key_bias is not None), value.shape[-1]
    reason = unsuited(query.dtype, (D, E), options)
    if reason is not None:
        return reason
    T, S = query.shape[1], key.shape[1]
    if (T % 2 or S % 2) and _split(mask, T, S)[1].to_dense(T, S) is not None:
        return f"needs even lengths for such a mask, not {T} queries and {S} keys"
    H, K, parts = query.shape[2], key.shape[2], parts_of_heads()
    if parts > 1 and (H != K or H % parts):
        return (
            f"needs as many key heads as query heads, and a multiple of {parts}, where a mesh "
            f"splits them into {parts} parts, not {H} query and {K} key heads"
        )
    return missing(*_padded(query, key, value))


def missing(query, key, value) -> str | None:
    """Why cuDNN itself is not available here, or None."""
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(call, query, key, value)
    except RuntimeError as error:
        return f"cannot run here: {error}"
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend`."""
    T, S, E = query.shape[1], key.shape[1], value.shape[-1]
    if key_bias is not None:
        query, key, value = with_bias_columns(query, key, value, key_bias / scale)
    query, key, value = _padded(query, key, value)
    native, rest = _split(mask, T, S)
    has_key = mask.row_has_key(T, S, query.dtype)
    # A query without a key sees some all the same: else cuDNN divides by 0, and its gradient is NaN
    # even where that of the output is 0.
    allowed = rest.to_dense(T, S)
    if allowed is not None:
        allowed |= has_key.swapaxes(1, 2) == 0
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], T, S))
    lengths = native.key_lengths
    if lengths is not None:
        lengths = jnp.broadcast_to(lengths, len(query)).astype(jnp.int32).clip(1, S)
    if parts_of_heads() > 1:
        # cuDNN takes only arrays that are split alike, and `el` cuts its keys from one that is not
        # split.
        axes = ("batch", "length", "activation_heads", None)
        query, key, value = (nn.with_logical_constraint(x, axes) for x in (query, key, value))
    output = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=allowed,
        scale=scale,
        is_causal=native.is_causal,
        key_value_seq_lengths=lengths,
        local_window_size=native.window and (native.window[0], 0),
        implementation="cudnn",
    )
    return jnp.where(has_key > 0, output[..., :E], 0), has_key


def _split(mask: Mask, T: int, S: int) -> tuple[Mask, Mask]:
    """The parts that cuDNN supports itself, and the others, which it takes as a bias."""
    native = Mask(key_lengths=mask.key_lengths)
    rest = dataclasses.replace(mask, key_lengths=None)
    # Its own causal mask aligns as ours does only where T = S and the offset is 0.
    if T == S and mask.static_bounds()[1] == 0:
        native = dataclasses.replace(native, is_causal=True)
        if mask.offset is None:
            rest = dataclasses.replace(rest, is_causal=False)
        # Its windows reach to the left, under a causal mask, and leave each query a key if none of
        # the keys is missing.
        whole = mask.key_lengths is None
        if whole and mask.window is not None and mask.window_offset is None:
            native = dataclasses.replace(native, window=mask.window)
            rest = dataclasses.replace(rest, window=None)
    return native, rest


def _padded(query, key, value):
    """Query, key and value padded with zeros to one width, a multiple of 8."""
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8

    def pad(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))

    return tuple(pad(x) for x in (query, key, value))
