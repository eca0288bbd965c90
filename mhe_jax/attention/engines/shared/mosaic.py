"""Shared scores by Pallas Mosaic GPU kernels on Hopper: `xla`, with no score matrix forward.

The call is that of `xla`, with its factored softmax, bound and fallback. `hopper_forward` computes
output and denominators d. Backward, with O the output and c = 1 / (keep · d),

    G = c dO    δ[h] = -keep ⟨G[h], O[h]⟩    dsums = [G, δ₁, δ₂, δ₃, δ₁, δ₂]
                                             columns = [w ⊙ v, w₁, w₁, w₁, w₂, w₂]
    dS = E ⊙ (dsums·columnsᵀ)    dq = scale · dS·k    dk = scale · dSᵀ·q    dcolumns = Eᵀ·dsums

in parts that bfloat16 holds, w = w₁ + w₂ and δ = δ₁ + δ₂ + δ₃; the product of δ₃ and w₂ is below
float32. `hopper_backward` makes E and dS for some queries at a time, in bfloat16, and three
products of XLA take them from memory. Both terms of a dS, which cancel where a query gives all its
weight to one key, add up in one accumulator. Dropout keeps E' of E where values are concerned.

No GPU has run these kernels, so `auto` does not take them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines.blocks import (
    KEPT,
    Seen,
    Static,
    is_kept,
    parts,
    product,
    round_up,
    seen_by,
)
from mhe_jax.attention.engines.mesh import (
    gpu_capability,
    over_rows,
    parts_of_call,
    platform,
    varying,
)
from mhe_jax.attention.engines.shared import factored, head_by_head, xla
from mhe_jax.attention.mask import Mask

# From this version on, Pallas' interface to Mosaic GPU, which is not stable, was not tried.
UNTRIED_JAX = 0, 13
# Queries of a program, keys of a tile of the backward kernel, and the steps in which widths grow.
QUERIES, KEYS, WIDTH = 128, 256, 64
# Most rows of a grid of CUDA.
MAX_ROWS = 65535
# Pairs of a query and a key whose E and dS are in memory at a time: 256 MiB.
PAIRS = 2**26
# Keys of a word of dropout, and the number of a key that no query sees.
BITS, NOBODY = 32, np.iinfo(np.int32).min


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why the kernels cannot do this call, or None."""
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, this is {platform()}"
    capability = gpu_capability()
    if capability is not None and capability != 9:
        return f"needs a GPU of compute capability 9.0 (Hopper), not {capability}"
    if jax.__version_info__[:2] >= UNTRIED_JAX:
        return f"needs jax before {'.'.join(map(str, UNTRIED_JAX))}, not {jax.__version__}"
    if jax.config.read("jax_enable_x64"):
        return "needs jax_enable_x64 off"
    for x in (query, key, value):
        if x.dtype != jnp.bfloat16:
            return f"needs bfloat16, not {x.dtype}"
    D, E = query.shape[-1], value.shape[-1]
    if _sizes(Static(1.0, 1.0 - options.dropout_rate, None), D, key_bias.shape[-1], E) is None:
        return (
            "needs values of a multiple of 16 up to 256, and queries that leave them room, not "
            f"values {E} and queries {D} wide"
        )
    rows = len(query) * query.shape[2] // parts_of_call(len(query), query.shape[2])
    if rows > MAX_ROWS:
        return f"needs at most {MAX_ROWS} examples times groups on a device, not {rows}"
    if options.precision is not None:
        return "has no precision setting"
    if mask.allowed is not None:
        return "takes a mask in parts only: causal, windows, padding, segments; not a dense array"
    return None


