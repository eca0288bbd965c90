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


def attend(query, key, value, key_bias, mask: Mask, options, *, scale: float):
    """See `engines.attend`."""
    if isinstance(key, tuple):
        return _of_factors(query, key, value, key_bias, mask, options, scale)
    B, T, H, D = query.shape
    S, K, E = key.shape[1], key.shape[2], value.shape[3]
    dtype = query.dtype
    # Divided as in Flax, and rounded alike. Heads that share a key head are rows of one product: a
    # separate axis, even of length 1, makes gradients a third slower on a CPU.
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
    """One query an example, as in decoding, by sums in the order of the cache.

    For products XLA would copy keys and values on a GPU, heads first: three times the bytes.
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


def _of_factors(query, key, value, key_bias, mask: Mask, options, scale):
    """Keys and values that are sums of products, and are not made:

        k[s, h] = Σ_i a[s, h, i] b[s, i]      q[t, h]·k[s, h] = Σ_i a[s, h, i] (q[t, h]·b[s, i])
        v[s, h] = Σ_i a'[s, h, i] b'[s, i]    Σ_s w[s] v[s, h] = Σ_i Σ_s (w[s] a'[s, h, i]) b'[s, i]

    A score takes R(D + 1) multiply-adds and R numbers of memory, against D multiply-adds with keys
    that are made, by RD for each head and key: this is for few queries over a cache.
    """
    (a, b), (of_value, basis) = key, value
    (B, T, H, D), (_, S, R, _), (_, _, P, E) = query.shape, b.shape, basis.shape
    # [B, S, H, R] to [B, H, 1, S, R].
    a, of_value = (x.swapaxes(1, 2)[:, :, None] for x in (a, of_value))
    query = query / jnp.asarray(1 / scale, query.dtype)
    rows = query.swapaxes(1, 2).reshape(B, H * T, D)
    # Terms are rows, as they lie in memory: as an axis of the product they would be copied.
    b, basis = b.reshape(B, S * R, D), basis.reshape(B, S * P, E)
    products = jnp.einsum("bnd,bmd->bnm", rows, b, precision=options.precision)
    logits = (products.reshape(B, H, T, S, R) * a).sum(-1)
    weights, total = weigh(checkpoint_name(logits, KEPT), key_bias, mask, options)
    weights = (weights[..., None] * of_value).reshape(B, H * T, S * P)
    output = jnp.einsum("bnm,bme->bne", weights, basis, precision=options.precision)
    return checkpoint_name(output, KEPT).reshape(B, H, T, E).swapaxes(1, 2), total


def weigh(logits, key_bias, mask: Mask, options) -> tuple[jax.Array, jax.Array]:
    """The softmax of logits [B, H, T, S] over the allowed keys, after dropout; and its sums."""
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
