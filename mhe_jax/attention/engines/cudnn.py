"""Softmax attention by cuDNN's fused kernels on an NVIDIA GPU."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.engines.mesh import parts_of_heads, platform
from mhe_jax.attention.mask import Mask

# As `jax.nn.dot_product_attention` calls it.
SAVED = ("dot_product_attention_fwd_wrapper",)


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why cuDNN cannot do this call, or None."""
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, this is {platform()}"
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"needs float16 or bfloat16, not {query.dtype}"
    D, E = query.shape[-1] + (key_bias is not None), value.shape[-1]
    if D % 8 or D > 128 or D != E:
        return f"needs one head width, a multiple of 8 up to 128, not {D} and {E}"
    T, S = query.shape[1], key.shape[1]
    if T % 2 or S % 2:
        return f"needs even lengths, not {T} queries and {S} keys"
    if options.dropout_rate > 0:
        return "does not draw the dropout mask of this package (attention dropout is not 0)"
    if options.sow is not None:
        return "keeps no attention weights to sow"
    if options.precision is not None:
        return "has no precision setting"
    H, K, parts = query.shape[2], key.shape[2], parts_of_heads()
    if parts > 1 and (H != K or H % parts):
        return (
            f"needs as many key heads as query heads where a mesh splits them into {parts}, in a "
            f"number that {parts} divides, not {H} query and {K} key heads"
        )
    return missing(*with_bias(query, key, value, key_bias, 1.0))


def missing(query, key, value) -> str | None:
    """The reason why this machine cannot do such a call, or None."""
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(call, query, key, value)
    except RuntimeError as error:
        return f"cannot run here: {error}"
    # Devices of a mesh that are only described are not here to be asked.
    if jax.default_backend() == "gpu":
        capability = jax.local_devices(backend="gpu")[0].compute_capability
        if float(capability) < 8:
            return f"needs a GPU of compute capability 8.0 or more, not {capability}"
    return None


def with_bias(query, key, value, key_bias, scale: float):
    """Query, key and value whose scaled scores have the key bias in them, by one more column."""
    if key_bias is None:
        return query, key, value
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
    query = jnp.concatenate([query, jnp.ones_like(query[..., :1])], -1)
    key = jnp.concatenate([key, (key_bias / scale)[..., None].astype(key.dtype)], -1)
    return query, key, value


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend`."""
    query, key, value = with_bias(query, key, value, key_bias, scale)
    T, S = query.shape[1], key.shape[1]
    # cuDNN's own causal mask aligns as ours does only where T = S and the offset is 0.
    native = mask.is_causal and mask.offset is None and T == S
    rest = dataclasses.replace(mask, is_causal=False, offset=None) if native else mask
    allowed = rest.to_dense(T, S)
    if allowed is not None:
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], T, S))
    if parts_of_heads() > 1:
        # cuDNN takes only what is split alike, and `el` cuts its keys from what is not split.
        axes = ("batch", "length", "activation_heads", None)
        query, key, value = (nn.with_logical_constraint(x, axes) for x in (query, key, value))
    output = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=allowed,
        scale=scale,
        is_causal=native,
        implementation="cudnn",
    )
    # cuDNN averages the values of a row without keys.
    has_key = mask.row_has_key(T, S, query.dtype)
    return output * has_key, has_key
