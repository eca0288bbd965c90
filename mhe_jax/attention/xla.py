"""Softmax attention in plain XLA: the engine that refuses nothing."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.blocks import KEPT
from mhe_jax.attention.mask import Mask


def refusal(query, key, value, mask: Mask, options) -> str | None:
    """None: this engine takes every call."""
    return None


def attend(query, key, value, mask: Mask, options) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend`. Logits of all heads stand in memory: B·H·T·S numbers."""
    B, T, H, D = query.shape
    S, K, E = key.shape[1], key.shape[2], value.shape[3]
    dtype = query.dtype
    # Heads first, so that logits come out of the matrix product in the order the softmax reads.
    query = (query / jnp.sqrt(D).astype(dtype)).transpose(0, 2, 1, 3).reshape(B, K, H // K, T, D)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    logits = jnp.einsum("bkgtd,bksd->bkgts", query, key, precision=options.precision)

    allowed = mask.to_dense(T, S)
    if allowed is not None:
        if allowed.shape[1] == 1:
            allowed = allowed[:, :, None]
        else:
            allowed = allowed.reshape(allowed.shape[0], K, H // K, *allowed.shape[2:])
        logits = jnp.where(allowed, logits, jnp.finfo(dtype).min)
    if options.float32_softmax:
        logits = logits.astype(jnp.float32)
    weights = jax.nn.softmax(logits).astype(dtype)
    if allowed is not None and mask.may_empty_a_row:
        # The softmax of a row without keys is uniform; 0 is what such a row means.
        weights *= allowed.any(-1, keepdims=True).astype(dtype)
    if options.sow is not None:
        options.sow(weights.reshape(B, H, T, S))

    if options.dropout_rate > 0:
        shape = {True: (B, 1, 1, T, S), "batch": (1, 1, 1, T, S), False: weights.shape}
        keep = 1.0 - options.dropout_rate
        kept = jax.random.bernoulli(options.dropout_rng, keep, shape[options.broadcast_dropout])
        weights *= checkpoint_name(kept, KEPT).astype(dtype) / jnp.asarray(keep, dtype)
        total = _heads_last(weights.sum(-1, keepdims=True), H, 1)
    else:
        total = mask.row_has_key(T, S, dtype)
    output = jnp.einsum("bkgts,bkse->bkgte", weights, value, precision=options.precision)
    return _heads_last(output, H, E), total


def _heads_last(x: jax.Array, heads: int, width: int) -> jax.Array:
    return x.reshape(x.shape[0], heads, x.shape[3], width).transpose(0, 2, 1, 3)
