"""Shared scores by Pallas Mosaic GPU kernels on Hopper, with no score matrix forward.

`hopper_forward` computes output O and denominators d. Backward, with G = dO / (keep · d),

    δ[h] = -keep ⟨G[h], O[h]⟩    dsums = [G, δ₁, δ₂, δ₃, δ₁, δ₂]
                                 columns = [w ⊙ v, w₁, w₁, w₁, w₂, w₂]
    dS = E ⊙ (dsums·columnsᵀ)    dq = scale · dS·k    dk = scale · dSᵀ·q    dcolumns = Eᵀ·dsums

in parts that bfloat16 holds, w = w₁ + w₂ and δ = δ₁ + δ₂ + δ₃. `hopper_backward` makes E and dS for
some queries at a time, in bfloat16, and three products of XLA take them from memory. Dropout keeps
E' of E where values are concerned. No GPU has run these kernels, so `auto` does not take them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.engines import blocks, shared
from mhe_jax.attention.engines.blocks import Seen, Static, pad, parts, product, round_up
from mhe_jax.attention.engines.mesh import gpu_capability, platform, varying
from mhe_jax.attention.engines.shared import Values, Way, times_any_power, times_power, xla
from mhe_jax.attention.mask import Mask

# Queries of a program, keys of a tile of the backward kernel, and the steps in which widths grow.
QUERIES, KEYS, WIDTH = 128, 256, 64
# Pairs of a query and a key whose E and dS are in memory at a time: 256 MiB.
PAIRS = 2**26
# Keys of a word of dropout, and the number of a key that no query sees.
BITS, NOBODY = 32, np.iinfo(np.int32).min


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why the kernels cannot do this call, or None."""
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, this is {platform()}"
    capability, D, E = gpu_capability(), query.shape[-1], value.shape[-1]
    others = {str(x.dtype) for x in (query, key, value)} - {"bfloat16"}
    sizes = _sizes(1.0, 1.0 - options.dropout_rate, D, key_bias.shape[-1], E)
    return blocks.why_not(
        mask,
        options,
        "precision dense",
        (capability not in (None, 9), f"needs a GPU of capability 9.0 (Hopper), not {capability}"),
        (jax.config.read("jax_enable_x64"), "needs jax_enable_x64 off"),
        (others, f"needs bfloat16, not {', '.join(sorted(others))}"),
        (
            sizes is None,
            "needs values of a multiple of 16 up to 256, and queries that leave them room, "
            f"not values {E} and queries {D} wide",
        ),
    )


def attend(query, key, value, key_bias, mask: Mask, options, *, scale: float):
    """See `engines.attend`."""
    if query.shape[1] == 1 or 0 in (*query.shape[:2], key.shape[1]):
        return xla.attend(query, key, value, key_bias, mask, options, scale=scale)
    return shared.attend(WAY, query, key, value, key_bias, mask, options, scale)


def _placed(static: Static, output, b):
    """See `_forward`."""
    d, total = jnp.zeros(output.shape[:3], b.dtype), []
    if static.keep < 1:
        output, total = output[..., :-1], [output[..., -1:].astype(b.dtype)]
    return [output, jnp.zeros_like(output), d[..., 0], d, *total]


def _output(static: Static, kept, q, b):
    output, _, _, _, *total = kept
    return jnp.concatenate([output, *(x.astype(q.dtype) for x in total)], -1)


def _forward(static: Static, q, k, values: Values, b, seen: Seen):
    """Output, what rounding left of it, m, d; with dropout the sums of weights that it leaves."""
    from mhe_jax.attention.engines.shared import hopper_forward  # a later JAX may not have it

    (N, T, D), (_, S, R) = q.shape, b.shape
    E = values.divided.shape[3] - (static.keep < 1)
    values = Values(*(x[..., :E] for x in values))
    sizes = _sizes(static.scale, static.keep, D, R, E)
    heads, (queries, keys) = sizes.chunks * sizes.heads, _padded(T, S)
    w, columns = shared.columns_of(values, q, b, seen)
    weights = [pad(x, keys, heads).reshape(N, keys, sizes.chunks, -1) for x in parts(w, 2)]
    weights = pad(jnp.concatenate(weights, -1), keys, sizes.chunks, sizes.weights)
    powers = times_power(jnp.ones((), b.dtype), values.exponent)
    powers = jnp.broadcast_to(powers, (N, 1, R, E)).reshape(N, 1, R * E)
    output, rest, d, m, *total = hopper_forward.forward(
        sizes,
        pad(q, queries, round_up(D, WIDTH)),
        pad(k, keys, round_up(D, WIDTH)),
        pad(columns, keys, heads * E),
        weights.reshape(N, keys, -1).astype(q.dtype),
        pad(powers, 1, heads * E)[:, 0],
        visible(seen, static.keep, (N, T, S), queries, keys),
    )
    output, rest = (x[:, :T, : R * E].reshape(N, T, R, E) for x in (output, rest))
    d, *total = (x[:, :R, :T].swapaxes(1, 2) for x in (d, *total))
    return None, varying([output, rest, m[:, :T], d, *(x[..., None] for x in total)], q)


