"""Heads that share one score matrix: the factored softmax, its bound, and the way out beyond it.

Where the scores of heads differ only by a bias on the keys, `s[t, j] + b[h, j]`, softmax factors:

    E[t, j] = exp(s[t, j] - m[t])       w[h, j] = exp(b[h, j] - c[h])
    O[t, h] = Σ_j E[t, j] w[h, j] v[j, h] / Σ_j E[t, j] w[h, j]

so that all outputs are one matrix product of E with H·E columns `w[h] ⊙ v[h]`, and all denominators
one with H columns w. m[t] is the maximum over the keys that query t sees, c[h] over the keys that
any query sees; both cancel, and no gradient goes through them. The Attention Free Transformer (Zhai
et al. 2021, arXiv 2105.14103) is close: its weights exp(K[j] + w[t, j]) factor in the same way. So
do the decays of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), without softmax.

What is guaranteed. Let the spread of a head be `max_j b[h, j] - min_j b[h, j]` plus the logarithm
of the largest `max_e |v[j, h, e]|` over the smallest that is not 0, over keys that some query sees.
Where it is at most `MAX_SPREAD` = 60 for every head, where features of the values differ from each
other by no more, and where no value is lost in float32 beside the largest of its feature, a query
with a key has a denominator of at least e^-60, no product overflows, and a factor that float32
flushes to zero (below e^-87) stood for a share of the output below e^(60-87), about 2e-12.
Elsewhere, or where a number is NaN, the same call goes head by head, as exact and about as slow as
attention always is. So output and gradients are finite wherever q·k, before it is scaled, and an
ordinary softmax's are. Gradients of b, and of queries that give all their weight to one key, are
sums of float32 that cancel, with errors up to three times those of an ordinary softmax.

Each feature of the values, and all cotangents of an example, are divided by a power of two that
brings their largest number near 1, so that products stay within float32. A cotangent that is 2^126
times smaller than the largest counts as 0.

The choice is made on the device, for each call, and a gradient takes the path of its forward pass.
Under `jax.vmap` both are computed. A key of another segment or example may move c[h], and with it
the rounding; a NaN key spoils all queries of its call.

Rows N are examples times groups of R heads: q [N, T, D], k [N, S, D], values v [N, S, R or 1, E],
key bias b [N, S, R], output [N, T, R, E].
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines import blocks
from mhe_jax.attention.engines.blocks import Seen, Static, over_blocks, product
from mhe_jax.attention.engines.mesh import over_rows, varying
from mhe_jax.attention.mask import Mask

MAX_SPREAD = 60.0


class Way(NamedTuple):
    """How an engine computes the factored softmax of rows N."""

    # (static, q, k, values, b, seen) to the output, or None, and `kept`, what its gradient needs.
    forward: Callable
    # (static, q, k, v, values, b, seen, kept, cotangent) to gradients of q, k, v and b.
    gradient: Callable
    # (static, output, b) to `kept` of a call that went head by head, of which only shapes matter
    # beside the output.
    placed: Callable
    # (static, kept, q, b) to the output; None where `forward` gives it.
    output: Callable | None = None
    few_rows: bool = False  # at a time, on a CPU
    skips: bool = False  # keys past `Mask.lengths`, which need not be known before it runs


def attend(
    way: Way, query, key, value, key_bias, mask: Mask, options, scale: float, prepare=None
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend`; `prepare(static, q, k, v, b, mask)` makes the `static` of `way`."""
    B, T, S = *query.shape[:2], key.shape[1]
    static = Static(scale, 1.0 - options.dropout_rate, options.precision)
    key_bias = key_bias.astype(np.promote_types(query.dtype, jnp.float32))
    seen = Seen(mask)
    if options.dropout_rate > 0:
        rows = 1 if options.broadcast_dropout == "batch" else B
        seen = Seen(mask, blocks.words_of(options, (rows,), T, S))
        # The remaining weights sum up in a separate column.
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)

    def run(*call):
        own = static if prepare is None else prepare(static, *call[:4], call[4].mask)
        return _softmax(way, own, *varying(call, call))

    output = over_rows(run, query, key, value, key_bias, seen, way.skips)
    if options.dropout_rate > 0:
        return output[..., :-1], output[..., -1:]
    return output, mask.row_has_key(T, S, output.dtype)


def _output(way, static, q, k, v, b, seen) -> jax.Array:
    return _forward(way, static, q, k, v, b, seen)[0]


def _forward(way, static, q, k, v, b, seen):
    def factored(q, k, v, values, b, seen):
        return way.forward(static, q, k, values, b, seen)

    def by_heads(q, k, v, values, b, seen):
        output = head_by_head(static, q, k, v, b, seen)
        kept = varying(way.placed(static, output, b), q)
        return None if way.output else output, kept

    values = values_of(q, v, b, seen)
    fit = fits(static, q, v, values, b, seen)
    output, kept = _either(way, fit, factored, by_heads, q, k, v, values, b, seen)
    kept = checkpoint_name(kept, blocks.KEPT)
    if way.output:
        output = way.output(static, kept, q, b)
    return output, (q, k, v, b, seen, kept, fit)


def _backward(way, static, residuals, cotangent):
    def by_heads(q, k, v, values, b, seen, kept, cotangent):
        return head_by_head_gradient(static, q, k, v, b, seen, cotangent)

    q, k, v, b, seen, kept, fit = residuals
    factored, values = functools.partial(way.gradient, static), values_of(q, v, b, seen)
    call = q, k, v, values, b, seen, kept, cotangent
    return *_either(way, fit, factored, by_heads, *call), None


