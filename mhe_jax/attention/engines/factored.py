"""Softmax attention of keys and values that are sums of products, in plain XLA.

    k[s, h] = Σ_i a[s, h, i] b[s, i]       q[t, h]·k[s, h] = Σ_i a[s, h, i] (q[t, h]·b[s, i])
    v[s, h] = Σ_i a'[s, h, i] b'[s, i]     Σ_s w[s] v[s, h] = Σ_i Σ_s (w[s] a'[s, h, i]) b'[s, i]

So neither keys nor values of heads are made: beside the factors, memory holds R numbers for each
query, head and key. With R terms, a score takes R(D + 1) multiply-adds, against D with keys that
are made; making them takes RD for each head and key, once for all queries. So this is for few
queries over a cache.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines.blocks import KEPT
from mhe_jax.attention.engines.xla import weigh
from mhe_jax.attention.mask import Mask


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """None: this engine takes every call."""
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend_factored`."""
    (a, b), (of_value, basis) = key, value
    (B, T, H, D), (_, S, R, _), (_, _, P, E) = query.shape, b.shape, basis.shape
    query = query / jnp.asarray(1 / scale, query.dtype)
    rows = query.swapaxes(1, 2).reshape(B, H * T, D)
    # Terms are rows, as they lie in memory: as an axis of the product they would be copied.
    b, basis = b.reshape(B, S * R, D), basis.reshape(B, S * P, E)
    products = jnp.einsum("bnd,bmd->bnm", rows, b, precision=options.precision)
    logits = (products.reshape(B, H, T, S, R) * _of_heads(a)).sum(-1)
    weights, total = weigh(checkpoint_name(logits, KEPT), key_bias, mask, options)
    weights = (weights[..., None] * _of_heads(of_value)).reshape(B, H * T, S * P)
    output = jnp.einsum("bnm,bme->bne", weights, basis, precision=options.precision)
    return checkpoint_name(output, KEPT).reshape(B, H, T, E).swapaxes(1, 2), total


def _of_heads(a):
    """[B, S, H, R] to [B, H, 1, S, R]."""
    return a.swapaxes(1, 2)[:, :, None]