def _gradient(static: Static, q, k, v, values: Values, b, seen: Seen, kept, cotangent):
    from mhe_jax.attention.engines.shared import hopper_backward

    (N, T, D), (_, S, R) = q.shape, b.shape
    output, rest, m, d, *total = kept
    w, columns = shared.columns_of(values, q, b, seen)
    into, back = shared.cotangent_powers(values, cotangent)
    # Both terms of dS are made from the same rounded numbers: see `xla`.
    G = (times_any_power(cotangent, into) / (static.keep * d)[..., None]).astype(q.dtype)
    output = jnp.concatenate([output.astype(b.dtype) + rest.astype(b.dtype), *total], -1)
    delta = -static.keep * (G * times_power(output, -values.exponent)).sum(-1)

    X = columns.shape[2]
    of_values = round_up(X, WIDTH) if static.keep < 1 else X
    queries, keys = _padded(T, S)
    size = min(queries, max(1, PAIRS // (N * keys * 2 * QUERIES)) * 2 * QUERIES)
    number = -(-queries // size)
    queries = number * size

    def side_by_side(x, rest, length):
        x = pad(x.reshape(*x.shape[:2], -1), x.shape[1], of_values)
        x = jnp.concatenate([x, *(part.astype(x.dtype) for part in rest)], -1)
        return pad(x, length, round_up(x.shape[2], WIDTH))

    dsums = side_by_side(G, parts(delta, 3) + parts(delta, 2), queries)
    first, second = parts(w, 2)
    sides = side_by_side(columns, [first] * 3 + [second] * 2, keys)
    q_wide, k_wide = (pad(x, n, round_up(D, WIDTH)) for x, n in ((q, queries), (k, keys)))
    m, shown = pad(m, queries), visible(seen, static.keep, (N, T, S), queries, keys)
    sizes = hopper_backward.Sizes(
        static.scale, of_values, keys=min(KEYS, keys), cluster=1 + (size > QUERIES)
    )

    def step(i, dq, dk, dsides):
        def cut(x: Any, axis=1, of_one=1) -> Any:
            start = i * size // of_one
            return x if x is None else jax.lax.dynamic_slice_in_dim(x, start, size // of_one, axis)

        q, sums = cut(q_wide), cut(dsums)
        ids = shown.ids and (cut(shown.ids[0]), shown.ids[1])
        bounds, bits = cut(shown.bounds, 2), cut(shown.bits, 2)
        own = type(shown)(bounds, ids, cut(shown.ranges, 1, QUERIES), bits)
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
    dq, dk, dsides = jax.lax.fori_loop(1, number, lambda i, sums: step(i, *sums), sums)
    dq, dk, dsides = dq[:, :T, :D], dk[:, :S, :D], dsides[:, :S]
    dw = dsides[..., of_values : of_values + 3 * R].reshape(N, S, 3, R).sum(2)
    sums = dq, dk, dw, dsides[..., :X]
    return shared.gradients(static, q, k, values, w, columns, *sums, into, back)


def visible(seen: Seen, keep: float, sizes: tuple[int, int, int], queries: int, keys: int):
    """`hopper_forward.Visible` for `sizes` (N, T, S), padded to `queries` and `keys`."""
    from mhe_jax.attention.engines.shared.hopper_forward import Visible

    (N, T, S), mask, bits, ids, ranges, bounds = sizes, seen.mask, None, None, None, None
    position = jnp.arange(T)[None]
    if seen.words is not None:
        of_queries, of_keys = (pad(x, n) for x, n in zip(seen.words, (queries, keys), strict=True))
        of_keys = of_keys.reshape(len(of_keys), -1, BITS, 1)
        kept = blocks.is_kept(of_queries[:, None, None], of_keys, keep).astype(jnp.int32)
        places = jnp.arange(BITS, dtype=jnp.int32)[None, None, :, None]
        bits = (kept << places).sum(2, dtype=jnp.int32)
    first, last = mask.query_bounds(T, static=True)
    is_bounded = keys > S or any(x is not None for x in (first, last, mask.key_lengths))
    first = _edge(0 * position if first is None else jnp.maximum(first, 0), queries)
    last = S - 1 + 0 * position if last is None else jnp.minimum(last, S - 1)
    if mask.key_lengths is not None:
        # Without a sign, a length of 0 has no number before it.
        last = jnp.minimum(last, mask.key_lengths.astype(jnp.int32)[:, None] - 1)
    last = _edge(last, queries)
    if is_bounded:
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


def _kept(e, bits):
    """E'."""
    words = jnp.repeat(bits, BITS, 1).swapaxes(1, 2)
    place = jnp.arange(e.shape[2], dtype=jnp.int32)[None, None] % BITS
    return jnp.where(words >> place & 1 == 1, e, 0)


def _sizes(scale: float, keep: float, D: int, heads: int, width: int) -> Any:
    from mhe_jax.attention.engines.shared import hopper_forward

    return hopper_forward.sizes_of(scale, keep, round_up(D, WIDTH), heads, width)


def _padded(T: int, S: int) -> tuple[int, int]:
    """Lengths of whole tiles: of two programs of queries, but half of a tile where that is all."""
    halves = T <= QUERIES, S <= KEYS // 2
    return round_up(T, 2 * QUERIES >> halves[0]), round_up(S, KEYS >> halves[1])


def _edge(x, length: int):
    """x [N, L], with its last number to the end."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])), mode="edge")


WAY = Way(_forward, _gradient, _placed, _output)
