"""Softmax attention in plain XLA: the engine that refuses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines.blocks import KEPT
from mhe_jax.attention.engines.mesh import platform
from mhe_jax.attention.mask import Mask


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """None: this engine takes every call."""
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend`. Logits of all heads are in memory: B·H·T·S numbers."""
    B, T, H, D = query.shape
    S, K, E = key.shape[1], key.shape[2], value.shape[3]
    dtype = query.dtype
    # Divided as in Flax, and rounded alike. Heads first, so that logits come out of the product in
    # the order the softmax reads; heads that share a key head are rows of one product: a separate
    # axis, even of length 1, makes gradients a third slower on a CPU.
    query = query / jnp.asarray(1 / scale, dtype)
    # Not `B > 1`: in an export B may be a symbol, which is not 1.
    if T == 1 and B != 1 and 1 < K < H and platform() == "gpu":
        return _of_one(query, key, value, key_bias, mask, options)
    query = query.transpose(0, 2, 1, 3).reshape(B, K, H // K * T, D)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    logits = jnp.einsum("bknd,bksd->bkns", query, key, precision=options.precision)
    logits = checkpoint_name(logits, KEPT).reshape(B, H, T, S)
    weights, total = weigh(logits, key_bias, mask, options)
    weights = weights.reshape(B, K, H // K * T, S)
    output = jnp.einsum("bkns,bkse->bkne", weights, value, precision=options.precision)
    return checkpoint_name(output, KEPT).reshape(B, H, T, E).swapaxes(1, 2), total


def _of_one(query, key, value, key_bias, mask: Mask, options) -> tuple[jax.Array, jax.Array]:
    """One query an example, as in decoding: multiply and sum, in the order of the cache.

    For products of several heads that serve several queries each, XLA copies keys and values on a
    GPU, heads first: three times the bytes. One key head lies in the order of its product, and a
    product with one row XLA makes a sum itself. On a CPU products are faster, whatever the heads.
    """
    (B, _, H, D), (_, S, K, E), dtype = query.shape, value.shape, query.dtype
    wide = np.promote_types(dtype, jnp.float32)
    key, value = (x.astype(wide)[:, :, :, None] for x in (key, value))
    logits = (query.reshape(B, 1, K, H // K, D).astype(wide) * key).sum(-1).astype(dtype)
    logits = logits.reshape(B, S, H).swapaxes(1, 2)[:, :, None]
    weights, total = weigh(logits, key_bias, mask, options)
    weights = weights[:, :, 0].swapaxes(1, 2).reshape(B, S, K, H // K, 1)
    output = (weights.astype(wide) * value).sum(1).astype(dtype)
    return output.reshape(B, 1, H, E), total


def weigh(logits, key_bias, mask: Mask, options) -> tuple[jax.Array, jax.Array]:
    """Scaled products [B, H, T, S] to the weights of values, of the same shape and type.

    The weights are the softmax over the allowed keys, after dropout; returned with their sum.
    """
    (B, _, T, S), dtype = logits.shape, logits.dtype
    if key_bias is not None:
        wide = np.promote_types(dtype, jnp.float32) if options.float32_softmax else dtype
        logits = logits.astype(wide) + key_bias.astype(wide).swapaxes(1, 2)[:, :, None]
    allowed = mask.to_dense(T, S)
    if allowed is not None:
        logits = jnp.where(allowed, logits, jnp.finfo(dtype).min)
    if options.float32_softmax:
        logits = logits.astype(np.promote_types(dtype, jnp.float32))
    weights = jax.nn.softmax(logits)
    if allowed is not None and mask.may_empty_a_row:
        # The softmax of a row without keys is uniform; its weights must be 0.
        weights *= allowed.any(-1, keepdims=True).astype(weights.dtype)
    if options.sow is not None:
        options.sow(weights)
    weights = weights.astype(dtype)

    if options.dropout_rate > 0:
        shape = {True: (B, 1, T, S), "batch": (1, 1, T, S), False: weights.shape}
        keep = 1.0 - options.dropout_rate
        kept = jax.random.bernoulli(options.dropout_rng, keep, shape[options.broadcast_dropout])
        weights *= checkpoint_name(kept, KEPT).astype(dtype) / jnp.asarray(keep, dtype)
        total = weights.sum(-1, keepdims=True).swapaxes(1, 2)
    else:
        total = mask.row_has_key(T, S, dtype)
    return weights, total
