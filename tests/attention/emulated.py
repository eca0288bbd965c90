"""The kernels for Hopper in plain JAX, with their roundings and in their order of blocks.

What a GPU computes, as far as numbers go, where there is none. See `hopper_forward` and
`hopper_backward` for arguments and results.
"""

import math

import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.engines.blocks import Seen, is_kept
from mhe_jax.attention.engines.shared import mosaic

LEAST = jnp.finfo(jnp.float32).min


def forward(sizes, q, k, columns, weights, powers, visible):
    """`hopper_forward.forward`."""
    (N, T, _), S = q.shape, k.shape[1]
    unit = sizes.scale * math.log2(math.e)
    R, V, W = sizes.chunks * sizes.heads, sizes.heads * sizes.width, sizes.weights
    m = jnp.full((N, T, 1), LEAST)
    sums, of_weights, kept_weights = (jnp.zeros((N, T, sizes.chunks * n)) for n in (V, W, W))
    for first in range(0, S, sizes.keys):
        keys = slice(first, first + sizes.keys)
        s = jnp.where(seen(visible, T, keys), _product("ntd,nsd->nts", q, k[:, keys]), -jnp.inf)
        higher = jnp.maximum(m, s.max(-1, keepdims=True))
        e = jnp.exp2((s - higher) * unit).astype(jnp.bfloat16)
        e_kept = kept(visible, e, keys)
        shrink, m = jnp.exp2((m - higher) * unit), higher
        sums = sums * shrink + _product("nts,nsx->ntx", e_kept, columns[:, keys])
        of_weights = of_weights * shrink + _product("nts,nsx->ntx", e, weights[:, keys])
        kept_weights = kept_weights * shrink + _product("nts,nsx->ntx", e_kept, weights[:, keys])

    def of_heads(x):
        x = x.reshape(N, T, sizes.chunks, W)[..., : 2 * sizes.heads]
        return x.reshape(N, T, sizes.chunks, 2, sizes.heads)

    d = of_heads(of_weights).sum(3).reshape(N, T, R)
    d = jnp.where(d > 0, d, 1)
    output = sums.reshape(N, T, R, sizes.width) / (d * sizes.keep)[..., None]
    output = output.reshape(N, T, -1) * powers[:, None]
    high = output.astype(jnp.bfloat16)
    low = (output - high.astype(jnp.float32)).astype(jnp.bfloat16)
    found = high, low, d.swapaxes(1, 2), m[..., 0]
    if visible.bits is None:
        return found
    left = of_heads(kept_weights)[:, :, :, 0].reshape(N, T, R)
    return *found, (left / (d * sizes.keep)).swapaxes(1, 2)


def products(sizes, q, k, dsums, columns, maxima, visible):
    """`hopper_backward.products`."""
    T, every = q.shape[1], slice(0, k.shape[1])
    s = jnp.where(seen(visible, T, every), _product("ntd,nsd->nts", q, k), -jnp.inf)
    unit = sizes.scale * math.log2(math.e)
    e = jnp.exp2((s - maxima[..., None]) * unit).astype(jnp.bfloat16)
    n = sizes.values
    de = kept(visible, _product("ntx,nsx->nts", dsums[..., :n], columns[..., :n]), every)
    de += _product("ntx,nsx->nts", dsums[..., n:], columns[..., n:])
    return e, (e.astype(jnp.float32) * de).astype(jnp.bfloat16)


def seen(visible, T: int, keys: slice):
    """Booleans that broadcast to [N, T, keys]."""
    key, found = jnp.arange(keys.start, keys.stop)[None, None], jnp.ones((1, T, 1), bool)
    if visible.bounds is not None:
        first, last = visible.bounds[:, 0, :, None], visible.bounds[:, 1, :, None]
        found &= (first <= key) & (key <= last)
    if visible.ids is not None:
        of_queries, of_keys = visible.ids
        found &= of_queries[:, :, None] == of_keys[:, None, keys]
    return found


def kept(visible, x, keys: slice):
    """x [N, T, keys] where the bits say so, else 0."""
    if visible.bits is None:
        return x
    key = jnp.arange(keys.start, keys.stop)
    words = visible.bits[:, key // 32].swapaxes(1, 2)
    return jnp.where(words >> (key % 32)[None, None] & 1 == 1, x, 0)


def visible_of(mask, shape, dropout=False):
    """What the kernels are told of a mask; what queries see [N, T, S], and what dropout keeps."""
    (N, T, S), words, kept = shape, None, np.ones(shape, bool)
    if dropout:
        words = np.random.default_rng(7).integers(-(2**31), 2**31, (N, T + S))
        words = jnp.asarray(words[:, :T], jnp.int32), jnp.asarray(words[:, T:], jnp.int32)
        kept = np.asarray(is_kept(words[0][:, :, None], words[1][:, None], 0.5))
    dense = mask.to_dense(T, S)
    allowed = np.broadcast_to(True if dense is None else dense[:, 0], shape)
    return mosaic.visible(Seen(mask, words), 0.5, shape, T, S), allowed, kept


def _product(letters, a, b):
    return jnp.einsum(letters, a, b, preferred_element_type=jnp.float32)
