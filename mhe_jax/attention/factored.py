"""The factored softmax of `shared`: one score matrix, one exponential and one product for R heads.

q [N, T, D], k [N, S, D], v [N, S, R or 1, E], key bias b [N, S, R]; the result is [N, T, R, E].
Products are written over flat axes and sums as products, because XLA is faster with both.
"""

import jax.numpy as jnp

from mhe_jax.attention.blocks import (
    Seen,
    Static,
    dropout,
    exponential,
    over_blocks,
    product,
    scores,
)

MAX_SPREAD = 60.0


def fits(q, b, seen: Seen):
    """Whether the spread of the key biases is within the bound; False for NaN."""
    keys = seen_keys(q, b, seen)
    high = jnp.max(b, 1, initial=-jnp.inf, where=keys)
    low = jnp.min(b, 1, initial=jnp.inf, where=keys)
    return (jnp.where(keys.any(1), high - low, 0) <= MAX_SPREAD).all()


def forward(static: Static, q, k, v, b, seen: Seen):
    """The output, and its denominators [N, T, R] for the gradient."""
    w, columns = columns_of(v, b, seen_keys(q, b, seen))

    def step(block, carry):
        output, denominators = carry
        e, e_kept = _exponentials(static, q, k, seen, block)
        numerator = product(static, "nts,nsx->ntx", e_kept, columns[:, : block.keys])
        denominator = product(static, "nts,nsr->ntr", e, w[:, : block.keys])
        # 0 where the query sees no key.
        denominator = jnp.where(denominator > 0, denominator, 1)
        heads = numerator.reshape(*denominator.shape, -1) / denominator[..., None]
        return block.put(output, heads), block.put(denominators, denominator)

    shape = (*q.shape[:2], b.shape[2])
    start = jnp.zeros((*shape, v.shape[3]), q.dtype), jnp.zeros(shape, b.dtype)
    return over_blocks(q, k, seen, step, start)


def gradient(static: Static, q, k, v, b, seen: Seen, output, denominator, cotangent):
    """Gradients of q, k, v and b.

    With Y = E·X, X = [w ⊙ v, w], the output is a ratio of columns of Y, so that
    `ds = E ⊙ (dY·Xᵀ)` and `dX = Eᵀ·dY`: again one product each for all heads.
    """
    w, columns = columns_of(v, b, seen_keys(q, b, seen))

    def step(block, carry):
        dq, dk, dw, dcolumns = carry
        e, e_kept = _exponentials(static, q, k, seen, block)
        of_n = block.cut(cotangent) / block.cut(denominator)[..., None]
        of_d = -product(static, "ntre,ntre->ntr", of_n, block.cut(output))
        of_n = _flat(of_n.astype(q.dtype))
        de = product(static, "ntx,nsx->nts", of_n, columns[:, : block.keys])
        de = dropout(static, de, seen, block)
        de += product(static, "ntr,nsr->nts", of_d, w[:, : block.keys])
        ds = (e * de).astype(q.dtype)
        return (
            block.put(dq, static.scale * product(static, "nts,nsd->ntd", ds, k[:, : block.keys])),
            block.add(dk, static.scale * product(static, "nts,ntd->nsd", ds, block.cut(q))),
            block.add(dw, product(static, "nts,ntr->nsr", e, of_d)),
            block.add(dcolumns, product(static, "nts,ntx->nsx", e_kept, of_n)),
        )

    zeros = [jnp.zeros(x.shape, b.dtype) for x in (q, k, w, columns)]
    dq, dk, dw, dcolumns = over_blocks(q, k, seen, step, tuple(zeros))
    dv, db = columns_gradient(static, v, w, dw, dcolumns)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, db


def seen_keys(q, b, seen):
    """Keys that some query sees, [N or 1, S, 1]."""
    return seen.mask.key_is_seen(q.shape[1], b.shape[1])[:, :, None]


def columns_of(v, b, keys):
    """w = exp(b - c) [N, S, R], 0 for keys that nobody sees; w ⊙ v [N, S, R·E]."""
    c = jnp.max(b, 1, keepdims=True, initial=-jnp.inf, where=keys)
    c = jnp.where(jnp.isfinite(c), c, 0)
    w = jnp.where(keys, jnp.exp(jnp.where(keys, b - c, 0)), 0)
    return w, _flat((w[..., None] * v).astype(v.dtype))


def columns_gradient(static, v, w, dw, dcolumns):
    """Gradients of v and b from those of `columns_of`."""
    dcolumns = dcolumns.reshape(*w.shape, -1)
    if v.shape[2] == 1:
        dv = product(static, "nsre,nsr->nse", dcolumns, w)[:, :, None]
        dw += product(static, "nsre,nse->nsr", dcolumns, v[:, :, 0])
    else:
        dv = dcolumns * w[..., None]
        dw += product(static, "nsre,nsre->nsr", dcolumns, v)
    return dv.astype(v.dtype), w * dw


def _exponentials(static, q, k, seen, block):
    """E of a block, and E with dropout on it."""
    e = exponential(scores(static, block.cut(q), k[:, : block.keys]), seen, block)
    e = e.astype(q.dtype)
    return e, dropout(static, e, seen, block)


def _flat(x):
    return x.reshape(*x.shape[:2], -1)
