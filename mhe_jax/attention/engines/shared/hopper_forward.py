"""The forward kernel of `mosaic`: attention of one head with as many columns as it takes.

q [N, T, D], k [N, S, D], and for C programs of H heads each, E wide, columns [N, S, C·H·E] and
weights [N, S, C·W], by program [w₁ of its heads, w₂ of its heads, 0 ...] with w = w₁ + w₂. With m
the maximum over the keys that a query sees, E' the E that dropout keeps, and powers [N, C·H·E] of
two, which columns are divided by,

    E = exp(scale · (q·k - m))    d = E·w    output = powers ⊙ (E'·columns) / (keep · d)

A program has 128 queries of a row and one chunk of columns. Two warpgroups have 64 queries each,
with their sums in registers; a third loads blocks of keys, columns and weights into slots. While
one of the two uses the tensor core, the other computes exponentials: `turn` passes it on, twice a
block. As in FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608) m is the maximum so far, and sums
are rescaled where it grows.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from mhe_jax.attention.engines.blocks import round_up

QUERIES, COMPUTING, TILE = 64, 2, 128
# Registers of a thread that computes, and of one that loads.
COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24
# Most columns of a program, alone and with weights; bytes of shared memory.
MAX_COLUMNS, MAX_SUMS, MAX_SHARED = 256, 272, 232448
# Keys of a block, slots of k and of columns: the first that fits.
BLOCKS = (128, 2, 2), (64, 3, 3), (64, 2, 2), (64, 2, 1)
LEAST = float(jnp.finfo(jnp.float32).min)
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


class Sizes(NamedTuple):
    """See the top; `keys` of a block, and how many blocks of k, and of columns, have room."""

    scale: float
    chunks: int  # C
    heads: int  # H
    width: int  # E
    weights: int  # W
    keep: float
    keys: int
    key_slots: int
    column_slots: int


def sizes_of(scale: float, keep: float, D: int, heads: int, width: int) -> Sizes | None:
    """Sizes for `heads` of this width and queries of D; None where they do not fit."""
    if width % 16 or width > MAX_COLUMNS:
        return None
    # Dropout's E and E' beside wide queries leave fewer registers.
    most = max(1, (128 if keep < 1 and D > 128 else MAX_COLUMNS) // width)
    while most * width + round_up(2 * most, 16) > MAX_SUMS:
        most -= 1
    chunks = -(-heads // most)
    heads = -(-heads // chunks)
    weights = round_up(2 * heads, 16)
    # And too few for 128 keys.
    for keys, key_slots, column_slots in BLOCKS[keep < 1 :]:
        held = key_slots * D + column_slots * (heads * width + weights)
        if 2 * (TILE * D + keys * held) + 8 * (3 + 2 * (key_slots + column_slots)) <= MAX_SHARED:
            return Sizes(scale, chunks, heads, width, weights, keep, keys, key_slots, column_slots)
    return None


def forward(sizes: Sizes, q, k, columns, weights, powers, visible: Visible):
    """output₁, output₂ [N, T, C·H·E] in bfloat16, d [N, C·H, T] and m [N, T] in float32.

    The output is the sum of both. Without keys it is 0, d = 1 and m the least float32. With
    `visible.bits` also E'·w₁ / (keep · d) [N, C·H, T]. T and S are multiples of 128, D of 64.
    """
    if visible.ids is not None and sizes.keys == 128:
        # The ids of 128 keys are too many registers.
        slots = {"key_slots": 2 * sizes.key_slots, "column_slots": 2 * sizes.column_slots}
        sizes = sizes._replace(keys=64, **slots)
    (N, T, D), C, H = q.shape, sizes.chunks, sizes.heads
    output = jax.ShapeDtypeStruct((N, T, C * H * sizes.width), jnp.bfloat16)
    of_heads, m = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((N, C * H, T), (N, T)))
    free = functools.partial(gpu.Barrier, num_arrivals=COMPUTING)
    outputs, d, m, left = gpu.kernel(
        functools.partial(_program, sizes),
        out_type=[[output] * 2, of_heads, m, [of_heads] * (visible.bits is not None)],
        grid=(N, C, T // TILE),  # the last is the fastest: programs at a time share keys
        grid_names=("row", "chunk", "queries"),
        num_threads=COMPUTING + 1,
        thread_name="group",
        scratch_types=[
            in_shared_memory(COMPUTING, QUERIES, D),
            in_shared_memory(sizes.key_slots, sizes.keys, D),
            in_shared_memory(sizes.column_slots, sizes.keys, H * sizes.width),
            in_shared_memory(sizes.column_slots, sizes.keys, sizes.weights),
            gpu.Barrier(num_barriers=COMPUTING),
            gpu.Barrier(num_barriers=sizes.key_slots),
            gpu.Barrier(num_arrivals=2, num_barriers=sizes.column_slots),
            free(num_barriers=sizes.key_slots),
            free(num_barriers=sizes.column_slots),
            free(),
        ],
        compiler_params=gpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q, k, columns, weights, powers, visible)
    return *outputs, d, m, *left


def _program(
    sizes, q, k, columns, weights, powers, visible, outputs, denominators, maxima, left,
    q_block, k_blocks, column_blocks, weight_blocks,
    has_q, has_k, has_columns, k_is_free, columns_are_free, turn,
):  # fmt: skip
    row, chunk, group = (jax.lax.axis_index(name) for name in ("row", "chunk", "group"))
    # The last queries first: where a mask is causal they have most keys.
    tile = q.shape[1] // TILE - 1 - jax.lax.axis_index("queries")
    H, E, W = sizes.heads, sizes.width, sizes.weights
    loops = loops_over(sizes.keys, k.shape[1] // sizes.keys, visible, row, tile)
    begin, end = loops[0][0], loops[-1][1]

    def slot(i, slots):
        return jax.lax.rem(i - begin, jnp.int32(slots))

    def pass_turn():
        gpu.barrier_arrive(turn)
        gpu.barrier_wait(turn)

    @pl.when(group < COMPUTING)
    def _compute():
        gpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        own = pl.ds(tile * TILE + group * QUERIES, QUERIES)
        gpu.copy_gmem_to_smem(q.at[row, own], q_block.at[group], has_q.at[group])
        gpu.barrier_wait(has_q.at[group])
        see = sight(visible, row, own)
        m = full((QUERIES,), LEAST, gpu.Layout.WGMMA.reduce(1))
        # Sums of columns, of weights, and with dropout of the weights that it leaves.
        widths = (H * E, W) if visible.bits is None else (H * E, W, W)
        sums = [full((QUERIES, n), 0, gpu.Layout.WGMMA) for n in widths]
        gpu.barrier_wait(has_k.at[0])
        pl.when(group == 1)(pass_turn)

        def step(i, carry, tested):
            *sums, m = carry
            mine, keys = slot(i, sizes.key_slots), pl.ds(i * sizes.keys, sizes.keys)

            def scores(ref):
                gpu.wgmma(ref, q_block.at[group], k_blocks.at[mine].transpose((1, 0)))
                # Memory is read while the tensor core is at work.
                ids = visible.ids and vector(visible.ids[1].at[row, keys], 0)
                words = words_of(visible, row, keys, own)
                pass_turn()
                return ref[...], ids, words

            s, ids, words = pl.run_scoped(scores, gpu.ACC((QUERIES, sizes.keys), jnp.float32))
            gpu.barrier_arrive(k_is_free.at[mine])
            if tested:
                s = jnp.where(see(s, keys.start, ids), s, -jnp.inf)
            higher = jnp.maximum(m, s.max(axis=1))
            # The difference first: see `blocks.exponential`.
            unit = sizes.scale * math.log2(math.e)
            e = jnp.exp2((s - of_rows(higher, s)) * unit)
            kept, e = kept_of(e, words).astype(jnp.bfloat16), e.astype(jnp.bfloat16)
            shrink = jnp.exp2((m - higher) * unit)
            sums = [x * of_rows(shrink, x) for x in sums]
            sums, e, kept, higher = jax.lax.optimization_barrier((sums, e, kept, higher))
            gpu.barrier_arrive(turn)
            place = slot(i, sizes.column_slots)
            gpu.barrier_wait(has_columns.at[place])
            gpu.barrier_wait(turn)

            def add(refs):
                gpu.wgmma(refs[0], kept, column_blocks.at[place])
                for ref, x in zip(refs[1:], (e, kept), strict=False):
                    gpu.wgmma(ref, x, weight_blocks.at[place])
                following = has_k.at[slot(i + 1, sizes.key_slots)]
                pl.when(i + 1 < end)(lambda: gpu.barrier_wait(following))

            sums = pl.run_state(add)([gpu.ACC.init(x) for x in sums])
            gpu.barrier_arrive(columns_are_free.at[place])
            return *sums, higher

        for start, stop, tested in loops:
            blocks = functools.partial(step, tested=tested)
            *sums, m = jax.lax.fori_loop(start, stop, blocks, (*sums, m))
        acc, *of_weights = sums
        pl.when(group == 0)(pass_turn)
        inverses = []
        for h in range(H):
            first, second = (column_numbers(of_weights[0]) == n for n in (h, H + h))
            d = jnp.where(first | second, of_weights[0], 0.0).sum(axis=1)
            kept = [jnp.where(first, x, 0.0).sum(axis=1) for x in of_weights[1:]]
            d = jnp.where(d > 0, d, 1.0)
            inverses.append(1 / (d * sizes.keep))
            denominators[row, chunk * H + h, own] = d
            for ref, x in zip(left, kept, strict=True):
                ref[row, chunk * H + h, own] = x * inverses[h]
        parts = divided(acc, inverses, powers.at[row, pl.ds(chunk * H * E, H * E)], E)
        # The columns' slots are free for the output: one for each group, or one in turns.
        pass_turn()
        in_turns = sizes.column_slots < COMPUTING
        if in_turns:
            pl.when(group == 1)(pass_turn)
        block = column_blocks.at[0 if in_turns else group, pl.ds(0, QUERIES)]
        for output, of_output in zip(outputs, zip(*parts, strict=True), strict=True):
            for j, x in enumerate(of_output):
                block[:, pl.ds(j * x.shape[1], x.shape[1])] = x
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(block, output.at[row, own, pl.ds(chunk * H * E, H * E)])
            gpu.wait_smem_to_gmem(0, wait_read_only=True)
        if in_turns:
            pl.when(group == 0)(pass_turn)

        @pl.when(chunk == 0)
        def _():
            maxima[row, own] = m

    @pl.when(group == COMPUTING)
    def _load():
        gpu.set_max_registers(LOAD_REGISTERS, action="decrease")

        @pl.loop(begin, end)
        def _(i):
            keys = pl.ds(i * sizes.keys, sizes.keys)
            mine, place = slot(i, sizes.key_slots), slot(i, sizes.column_slots)
            pl.when(i - begin >= sizes.key_slots)(lambda: gpu.barrier_wait(k_is_free.at[mine]))
            gpu.copy_gmem_to_smem(k.at[row, keys], k_blocks.at[mine], has_k.at[mine])
            free = columns_are_free.at[place]
            pl.when(i - begin >= sizes.column_slots)(lambda: gpu.barrier_wait(free))
            for of_all, n, blocks in ((columns, H * E, column_blocks), (weights, W, weight_blocks)):
                part = of_all.at[row, keys, pl.ds(chunk * n, n)]
                gpu.copy_gmem_to_smem(part, blocks.at[place], has_columns.at[place])

        for slots, free in ((sizes.key_slots, k_is_free), (sizes.column_slots, columns_are_free)):
            last = pl.loop(0, jnp.minimum(end - begin, slots))
            last(lambda slot, free=free: gpu.barrier_wait(free.at[slot]))


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
    """What says which keys the queries see; without `by_bounds` the bounds let all through."""
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
    """acc times the numbers of its head and column: in parts, each as the sum of two in bfloat16.

    In parts as wide as those of a block the compiler knows the head of a column.
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
