"""The factored softmax on a GPU in bfloat16: values and denominators of all heads by one product.

It computes what `factored` does, from the same arguments, with fewer bytes moved. Denominators and
their gradients d need more than bfloat16. They are columns beside the values, in parts that
bfloat16 holds: with w = w₁ + w₂ and d = d₁ + d₂ + d₃, each head has the columns

    [w ⊙ v, w₁, w₂]    and backward    [w ⊙ v, w₁, w₁, w₁, w₂, w₂, w₂]
                                       of dsums = [dvalues, d₁, d₂, d₃, d₁, d₂, d₃]

so that E, the largest array, is in memory once, in bfloat16. It has no dropout, which would need a
second E.
"""

import jax
import jax.numpy as jnp

from mhe_jax.attention.engines.blocks import (
    Seen,
    Static,
    exponential,
    over_blocks,
    parts,
    product,
)
from mhe_jax.attention.engines.mesh import platform, varying
from mhe_jax.attention.engines.shared import factored
from mhe_jax.attention.engines.shared.factored import Values

# Parts of a weight, and of the gradient of a denominator.
OF_WEIGHTS, OF_GRADIENTS = 2, 3


def takes(static: Static, q) -> bool:
    """Whether this module computes a call."""
    return platform() == "gpu" and q.dtype == jnp.bfloat16 and static.keep == 1


def forward(static: Static, q, k, values: Values, b, seen: Seen):
    """The output in the type of q, and what `factored.forward` gives."""
    w, columns = _columns(q, values, b, seen)
    E = columns.shape[3]
    columns = _beside(columns, parts(w, OF_WEIGHTS))

    def step(block, carry):
        rounded, output, denominators = carry
        sums = _heads(product(static, "nts,nsx->ntx", exponentials(block), block.of_keys(flat)), b)
        denominator = sums[..., E:].sum(-1)
        # 0 where the query sees no key.
        denominator = jnp.where(denominator > 0, denominator, 1)
        heads = factored.multiplied(values, sums[..., :E] / denominator[..., None])
        return (
            block.put(rounded, heads),
            block.put(output, heads),
            block.put(denominators, denominator),
        )

    exponentials, flat = _exponentials(static, q, k, seen), _flat(columns)
    shape = (*q.shape[:2], b.shape[2])
    start = (jnp.zeros((*shape, E), dtype) for dtype in (q.dtype, b.dtype))
    return over_blocks(q, k, seen, step, varying((*start, jnp.zeros(shape, b.dtype)), q))


def gradient(static: Static, q, k, values, b, seen: Seen, output, denominator, cotangent):
    """See `factored.gradient`."""
    w, columns = _columns(q, values, b, seen)
    into, back = factored.cotangent_powers(values, cotangent)
    E, exponentials = columns.shape[3], _exponentials(static, q, k, seen)
    flat = _flat(_beside(columns, [x for x in parts(w, OF_WEIGHTS) for _ in range(OF_GRADIENTS)]))

    def step(block, carry):
        dq, dk, dcolumns = carry
        of_n = factored.times_any_power(block.cut(cotangent), into)
        of_n = (of_n / block.cut(denominator)[..., None]).astype(q.dtype)
        of_d = -(of_n * factored.divided(values, block.cut(output))).sum(-1)
        of_n, of_d = jax.lax.optimization_barrier((of_n, of_d))
        dsums = _flat(_beside(of_n, parts(of_d, OF_GRADIENTS) * OF_WEIGHTS))
        e = exponentials(block)
        # The terms of values and of denominators cancel inside this product, before it is rounded:
        # so it may be of a narrow type, as its product with E below is.
        de = jnp.einsum(
            "ntx,nsx->nts",
            dsums,
            block.of_keys(flat),
            precision=static.precision,
            preferred_element_type=e.dtype,
        )
        wide = e.astype(b.dtype)
        ds, total = wide * de.astype(b.dtype), wide.sum(-1, keepdims=True)
        # In this form, XLA makes it one fusion.
        ds = (ds - wide / jnp.maximum(total, 1) * ds.sum(-1, keepdims=True)).astype(q.dtype)
        return (
            block.put(dq, static.scale * product(static, "nts,nsd->ntd", ds, block.of_keys(k))),
            block.add(dk, static.scale * product(static, "nts,ntd->nsd", ds, block.cut(q))),
            block.add(dcolumns, product(static, "nts,ntx->nsx", e, dsums)),
        )

    zeros = tuple(jnp.zeros(x.shape, b.dtype) for x in (q, k, flat))
    dq, dk, dcolumns = over_blocks(q, k, seen, step, varying(zeros, q))
    dcolumns = _heads(dcolumns, b)
    dw = dcolumns[..., E : E + OF_GRADIENTS].sum(-1)
    dcolumns = _flat(dcolumns[..., :E])
    dv, db = factored.columns_gradient(static, values, w, _flat(columns), dw, dcolumns, into, back)
    dq, dk = (factored.times_any_power(x, back[..., 0]) for x in (dq, dk))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, db


def _exponentials(static, q, k, seen):
    def of_block(block):
        logits = product(static, "ntd,nsd->nts", block.cut(q), block.of_keys(k))
        e = exponential(logits, seen, block, static.scale).astype(q.dtype)
        # Else each product and fusion that reads E makes it from the logits, which are twice as
        # large.
        return jax.lax.optimization_barrier(e)

    return of_block


def _columns(q, values, b, seen):
    """w [N, S, R] and w ⊙ v [N, S, R, E]."""
    w, columns = factored.columns_of(values, b, factored.seen_keys(q, b, seen))
    return w, _heads(columns, b)


def _beside(columns, rest):
    """Columns [N, L, R, E] with others [N, L, R] beside those of each head."""
    rest = jnp.stack(rest, -1).astype(columns.dtype)
    return jnp.concatenate([columns, rest], -1)


def _heads(x, b):
    return x.reshape(*x.shape[:2], b.shape[2], -1)


def _flat(x):
    return x.reshape(*x.shape[:2], -1)