def _either(way, fit, fast, sure, q, *rest):
    if way.few_rows:
        fast, sure = (functools.partial(blocks.by_rows, f, q.shape[1]) for f in (fast, sure))
    return jax.lax.cond(fit, fast, sure, q, *rest)


_softmax = jax.custom_vjp(_output, nondiff_argnums=(0, 1))
_softmax.defvjp(_forward, _backward)


def head_by_head(static, q, k, v, b, seen: Seen):
    """`softmax(scale · q·k + b[h]) v[h]`: slow, with one head's scores of one block in memory."""

    def one(head, output):
        def step(block, output):
            run, args = _of_block(static, q, k, v, b, seen, head, block)
            at = (0, block.start, head, 0)
            return jax.lax.dynamic_update_slice(output, run(*args)[:, :, None], at)

        return over_blocks(q, k, seen, step, output)

    output = varying(jnp.zeros((*q.shape[:2], b.shape[2], v.shape[3]), v.dtype), q)
    return jax.lax.fori_loop(0, b.shape[2], one, output)


def head_by_head_gradient(static, q, k, v, b, seen: Seen, cotangent):
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
        e = blocks.exponential(logits + b[:, None], seen, block)
        total = e.sum(-1, keepdims=True)
        weights = blocks.dropout(static, e / jnp.where(total > 0, total, 1), seen, block)
        return product(static, "nts,nse->nte", weights.astype(v.dtype), v).astype(v.dtype)

    k, v, b = (block.of_keys(x) for x in (k, _at(v, head % v.shape[2]), _at(b, head)))
    return run, (block.cut(q), k, v, b)


def _at(x, head):
    return jax.lax.dynamic_index_in_dim(x, head, 2, keepdims=False)


class Values(NamedTuple):
    """`v / 2^exponent`, 0 for keys that no query sees: [N, S, R or 1, E], and [N, 1, R or 1, E]."""

    divided: jax.Array
    exponent: jax.Array


def values_of(q, v, b, seen: Seen) -> Values:
    keys = seen_keys(q, b, seen)[..., None]
    exponent = _exponent(v, 1, keys)
    # A feature that is 0 may still have a gradient, and is treated as one of the largest.
    none = -_layout(v.dtype)[2]
    largest = exponent.max((2, 3), keepdims=True)
    exponent = jnp.where(exponent == none, jnp.where(largest == none, 0, largest), exponent)
    # A key that no query sees may have a value of any size.
    return Values(jnp.where(keys, times_power(v, -exponent), 0).astype(v.dtype), exponent)


def fits(static: Static, q, v, values: Values, b, seen: Seen):
    """Whether a call is within the bound; False for NaN."""
    keys = seen_keys(q, b, seen)
    high = jnp.max(b, 1, initial=-jnp.inf, where=keys)
    low = jnp.min(b, 1, initial=jnp.inf, where=keys)
    spread = jnp.where(keys.any(1), high - low, 0)
    sizes = jnp.abs(values.divided.astype(b.dtype))
    if static.keep < 1:
        sizes = sizes[..., :-1]  # the last column is one of ones
    sizes = jnp.max(sizes, -1, initial=0)
    largest = jnp.max(sizes, 1, initial=0)
    smallest = jnp.min(sizes, 1, initial=jnp.inf, where=sizes != 0)
    ratio = jnp.where(largest == 0, 1, largest / smallest)
    lost = ((v != 0) & (values.divided == 0) & keys[..., None]).any()
    exponents = values.exponent
    apart = exponents.max((1, 2, 3)) - exponents.min((1, 2, 3))
    near = (apart <= int(MAX_SPREAD / math.log(2))).all()
    return (spread + jnp.log(ratio) <= MAX_SPREAD).all() & near & ~lost


def columns_of(values: Values, q, b, seen: Seen):
    """w [N, S, R], 0 for keys that no query sees, and w ⊙ v / 2^exponent [N, S, R·E]."""
    keys, v = seen_keys(q, b, seen), values.divided
    c = jnp.max(b, 1, keepdims=True, initial=-jnp.inf, where=keys)
    c = jnp.where(jnp.isfinite(c), c, 0)
    w = jnp.where(keys, jnp.exp(jnp.where(keys, b - c, 0)), 0)
    return w, flat((w[..., None] * v.astype(w.dtype)).astype(v.dtype))


def seen_keys(q, b, seen: Seen):
    """Keys that some query sees, [N or 1, S, 1]."""
    return seen.mask.key_is_seen(q.shape[1], b.shape[1])[:, :, None]


def gradients(static, q, k, values: Values, w, columns, dq, dk, dw, dcolumns, into, back):
    """Gradients of q, k, v and b from those of `columns_of`, and powers of `cotangent_powers`."""
    dcolumns = dcolumns.reshape(*w.shape, -1)
    db = product(static, "nsre,nsre->nsr", dcolumns, columns.reshape(dcolumns.shape)) + w * dw
    if values.divided.shape[2] == 1:
        dv = product(static, "nsre,nsr->nse", dcolumns, w)[:, :, None]
    else:
        dv = dcolumns * w[..., None]
    dv = times_any_power(dv, -into).astype(values.divided.dtype)
    dq, dk, db = (times_any_power(x, back[..., 0]) for x in (dq, dk, db))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, db


def cotangent_powers(values: Values, cotangent):
    """Powers of two of cotangents, with those of the values, and back for gradients."""
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
    """Integers of a float's size, bits of its fraction, the largest e with normal 2^e and 2^-e."""
    info = jnp.finfo(np.promote_types(dtype, jnp.float32))
    return jnp.dtype(f"int{info.bits}"), info.nmant, info.maxexp - 2


def flat(x):
    return x.reshape(*x.shape[:2], -1)
