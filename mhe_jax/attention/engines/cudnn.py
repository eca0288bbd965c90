"""Softmax attention by cuDNN's fused kernels on an NVIDIA GPU."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.engines import blocks
from mhe_jax.attention.engines.blocks import BIAS_PARTS, pad, round_up, why_not
from mhe_jax.attention.engines.mesh import gpu_capability, mesh_of_length, parts_of_heads, platform
from mhe_jax.attention.mask import Mask

# The name of its primitive in `jax.nn.dot_product_attention`.
SAVED = ("dot_product_attention_fwd_wrapper",)
# Of a head: below compute capability 9.0 (Hopper), and from 9.0 on.
MAX_WIDTH = 128, 256


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why cuDNN cannot do this call, or None."""
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, this is {platform()}"
    (_, T, H, D), (_, S, K, E), dtype = query.shape, value.shape, query.dtype
    D += BIAS_PARTS * (key_bias is not None)
    capability, parts, of_length = gpu_capability(), parts_of_heads(), mesh_of_length(T, S)[1]
    # JAX asks the device that is here, and assumes an old one where there is none.
    most = MAX_WIDTH[capability is not None and capability >= 9]
    return why_not(
        mask,
        options,
        "dropout sowing precision",
        (dtype not in (jnp.float16, jnp.bfloat16), f"needs float16 or bfloat16, not {dtype}"),
        (
            capability is not None and capability < 8,
            f"needs a GPU of compute capability 8.0 or more, not {capability}",
        ),
        (of_length is not None, "takes whole rows, and the mesh splits them along their length"),
        (max(D, E) > most, f"needs heads no wider than {most} on this GPU, not {D} and {E}"),
        (
            (T % 2 or S % 2) and _is_bias(_split(mask, T, S)[1]),
            f"needs even lengths for such a mask, not {T} queries and {S} keys",
        ),
        (
            parts > 1 and (H != K or H % parts),
            f"needs as many key heads as query heads, and a multiple of {parts}, where a mesh "
            f"splits them into {parts} parts, not {H} query and {K} key heads",
        ),
    ) or missing(query, key, value)


def runs_by_itself(dtype, queries: int, width: int, mask: Mask, options) -> bool:
    """Whether cuDNN runs self-attention of heads that share keys, with no mask in memory."""
    head = jax.ShapeDtypeStruct((1, queries, 1, width), dtype)
    if parts_of_heads() > 1 or _is_bias(_split(mask, queries, queries)[1]):
        return False
    return refusal(head, head, head, None, mask, options) is None


def missing(query, key, value) -> str | None:
    """Why cuDNN itself is not available here, or None."""

    def call(*arrays):
        return jax.nn.dot_product_attention(*_padded(*arrays), implementation="cudnn")

    try:
        jax.eval_shape(call, query, key, value)
    except RuntimeError as error:
        return f"cannot run here: {error}"
    return None


def attend(query, key, value, key_bias, mask: Mask, options, *, scale: float):
    """See `engines.attend`."""
    T, S, E = query.shape[1], key.shape[1], value.shape[-1]
    if key_bias is not None:
        query, key, value = blocks.with_bias_columns(query, key, value, key_bias / scale)
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
        # cuDNN takes only arrays that are split alike, and `el` cuts its keys from one that is not.
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


def _is_bias(rest: Mask) -> bool:
    """Whether there is anything in the mask that cuDNN takes as a bias."""
    return rest.is_causal or rest.window is not None or bool(jax.tree.leaves(rest))


def _padded(query, key, value):
    """Query, key and value padded with zeros to one width, a multiple of 8."""
    width = round_up(max(query.shape[-1], value.shape[-1]), 8)
    return tuple(pad(x, *x.shape[1:3], width) for x in (query, key, value))
