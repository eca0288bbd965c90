"""The factored softmax of `xla` and `tpu`: one score matrix, exponential and product for R heads.

q [N, T, D], k [N, S, D], v [N, S, R or 1, E], key bias b [N, S, R]; the result is [N, T, R, E].
Products are written over flat axes and sums as products, because XLA is faster with both.

Each feature of the values, and all cotangents of a row N, are divided by a power of two that brings
their largest number near 1: a product of a value, a cotangent and a factor up to e^MAX_SPREAD then
stays within float32, whatever the size of values and cotangents.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.engines.blocks import (
    Seen,
    Static,
    dropout,
    exponential,
    over_blocks,
    product,
)
from mhe_jax.attention.engines.mesh import varying

MAX_SPREAD = 60.0


class Values(NamedTuple):
    """`v / 2^exponent`, 0 for keys that no query sees: [N, S, R or 1, E], and [N, 1, R or 1, E]."""

    divided: jax.Array
    exponent: jax.Array


def values_of(q, v, b, seen: Seen) -> Values:
    """The values of a call, each feature scaled to near 1; made once, outside the block loop."""
    keys = seen_keys(q, b, seen)[..., None]
    exponent = _exponent(v, 1, keys)
    # A feature that is 0 may still have a gradient, and is treated as one of the largest.
    none = -_layout(v.dtype)[2]
    largest = exponent.max((2, 3), keepdims=True)
    exponent = jnp.where(exponent == none, jnp.where(largest == none, 0, largest), exponent)
    # A key that no query sees may have a value of any size.
    return Values(jnp.where(keys, times_power(v, -exponent), 0).astype(v.dtype), exponent)


def fits(static: Static, q, v, values: Values, b, seen: Seen):
    """Whether the columns of a call spread no wider than the bound; False for NaN.

    The spread of a head is that of its key biases, plus the natural logarithm of the ratio of the
    largest of its values [E] to the smallest that is not 0. Features may differ from each other by
    as much, and no value may be lost beside the others of its feature.
    """
    keys = seen_keys(q, b, seen)
    high = jnp.max(b, 1, initial=-jnp.inf, where=keys)
    low = jnp.min(b, 1, initial=jnp.inf, where=keys)
    spread = jnp.where(keys.any(1), high - low, 0)
    sizes = jnp.abs(values.divided.astype(b.dtype))
    if static.keep < 1:
        sizes = sizes[..., :-1]  # the last column is one of ones: see `xla`
    sizes = jnp.max(sizes, -1, initial=0)
    largest = jnp.max(sizes, 1, initial=0)
    smallest = jnp.min(sizes, 1, initial=jnp.inf, where=sizes != 0)
    ratio = jnp.where(largest == 0, 1, largest / smallest)
    lost = ((v != 0) & (values.divided == 0) & keys[..., None]).any()
    exponents = values.exponent
    apart = exponents.max((1, 2, 3)) - exponents.min((1, 2, 3))
    near = (apart <= int(MAX_SPREAD / math.log(2))).all()
    return (spread + jnp.log(ratio) <= MAX_SPREAD).all() & near & ~lost


def forward(static: Static, q, k, values: Values, b, seen: Seen):
    """The output in the type of b, and its denominators [N, T, R] for the gradient."""
    w, columns = columns_of(values, b, seen_keys(q, b, seen))

    def step(block, carry):
        output, denominators = carry
        e, e_kept = _exponentials(static, q, k, seen, block)
        numerator = product(static, "nts,nsx->ntx", e_kept, block.of_keys(columns))
        denominator = product(static, "nts,nsr->ntr", e, block.of_keys(w))
        # 0 where the query sees no key.
        denominator = jnp.where(denominator > 0, denominator, 1)
        heads = numerator.reshape(*denominator.shape, -1) / denominator[..., None]
        heads = multiplied(values, heads)
        return block.put(output, heads), block.put(denominators, denominator)

    shape = (*q.shape[:2], b.shape[2])
    start = jnp.zeros((*shape, values.divided.shape[3]), b.dtype), jnp.zeros(shape, b.dtype)
    return over_blocks(q, k, seen, step, varying(start, q))


def gradient(static: Static, q, k, values, b, seen: Seen, output, denominator, cotangent):
    """Gradients of q, k, v and b.

    With Y = E·X, X = [w ⊙ v, w], the output is a ratio of columns of Y, so that
    `ds = E ⊙ (dY·Xᵀ)` and `dX = Eᵀ·dY`: again one product each for all heads.

    The two parts of dY·Xᵀ cancel where a query sees one key only, or gives all its weight to it.
    So both are made from the same rounded numbers, with the output before it is rounded; and what
    remains of the sum of ds over the keys, which is 0 by algebra, is subtracted in proportion to E.
    """
    w, columns = columns_of(values, b, seen_keys(q, b, seen))
    into, back = cotangent_powers(values, cotangent)

    def step(block, carry):
        dq, dk, dw, dcolumns = carry
        e, e_kept = _exponentials(static, q, k, seen, block)
        of_n = times_any_power(block.cut(cotangent), into) / block.cut(denominator)[..., None]
        of_n = of_n.astype(q.dtype)
        outputs = divided(values, block.cut(output))
        of_d = -product(static, "ntre,ntre->ntr", of_n, outputs)
        of_n = _flat(of_n)
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

    zeros = [jnp.zeros(x.shape, b.dtype) for x in (q, k, w, columns)]
    dq, dk, dw, dcolumns = over_blocks(q, k, seen, step, varying(tuple(zeros), q))
    dv, db = columns_gradient(static, values, w, columns, dw, dcolumns, into, back)
    dq, dk = (times_any_power(x, back[..., 0]) for x in (dq, dk))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, db


def seen_keys(q, b, seen):
    """Keys that some query sees, [N or 1, S, 1]."""
    return seen.mask.key_is_seen(q.shape[1], b.shape[1])[:, :, None]


def weights_of(b, keys):
    """w = exp(b - c) [N, S, R], 0 for keys that no query sees."""
    c = jnp.max(b, 1, keepdims=True, initial=-jnp.inf, where=keys)
    c = jnp.where(jnp.isfinite(c), c, 0)
    return jnp.where(keys, jnp.exp(jnp.where(keys, b - c, 0)), 0)


def columns_of(values: Values, b, keys):
    """w [N, S, R], and w ⊙ v / 2^exponent [N, S, R·E]."""
    w, v = weights_of(b, keys), values.divided
    return w, _flat((w[..., None] * v.astype(w.dtype)).astype(v.dtype))


def columns_gradient(static: Static, values: Values, w, columns, dw, dcolumns, into, back):
    """Gradients of v and b from those of `columns_of`."""
    dcolumns = dcolumns.reshape(*w.shape, -1)
    db = product(static, "nsre,nsre->nsr", dcolumns, columns.reshape(dcolumns.shape)) + w * dw
    if values.divided.shape[2] == 1:
        dv = product(static, "nsre,nsr->nse", dcolumns, w)[:, :, None]
    else:
        dv = dcolumns * w[..., None]
    dv, db = times_any_power(dv, -into), times_any_power(db, back[..., 0])
    return dv.astype(values.divided.dtype), db


def multiplied(values: Values, heads):
    """Sums over `values.divided` [N, T, R, E] as sums over the values."""
    return times_power(heads, values.exponent)


def divided(values: Values, output):
    """The inverse of `multiplied`."""
    return times_power(output, -values.exponent)


def cotangent_powers(values: Values, cotangent):
    """Powers of two: for the cotangents [N, T, R, E] on the way in, for gradients on the way back.

    The first include the powers of the values.
    """
    back = (_exponent(cotangent, 1) + values.exponent).max((2, 3), keepdims=True)
    return values.exponent - back, back


def times_power(x, exponent):
    """`x · 2^exponent`, in float32 or wider; |exponent| is at most the limit of `_layout`."""
    wide = np.promote_types(x.dtype, jnp.float32)
    integer, bits, limit = _layout(wide)
    # From its bits, since XLA computes it anew for every number of x.
    power = jax.lax.bitcast_convert_type((exponent + limit + 1).astype(integer) << bits, wide)
    return x.astype(wide) * power


def times_any_power(x, exponent):
    """`times_power` where |exponent| is at most twice the limit of `_layout`."""
    half = exponent // 2
    return times_power(times_power(x, half), exponent - half)


def _exponent(x, axis, where=None):
    """e with the largest |x| in [2^(e-1), 2^e), within the limit of `_layout`."""
    wide = np.promote_types(x.dtype, jnp.float32)
    integer, bits, limit = _layout(wide)
    largest = jnp.max(jnp.abs(x), axis, keepdims=True, initial=0, where=where).astype(wide)
    exponent = (jax.lax.bitcast_convert_type(largest, integer) >> bits) - limit
    return jnp.clip(exponent, -limit, limit).astype(jnp.int32)


def _layout(dtype):
    """For floats, at least float32: integers of their size, bits of the fraction, and a limit.

    The limit is the largest e for which 2^e and 2^-e are normal numbers.
    """
    info = jnp.finfo(np.promote_types(dtype, jnp.float32))
    return jnp.dtype(f"int{info.bits}"), info.nmant, info.maxexp - 2


def _exponentials(static, q, k, seen, block):
    """E of a block, and E with dropout on it."""
    logits = product(static, "ntd,nsd->nts", block.cut(q), block.of_keys(k))
    e = exponential(logits, seen, block, static.scale).astype(q.dtype)
    return e, dropout(static, e, seen, block)


def _flat(x):
    return x.reshape(*x.shape[:2], -1)
