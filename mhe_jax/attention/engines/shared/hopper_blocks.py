"""What the kernels for Hopper do with blocks of queries and keys: where they lie, who sees whom.

Arrays in registers lie as products leave them there: 64 queries by keys, or by columns.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

# An argument of `gpu.load` that JAX dropped.
INDEX = ((),) if jax.__version_info__ < (0, 11) else ()


class Visible(NamedTuple):
    """Which keys queries see and what dropout keeps; None: all of them.

    - `bounds` int32 [N, 2, T]: the first and the last key of a query.
    - `ids` int32 [N, T] and [N, S]: a query sees the keys of its own number.
    - `ranges` int32 [N, T / 128, 4], wherever one of these is: the keys [first, end) that any of
      128 queries sees, at least one, and the keys [first, end) that the bounds of all let through.
    - `bits` int32 [N, S / 32, T]: bit j % 32 of word j // 32 is 1 where the query keeps key j.
    """

    bounds: jax.Array | None = None
    ids: tuple[jax.Array, jax.Array] | None = None
    ranges: jax.Array | None = None
    bits: jax.Array | None = None


def in_shared_memory(*shape):
    """Blocks as the tensor core reads them."""
    width = math.gcd(shape[-1], 64)
    transforms = gpu.TilingTransform((8, width)), gpu.SwizzleTransform(2 * width)
    return gpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def loops_over(keys: int, blocks: int, visible: Visible, row, tile):
    """(first, end, whether some are hidden) of the blocks of `keys`, in the order of keys."""
    if visible.ranges is None:
        return [(0, blocks, False)]
    first, last, of_all, end_of_all = (visible.ranges[row, tile, j] for j in range(4))
    begin, end = ratio(first, keys), ratio(last + keys - 1, keys)
    if visible.ids is not None:
        return [(begin, end, True)]
    start = jnp.clip(ratio(of_all + keys - 1, keys), begin, end)
    stop = jnp.clip(ratio(end_of_all, keys), start, end)
    return [(begin, start, True), (start, stop, False), (stop, end, True)]


def ratio(x, size):
    return jax.lax.div(x, jnp.int32(size))


def sight(visible: Visible, row, own):
    """What says which of the keys from `first` on, of these ids, the queries see.

    Where `by_bounds` is False, the bounds are known to let all of them through.
    """
    bounds, of_queries = visible.bounds, visible.ids and vector(visible.ids[0].at[row, own], 1)
    if bounds is not None:
        start, last = (vector(bounds.at[row, j, own], 1) for j in range(2))
        count = jnp.maximum(last - start + 1, 0).astype(jnp.uint32)

    def see(s, first, ids, by_bounds=True):
        seen = []
        if bounds is not None and by_bounds:
            # One comparison: without a sign, a key before the first is far behind the last.
            place = (column_numbers(s) - of_rows(start - first, s)).astype(jnp.uint32)
            seen.append(place < of_rows(count, s))
        if visible.ids:
            seen.append(of_rows(of_queries, s) == of_columns(ids, s))
        return functools.reduce(jnp.logical_and, seen)

    return see


def words_of(visible: Visible, row, keys, own):
    """What the queries keep of the keys, 32 a word."""
    if visible.bits is None:
        return []
    first = ratio(keys.start, 32)
    return [vector(visible.bits.at[row, first + j, own], 1) for j in range(keys.size // 32)]


def kept_of(e, words):
    """e where the bits say so, else 0."""
    if not words:
        return e
    word, key = of_rows(words[0], e), column_numbers(e)
    for j, later in enumerate(words[1:], 1):
        word = jnp.where(key < 32 * j, word, of_rows(later, e))
    return jnp.where(word & jax.lax.shift_left(jnp.int32(1), key & 31) != 0, e, 0.0)


def divided(acc, inverses, powers, width):
    """acc times the numbers of its head and column, in parts as wide as those of a block.

    Each part as two in bfloat16, whose sum it is. That wide, the compiler knows the head of a
    column, and chooses nothing at run time.
    """
    parts, n = [], math.gcd(acc.shape[1], 64)
    for first in range(0, acc.shape[1], n):
        x, h = acc[:, first : first + n], first // width
        inverse = of_rows(inverses[h], x)
        for later in range(h + 1, -(-(first + n) // width)):
            before = column_numbers(x) < later * width - first
            inverse = jnp.where(before, inverse, of_rows(inverses[later], x))
        # The power last: times 1 / d it may overflow.
        x = x * inverse * of_columns(vector(powers.at[pl.ds(first, n)], 0), x)
        # Behind the barrier two are rounded at once.
        high = jax.lax.optimization_barrier(x.astype(jnp.bfloat16))
        parts.append((high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)))
    return parts


def vector(ref, axis):
    """A number a row of the scores or, for axis 0, a column."""
    return gpu.load(ref, *INDEX, layout=gpu.Layout.WGMMA.reduce(axis), optimized=False)


def of_rows(x, like):
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def of_columns(x, like):
    return jax.lax.broadcast_in_dim(x, like.shape, [1])


def column_numbers(x):
    return gpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=gpu.Layout.WGMMA)


def full(shape, value, layout):
    return gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