def attend(
    query, key, value, key_bias, mask: Mask, options, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `engines.attend_shared`."""
    B, T, S = *query.shape[:2], key.shape[1]
    if T == 1 or 0 in (B, T, S):
        return xla.attend(query, key, value, key_bias, mask, options, scale=scale)
    static = Static(scale, 1.0 - options.dropout_rate, None)

    def run(*call):
        return _shared(static, *varying(call, call))

    key_bias = key_bias.astype(jnp.float32)
    seen = seen_by(mask, options, B, T, S)
    output, *total = over_rows(run, query, key, value, key_bias, seen)
    return output, total[0] if total else mask.row_has_key(T, S, output.dtype)


def _output(static, q, k, v, b, seen) -> list[jax.Array]:
    """The output [N, T, R, E], and the weights that dropout left, summed up: [N, T, R, 1]."""
    return _forward(static, q, k, v, b, seen)[0]


def _forward(static, q, k, v, b, seen):
    def by_kernel(q, k, v, values, b, seen):
        return _kernel_forward(static, q, k, values, b, seen)

    def one_by_one(q, k, v, values, b, seen):
        like = jax.eval_shape(by_kernel, q, k, v, values, b, seen)
        found = varying([jnp.zeros(x.shape, x.dtype) for x in like], q)
        output = head_by_head.forward(static, q, k, _with_ones(static, v), b, seen)
        found[0] = output[..., : v.shape[3]]
        if static.keep < 1:
            found[-1] = output[..., v.shape[3] :].astype(b.dtype)
        return found

    values = factored.values_of(q, v, b, seen)
    fits = factored.fits(static._replace(keep=1.0), q, v, values, b, seen)
    found = jax.lax.cond(fits, by_kernel, one_by_one, q, k, v, values, b, seen)
    found = checkpoint_name(found, KEPT)
    output, *_, last = found
    return [output, last.astype(q.dtype)][: 1 + (static.keep < 1)], (q, k, v, b, seen, found, fits)


def _backward(static, residuals, cotangents):
    q, k, v, b, seen, found, fits = residuals
    wide, cotangent = _with_ones(static, v), jnp.concatenate(cotangents, -1)

    def by_kernel(q, k, v, b, seen, found, cotangent):
        return _kernel_gradient(static, q, k, v, b, seen, found, cotangent)

    def one_by_one(q, k, v, b, seen, found, cotangent):
        return head_by_head.gradient(static, q, k, v, b, seen, cotangent)

    call = q, k, wide, b, seen, found, cotangent
    dq, dk, dv, db = jax.lax.cond(fits, by_kernel, one_by_one, *call)
    return dq, dk, dv[..., : v.shape[3]], db, None


_shared = jax.custom_vjp(_output, nondiff_argnums=(0,))
_shared.defvjp(_forward, _backward)


def _kernel_forward(static: Static, q, k, values, b, seen: Seen) -> list[jax.Array]:
    """The output and what is left of it when it is rounded, m [N, T] and d [N, T, R].

    With dropout also the sums of the weights that it leaves, [N, T, R, 1].
    """
    from mhe_jax.attention.engines.shared import hopper_forward  # a later JAX may not have it

    (N, T, D), (_, S, R), E = q.shape, b.shape, values.divided.shape[3]
    sizes = _sizes(static, D, R, E)
    heads, (queries, keys) = sizes.chunks * sizes.heads, _padded(T, S)
    w, columns = factored.columns_of(values, b, factored.seen_keys(q, b, seen))
    weights = [_pad(x, keys, heads).reshape(N, keys, sizes.chunks, -1) for x in parts(w, 2)]
    weights = _pad(jnp.concatenate(weights, -1), keys, sizes.chunks, sizes.weights)
    powers = factored.times_power(jnp.ones((), b.dtype), values.exponent)
    powers = jnp.broadcast_to(powers, (N, 1, R, E)).reshape(N, 1, R * E)
    output, rest, d, m, *total = hopper_forward.forward(
        sizes,
        _pad(q, queries, round_up(D, WIDTH)),
        _pad(k, keys, round_up(D, WIDTH)),
        _pad(columns, keys, heads * E),
        weights.reshape(N, keys, -1).astype(q.dtype),
        _pad(powers, 1, heads * E)[:, 0],
        visible(seen, static.keep, (N, T, S), queries, keys),
    )
    output, rest = (x[:, :T, : R * E].reshape(N, T, R, E) for x in (output, rest))
    d, *total = (x[:, :R, :T].swapaxes(1, 2) for x in (d, *total))
    return varying([output, rest, m[:, :T], d, *(x[..., None] for x in total)], q)


def _kernel_gradient(static: Static, q, k, v, b, seen: Seen, found, cotangent):
    """Gradients of q, k, v and b; with dropout, v and the cotangent have a column of ones."""
    from mhe_jax.attention.engines.shared import hopper_backward

    (N, T, D), (_, S, R) = q.shape, b.shape
    output, rest, m, d, *total = found
    values = factored.values_of(q, v, b, seen)
    w, columns = factored.columns_of(values, b, factored.seen_keys(q, b, seen))
    into, back = factored.cotangent_powers(values, cotangent)
    # Both terms of dS are made from the same rounded numbers: see `factored.gradient`.
    G = (factored.times_any_power(cotangent, into) / (static.keep * d)[..., None]).astype(q.dtype)
    output = jnp.concatenate([output.astype(b.dtype) + rest.astype(b.dtype), *total], -1)
    delta = -static.keep * (G * factored.divided(values, output)).sum(-1)

    X = columns.shape[2]
    of_values = round_up(X, WIDTH) if static.keep < 1 else X
    queries, keys = _padded(T, S)
    size = min(queries, max(1, PAIRS // (N * keys * 2 * QUERIES)) * 2 * QUERIES)
    blocks = -(-queries // size)
    queries = blocks * size

    def side_by_side(x, rest, length):
        x = _pad(x.reshape(*x.shape[:2], -1), x.shape[1], of_values)
        x = jnp.concatenate([x, *(part.astype(x.dtype) for part in rest)], -1)
        return _pad(x, length, round_up(x.shape[2], WIDTH))

    dsums = side_by_side(G, parts(delta, 3) + parts(delta, 2), queries)
    first, second = parts(w, 2)
    sides = side_by_side(columns, [first] * 3 + [second] * 2, keys)
    q_wide, k_wide = (_pad(x, n, round_up(D, WIDTH)) for x, n in ((q, queries), (k, keys)))
    m, shown = _pad(m, queries), visible(seen, static.keep, (N, T, S), queries, keys)
    sizes = hopper_backward.Sizes(
        static.scale, of_values, keys=min(KEYS, keys), cluster=1 + (size > QUERIES)
    )

    def step(i, dq, dk, dsides):
        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, i * size, size, 1)

        q, sums, own = cut(q_wide), cut(dsums), _of_queries(shown, i * size, size)
        e, ds = hopper_backward.products(sizes, q, k_wide, sums, sides, cut(m), own)
        if own.bits is None:
            more = product(static, "nts,ntx->nsx", e, sums)
        else:
            of_columns = product(static, "nts,ntx->nsx", _kept(e, own.bits), sums[..., :of_values])
            of_weights = product(static, "nts,ntx->nsx", e, sums[..., of_values:])
            more = jnp.concatenate([of_columns, of_weights], -1)
        of_q = static.scale * product(static, "nts,nsd->ntd", ds, k_wide)
        dq = jax.lax.dynamic_update_slice_in_dim(dq, of_q, i * size, 1)
        return dq, dk + static.scale * product(static, "nts,ntd->nsd", ds, q), dsides + more

    zeros = [jnp.zeros(x.shape, b.dtype) for x in (q_wide, k_wide, sides)]
    # Outside the loop XLA need not write zeros first, nor add to them.
    sums = step(0, *varying(zeros, q))
    dq, dk, dsides = jax.lax.fori_loop(1, blocks, lambda i, sums: step(i, *sums), sums)
    dq, dk, dsides = dq[:, :T, :D], dk[:, :S, :D], dsides[:, :S]
    dw = dsides[..., of_values : of_values + 3 * R].reshape(N, S, 3, R).sum(2)
    dv, db = factored.columns_gradient(static, values, w, columns, dw, dsides[..., :X], into, back)
    dq, dk = (factored.times_any_power(x, back[..., 0]) for x in (dq, dk))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, db


def visible(seen: Seen, keep: float, sizes: tuple[int, int, int], queries: int, keys: int):
    """What the kernels are told of mask and dropout: `hopper_forward.Visible`, N rows of it.

    `sizes` are (N, T, S); T and S are padded to `queries` and `keys`.
    """
    from mhe_jax.attention.engines.shared.hopper_forward import Visible

    (N, T, S), mask, bits, ids, ranges, bounds = sizes, seen.mask, None, None, None, None
    if seen.words is not None:
        of_queries, of_keys = (_pad(x, n) for x, n in zip(seen.words, (queries, keys), strict=True))
        of_keys = of_keys.reshape(len(of_keys), -1, BITS, 1)
        kept = is_kept(of_queries[:, None, None], of_keys, keep).astype(jnp.int32)
        bits = (kept << jnp.arange(BITS, dtype=jnp.int32)[None, None, :, None]).sum(
            2, dtype=jnp.int32
        )
    (before, after), position = mask.static_bounds(), jnp.arange(T)[None]
    first, last = mask.query_bounds(T)
    firsts = [first, None if before is None else position - before]
    lasts = [last, None if after is None else position + after]
    lengths = mask.key_lengths
    # Without a sign, a length of 0 has no number before it.
    lasts.append(None if lengths is None else lengths.astype(jnp.int32)[:, None] - 1)
    firsts, lasts = ([x for x in found if x is not None] for found in (firsts, lasts))
    first = _edge(functools.reduce(jnp.maximum, firsts, 0 * position), queries)
    last = _edge(functools.reduce(jnp.minimum, lasts, 0 * position + S - 1), queries)
    if firsts or lasts or keys > S:
        bounds = jnp.stack(jnp.broadcast_arrays(first, last), 1)
    if mask.segment_ids is not None or mask.key_valid is not None:
        of_queries, of_keys = mask.segment_ids or (0 * position, jnp.zeros((1, S)))
        of_queries, of_keys = of_queries.astype(jnp.int32), of_keys.astype(jnp.int32)
        if mask.key_valid is not None:
            of_keys = jnp.where(mask.key_valid, of_keys, NOBODY)
        ids = _edge(of_queries, queries), _edge(of_keys, keys)
    if bounds is not None or ids is not None:
        ranges = _ranges(first, last, ids, S)
    shown = Visible(bounds, ids, ranges, bits)
    return jax.tree.map(lambda x: jnp.broadcast_to(x.astype(jnp.int32), (N, *x.shape[1:])), shown)


def _ranges(first, last, ids, S):
    """`Visible.ranges` [N or 1, G, 4] of the first and last keys of queries, and of ids."""
    first, last = (x.reshape(len(x), -1, QUERIES) for x in (first, last))
    start, end = first.min(2), last.max(2) + 1
    if ids is not None:
        of_queries, of_keys = ids[0].reshape(len(ids[0]), -1, QUERIES), ids[1][:, None, :S]
        near = of_queries.min(2)[..., None] <= of_keys
        near &= of_keys <= of_queries.max(2)[..., None]
        start = jnp.maximum(start, near.argmax(2))
        end = jnp.minimum(end, jnp.where(near.any(2), S - near[..., ::-1].argmax(2), 0))
    start = start.clip(0, S - 1)
    of_all = first.max(2).clip(0, S)
    found = start, end.clip(start + 1, S), of_all, (last.min(2) + 1).clip(of_all, S)
    return jnp.stack(jnp.broadcast_arrays(*found), 2)


def _of_queries(shown, start, size: int):
    """The part of `visible` for some queries."""

    def cut(x, axis, of_one=1):
        if x is None:
            return None
        return jax.lax.dynamic_slice_in_dim(x, start // of_one, size // of_one, axis)

    return shown._replace(
        bounds=cut(shown.bounds, 2),
        ids=shown.ids and (cut(shown.ids[0], 1), shown.ids[1]),
        ranges=cut(shown.ranges, 1, QUERIES),
        bits=cut(shown.bits, 2),
    )


def _kept(e, bits):
    """E' of E [N, T, S]."""
    words = jnp.repeat(bits, BITS, 1).swapaxes(1, 2)
    place = jnp.arange(e.shape[2], dtype=jnp.int32)[None, None] % BITS
    return jnp.where(words >> place & 1 == 1, e, 0)


def _sizes(static: Static, D: int, heads: int, width: int) -> Any:
    from mhe_jax.attention.engines.shared import hopper_forward

    return hopper_forward.sizes_of(static.scale, static.keep, round_up(D, WIDTH), heads, width)


def _padded(T: int, S: int) -> tuple[int, int]:
    """Lengths of whole tiles: of two programs of queries, but half of a tile where that is all."""
    halves = T <= QUERIES, S <= KEYS // 2
    return round_up(T, 2 * QUERIES >> halves[0]), round_up(S, KEYS >> halves[1])


def _with_ones(static: Static, v):
    """The remaining weights sum up in a separate column."""
    return v if static.keep == 1 else jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)


def _pad(x, *sizes):
    """x [N, ...] with its next axes padded with zeros at the end, up to these sizes."""
    after = [0, *(size - n for n, size in zip(x.shape[1:], sizes, strict=False))]
    return jnp.pad(x, [(0, n) for n in after] + [(0, 0)] * (x.ndim - len(after)))


def _edge(x, length: int):
    """x [N, L], with its last number to the end."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])), mode="edge")
