"""Shared scores in plain XLA: one score matrix and one exponential for all heads of a group.

On a GPU in bfloat16, values and denominators of all heads are one product, with fewer bytes moved.
Denominators and their gradients d need more than bfloat16. They are columns beside the values, in
parts that bfloat16 holds: with w = w₁ + w₂ and d = d₁ + d₂ + d₃, each head has the columns

    [w ⊙ v, w₁, w₂]    and backward    [w ⊙ v, w₁, w₁, w₁, w₂, w₂, w₂]
                                       of dsums = [dvalues, d₁, d₂, d₃, d₁, d₂, d₃]

so that E, the largest array, is in memory once, in bfloat16. Dropout would need a second E.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.engines import blocks, shared
from mhe_jax.attention.engines.blocks import Seen, Static, dropout, over_blocks, parts, product
from mhe_jax.attention.engines.mesh import platform, varying
from mhe_jax.attention.engines.shared import Values, Way, flat, times_any_power, times_power
from mhe_jax.attention.engines.xla import refusal as refusal
from mhe_jax.attention.engines.xla import weigh
from mhe_jax.attention.mask import Mask

# Parts of a weight, and of the gradient of a denominator, of one product.
OF_WEIGHTS, OF_GRADIENTS = 2, 3


def attend(query, key, value, key_bias, mask: Mask, options, *, scale: float):
    """See `engines.attend`."""
    if query.shape[1] == 1 and key.shape[1] > 0 and options.dropout_rate == 0:
        return _of_one(query, key, value, key_bias, mask, options, scale)
    way = ONE_PRODUCT if takes_one_product(query, options) else TWO_PRODUCTS
    return shared.attend(way, query, key, value, key_bias, mask, options, scale)


def takes_one_product(query, options) -> bool:
    return platform() == "gpu" and query.dtype == jnp.bfloat16 and options.dropout_rate == 0


def _of_one(query, key, value, key_bias, mask, options, scale) -> tuple[jax.Array, jax.Array]:
    """One query an example, as in decoding: an ordinary softmax, and no columns of all keys."""
    B, G, (S, H) = len(query), query.shape[2], key_bias.shape[1:]
    K, E = value.shape[2:]
    key_bias = key_bias.astype(np.promote_types(query.dtype, jnp.float32))
    query = query * jnp.asarray(scale, query.dtype)
    logits = product(Static(scale, 1.0, options.precision), "bgd,bsgd->bgs", query[:, 0], key)
    logits = jnp.repeat(logits, H // G, 1)[:, :, None]
    weights, total = weigh(logits, key_bias, mask, options)
    weights = weights.astype(value.dtype).reshape(B, K, H // K, S)
    output = jnp.einsum("bkns,bske->bkne", weights, value, precision=options.precision)
    return output.reshape(B, 1, H, E), total.astype(query.dtype)


def _forward(static: Static, q, k, values: Values, b, seen: Seen):
    """The output and its denominators [N, T, R], in the type of b, for the gradient."""
    w, columns = shared.columns_of(values, q, b, seen)

    def step(block, carry):
        output, denominators = carry
        e = _exponential(static, q, k, seen, block)
        e_kept = dropout(static, e, seen, block)
        numerator = product(static, "nts,nsx->ntx", e_kept, block.of_keys(columns))
        denominator = product(static, "nts,nsr->ntr", e, block.of_keys(w))
        # 0 where the query sees no key.
        denominator = jnp.where(denominator > 0, denominator, 1)
        heads = numerator.reshape(*denominator.shape, -1) / denominator[..., None]
        heads = times_power(heads, values.exponent)
        return block.put(output, heads), block.put(denominators, denominator)

    shape = (*q.shape[:2], b.shape[2])
    start = jnp.zeros((*shape, values.divided.shape[3]), b.dtype), jnp.zeros(shape, b.dtype)
    return None, over_blocks(q, k, seen, step, varying(start, q))


def _gradient(static: Static, q, k, v, values: Values, b, seen: Seen, kept, cotangent):
    """With Y = E·X, X = [w ⊙ v, w], the output is a ratio of columns of Y, so that
    `ds = E ⊙ (dY·Xᵀ)` and `dX = Eᵀ·dY`: again one product each for all heads.

    The two parts of dY·Xᵀ cancel where a query gives all its weight to one key. So both are made of
    the same rounded numbers, with the output before it is rounded; and what remains of the sum of
    ds over the keys, which is 0 by algebra, is subtracted in proportion to E.
    """
    w, columns = shared.columns_of(values, q, b, seen)
    (output, denominator), (into, back) = kept, shared.cotangent_powers(values, cotangent)

    def step(block, carry):
        dq, dk, dw, dcolumns = carry
        e = _exponential(static, q, k, seen, block)
        e_kept = dropout(static, e, seen, block)
        of_n = times_any_power(block.cut(cotangent), into) / block.cut(denominator)[..., None]
        of_n = of_n.astype(q.dtype)
        outputs = times_power(block.cut(output), -values.exponent)
        of_d = -product(static, "ntre,ntre->ntr", of_n, outputs)
        of_n = flat(of_n)
        de = product(static, "ntx,nsx->nts", of_n, block.of_keys(columns))
        de = dropout(static, de, seen, block)
        de += product(static, "ntr,nsr->nts", of_d, block.of_keys(w))
        e_wide = e.astype(de.dtype)
        ds = e_wide * de
        total = jnp.maximum(e_wide.sum(-1, keepdims=True), 1)
        ds = (ds - e_wide * (ds.sum(-1, keepdims=True) / total)).astype(q.dtype)
        return (
            block.put(dq, static.scale * product(static, "nts,nsd->ntd", ds, block.of_keys(k))),
            block.add(dk, static.scale * product(static, "nts,ntd->nsd", ds, block.cut(q))),
            block.add(dw, product(static, "nts,ntr->nsr", e, of_d)),
            block.add(dcolumns, product(static, "nts,ntx->nsx", e_kept, of_n)),
        )

    zeros = tuple(jnp.zeros(x.shape, b.dtype) for x in (q, k, w, columns))
    dq, dk, dw, dcolumns = over_blocks(q, k, seen, step, varying(zeros, q))
    return shared.gradients(static, q, k, values, w, columns, dq, dk, dw, dcolumns, into, back)


def _forward_one_product(static: Static, q, k, values: Values, b, seen: Seen):
    """The output in the type of q too, so that no other pass over it is needed."""
    w, columns = shared.columns_of(values, q, b, seen)
    columns = _heads(columns, b)
    E = columns.shape[3]
    columns = _beside(columns, parts(w, OF_WEIGHTS))

    def step(block, carry):
        rounded, output, denominators = carry
        e = jax.lax.optimization_barrier(_exponential(static, q, k, seen, block))
        sums = _heads(product(static, "nts,nsx->ntx", e, block.of_keys(columns)), b)
        denominator = sums[..., E:].sum(-1)
        # 0 where the query sees no key.
        denominator = jnp.where(denominator > 0, denominator, 1)
        heads = times_power(sums[..., :E] / denominator[..., None], values.exponent)
        return (
            block.put(rounded, heads),
            block.put(output, heads),
            block.put(denominators, denominator),
        )

    shape = (*q.shape[:2], b.shape[2])
    start = (jnp.zeros((*shape, E), dtype) for dtype in (q.dtype, b.dtype))
    start = varying((*start, jnp.zeros(shape, b.dtype)), q)
    rounded, *kept = over_blocks(q, k, seen, step, start)
    return rounded, tuple(kept)


def _gradient_one_product(static: Static, q, k, v, values: Values, b, seen: Seen, kept, cotangent):
    """See `_gradient`."""
    w, columns = shared.columns_of(values, q, b, seen)
    (output, denominator), (into, back) = kept, shared.cotangent_powers(values, cotangent)
    of_heads = _heads(columns, b)
    E = of_heads.shape[3]
    both = _beside(of_heads, [x for x in parts(w, OF_WEIGHTS) for _ in range(OF_GRADIENTS)])

    def step(block, carry):
        dq, dk, dcolumns = carry
        of_n = times_any_power(block.cut(cotangent), into)
        of_n = (of_n / block.cut(denominator)[..., None]).astype(q.dtype)
        of_d = -(of_n * times_power(block.cut(output), -values.exponent)).sum(-1)
        of_n, of_d = jax.lax.optimization_barrier((of_n, of_d))
        dsums = _beside(of_n, parts(of_d, OF_GRADIENTS) * OF_WEIGHTS)
        # Else each product that reads E makes it from the logits, which are twice as large.
        e = jax.lax.optimization_barrier(_exponential(static, q, k, seen, block))
        # Of a narrow type: terms of values and denominators cancel inside, before it is rounded.
        how = {"precision": static.precision, "preferred_element_type": e.dtype}
        de = jnp.einsum("ntx,nsx->nts", dsums, block.of_keys(both), **how)
        wide = e.astype(b.dtype)
        ds, total = wide * de.astype(b.dtype), wide.sum(-1, keepdims=True)
        # In this form, XLA makes it one fusion.
        ds = (ds - wide / jnp.maximum(total, 1) * ds.sum(-1, keepdims=True)).astype(q.dtype)
        return (
            block.put(dq, static.scale * product(static, "nts,nsd->ntd", ds, block.of_keys(k))),
            block.add(dk, static.scale * product(static, "nts,ntd->nsd", ds, block.cut(q))),
            block.add(dcolumns, product(static, "nts,ntx->nsx", e, dsums)),
        )

    zeros = tuple(jnp.zeros(x.shape, b.dtype) for x in (q, k, both))
    dq, dk, dboth = over_blocks(q, k, seen, step, varying(zeros, q))
    dboth = _heads(dboth, b)
    dw, dcolumns = dboth[..., E : E + OF_GRADIENTS].sum(-1), flat(dboth[..., :E])
    return shared.gradients(static, q, k, values, w, columns, dq, dk, dw, dcolumns, into, back)


def _exponential(static, q, k, seen, block):
    """E of a block, in the type of q."""
    logits = product(static, "ntd,nsd->nts", block.cut(q), block.of_keys(k))
    return blocks.exponential(logits, seen, block, static.scale).astype(q.dtype)


def _beside(columns, rest):
    """Columns [N, L, R, E] with others [N, L, R] beside those of each head, flat."""
    rest = jnp.stack(rest, -1).astype(columns.dtype)
    return flat(jnp.concatenate([columns, rest], -1))


def _heads(x, b):
    return x.reshape(*x.shape[:2], b.shape[2], -1)


def _placed(static, output, b):
    return output.astype(b.dtype), jnp.zeros(output.shape[:3], b.dtype)


def _output(static, kept, q, b):
    return kept[0].astype(q.dtype)


TWO_PRODUCTS = Way(_forward, _gradient, _placed, _output, few_rows=True)
ONE_PRODUCT = Way(_forward_one_product, _gradient_one_product, _placed, few_rows=True)
