"""Shared scores in plain XLA: one score matrix and one exponential for all heads of a group.

Where the scores of heads differ only by a bias on the keys, `s[t, j] + b[h, j]`, softmax factors:

    E[t, j] = exp(s[t, j] - m[t])       w[h, j] = exp(b[h, j] - c[h])
    O[t, h] = Σ_j E[t, j] w[h, j] v[j, h] / Σ_j E[t, j] w[h, j]

so that all outputs are one matrix product of E with H·E columns `w[h] ⊙ v[h]`, and all denominators
one with H columns w. m[t] is the maximum over the keys that query t sees, c[h] over the keys that
any query sees; both cancel, and no gradient goes through them.

Close to this is the Attention Free Transformer (Zhai et al. 2021, arXiv 2105.14103): its weights
exp(K[j] + w[t, j]) have one learned matrix w for all features, and factor in the same way.

What is guaranteed. Values and cotangents are divided by powers of two, each feature by its own, so
that their size does not matter (see `factored`). Let the spread of a head be
`max_j b[h, j] - min_j b[h, j]` plus the logarithm of the largest `max_e |v[j, h, e]|` over the
smallest that is not 0, over keys that some query sees. Where it is at most `factored.MAX_SPREAD` =
60 for every head, where features of the values differ from each other by no more, and where no
value is lost in float32 beside the largest of its feature, a query with a key has a denominator of
at least e^-60, no product overflows, and a factor that float32 flushes to zero (below e^-87) stood
for a share of the output below e^(60-87), about 2e-12. Elsewhere, or where a number is NaN, the
same call goes head by head, in blocks of queries: as exact as attention always is, and about as
slow. So output and gradients are finite wherever q·k, before it is scaled, and an ordinary
softmax's are, and right to the
largest feature of a head; gradients of queries that give all their weight to one key are 0 up to
sums of float32 that cancel, for which the output stays in float32 until then. Near the bound such
sums have larger terms than in an ordinary softmax: with a spread of 55 those gradients have errors
three times as large. The gradient of b is such a sum whatever the spread, with errors two to three
times as large. Cotangents have one power of two per example: a cotangent that is 2^126 times
smaller than the largest counts as 0.

The choice is made on the device, for each call; it is inside the custom gradient, so that a
gradient takes the path of its forward pass. Under `jax.vmap` both paths are computed.

A key of another segment or example never has weight for a query, but it may move c[h], and with it
the rounding; a NaN key spoils all queries of its call.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines.blocks import KEPT, Static, by_rows, seen_by
from mhe_jax.attention.engines.mesh import over_rows, varying
from mhe_jax.attention.engines.shared import factored, head_by_head, one_product
from mhe_jax.attention.engines.xla import weigh
from mhe_jax.attention.mask import Mask


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """None: this engine takes every call that `engines.attend_shared` takes."""
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend_shared`."""
    B, T, S = *query.shape[:2], key.shape[1]
    key_bias = key_bias.astype(np.promote_types(query.dtype, jnp.float32))
    if T == 1 and S > 0 and options.dropout_rate == 0:
        return _of_one(query, key, value, key_bias, mask, options, scale)
    static = Static(scale, 1.0 - options.dropout_rate, options.precision)
    seen = seen_by(mask, options, B, T, S)
    if options.dropout_rate > 0:
        # The remaining weights sum up in a separate column.
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)

    def run(*call):
        return _shared(static, *varying(call, call))

    output = over_rows(run, query, key, value, key_bias, seen)
    if options.dropout_rate > 0:
        return output[..., :-1], output[..., -1:]
    return output, mask.row_has_key(T, S, output.dtype)


def _of_one(query, key, value, key_bias, mask, options, scale) -> tuple[jax.Array, jax.Array]:
    """One query an example, as in decoding: an ordinary softmax, and no columns of all keys."""
    B, G, (S, H) = len(query), query.shape[2], key_bias.shape[1:]
    K, E = value.shape[2:]
    logits = jnp.einsum(
        "bgd,bsgd->bgs",
        query[:, 0] * jnp.asarray(scale, query.dtype),
        key,
        precision=options.precision,
        preferred_element_type=key_bias.dtype,
    )
    logits = jnp.repeat(logits, H // G, 1)[:, :, None]
    weights, total = weigh(logits, key_bias, mask, options)
    weights = weights.astype(value.dtype).reshape(B, K, H // K, S)
    output = jnp.einsum("bkns,bske->bkne", weights, value, precision=options.precision)
    return output.reshape(B, 1, H, E), total.astype(query.dtype)


def _output(static, q, k, v, b, seen) -> jax.Array:
    return _forward(static, q, k, v, b, seen)[0]


def _forward(static, q, k, v, b, seen):
    on_gpu = one_product.takes(static, q)

    def factored_softmax(q, k, v, values, b, seen):
        if on_gpu:
            return one_product.forward(static, q, k, values, b, seen)
        # Its output is rounded below.
        return None, *factored.forward(static, q, k, values, b, seen)

    def one_by_one(q, k, v, values, b, seen):
        output = head_by_head.forward(static, q, k, v, b, seen)
        ones = varying(jnp.ones(output.shape[:-1], b.dtype), q)
        return output if on_gpu else None, output.astype(b.dtype), ones

    values = factored.values_of(q, v, b, seen)
    fits = factored.fits(static, q, v, values, b, seen)
    call = q, k, v, values, b, seen
    rounded, *found = _choose(fits, factored_softmax, one_by_one, *call)
    output, denominator = checkpoint_name(found, KEPT)
    if rounded is None:
        rounded = output.astype(q.dtype)
    return rounded, (q, k, v, b, seen, output, denominator, fits)


def _backward(static, residuals, cotangent):
    """Gradients of q, k, v, b, and None for what is seen."""
    q, k, v, *residuals, fits = residuals

    def factored_softmax(q, k, v, values, *args):
        way = one_product if one_product.takes(static, q) else factored
        return way.gradient(static, q, k, values, *args)

    def one_by_one(q, k, v, values, b, seen, output, denominator, cotangent):
        return head_by_head.gradient(static, q, k, v, b, seen, cotangent)

    b, seen, *_ = residuals
    values = factored.values_of(q, v, b, seen)
    call = q, k, v, values, *residuals, cotangent
    return *_choose(fits, factored_softmax, one_by_one, *call), None


def _choose(fits, fast, sure, q, *args):
    fast, sure = (functools.partial(by_rows, f, q.shape[1]) for f in (fast, sure))
    return jax.lax.cond(fits, fast, sure, q, *args)


_shared = jax.custom_vjp(_output, nondiff_argnums=(0,))
_shared.defvjp(_forward, _backward)
