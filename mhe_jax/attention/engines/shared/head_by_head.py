"""Softmax attention with a bias on the keys, head by head in blocks: slow, with little memory.

`xla` falls back to this where its bound does not hold. q [N, T, D], k [N, S, D],
v [N, S, R or 1, E], key bias b [N, S, R]; the result is [N, T, R, E]. One head's scores of one
block are in memory.
"""

import jax
import jax.numpy as jnp

from mhe_jax.attention.engines.blocks import (
    Seen,
    Static,
    dropout,
    exponential,
    over_blocks,
    product,
)
from mhe_jax.attention.engines.mesh import varying


def forward(static: Static, q, k, v, b, seen: Seen):
    """`softmax(scale · q·k + b[h]) v[h]`."""

    def one(head, output):
        def step(block, output):
            run, args = _of_block(static, q, k, v, b, seen, head, block)
            at = (0, block.start, head, 0)
            return jax.lax.dynamic_update_slice(output, run(*args)[:, :, None], at)

        return over_blocks(q, k, seen, step, output)

    output = varying(jnp.zeros((*q.shape[:2], b.shape[2], v.shape[3]), v.dtype), q)
    return jax.lax.fori_loop(0, b.shape[2], one, output)


def gradient(static: Static, q, k, v, b, seen: Seen, cotangent):
    """Gradients of q, k, v and b."""

    def one(head, sums):
        def step(block, carry):
            dq, dk, dv, db = carry
            run, args = _of_block(static, q, k, v, b, seen, head, block)
            of_q, of_k, of_v, of_b = jax.vjp(run, *args)[1](block.cut(_at(cotangent, head)))
            return (
                block.put(dq, block.cut(dq) + of_q.astype(dq.dtype)),
                block.add(dk, of_k),
                block.add(dv, of_v),
                block.add(db, of_b),
            )

        dq, dk, dv, db = sums
        mine = head % v.shape[2]
        dq, dk, of_v, of_b = over_blocks(q, k, seen, step, (dq, dk, _at(dv, mine), _at(db, head)))
        return dq, dk, dv.at[:, :, mine].set(of_v), db.at[:, :, head].set(of_b)

    sums = varying(tuple(jnp.zeros(x.shape, b.dtype) for x in (q, k, v, b)), q)
    dq, dk, dv, db = jax.lax.fori_loop(0, b.shape[2], one, sums)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), db


def _of_block(static, q, k, v, b, seen, head, block):
    """One head's attention in one block, as a function and its arguments."""

    def run(q, k, v, b):
        logits = product(static, "ntd,nsd->nts", q.astype(b.dtype) * static.scale, k)
        e = exponential(logits + b[:, None], seen, block)
        total = e.sum(-1, keepdims=True)
        weights = dropout(static, e / jnp.where(total > 0, total, 1), seen, block)
        return product(static, "nts,nse->nte", weights.astype(v.dtype), v).astype(v.dtype)

    k, v, b = (block.of_keys(x) for x in (k, _at(v, head % v.shape[2]), _at(b, head)))
    return run, (block.cut(q), k, v, b)


def _at(x, head):
    return jax.lax.dynamic_index_in_dim(x, head, 2, keepdims=False)
