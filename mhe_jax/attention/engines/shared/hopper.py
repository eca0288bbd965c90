"""The Pallas Mosaic GPU kernel of `mosaic`: attention of one head with as many columns as it takes.

q [N, T, D], k [N, S, D], columns [N, S, C·V] in C chunks of V, weights [N, S, C·W] likewise; with m
the maximum over the keys that a query sees,

    E = exp(scale · (q·k - m))    sums = [E·columns, E·weights]

A program has 128 queries of a row and one chunk. Two warpgroups have 64 queries each, with their
sums in registers; a third loads blocks of keys with their columns and weights into two slots. While
one warpgroup uses the tensor core, the other computes its exponentials. E is rounded to bfloat16;
as in FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608) m is the maximum of the keys so far, and
the sums are rescaled where it grows.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

QUERIES, BLOCK_KEYS = 64, 128
COMPUTING, SLOTS = 2, 2
# Registers of a thread that computes, and of one that loads.
COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24


class Sizes(NamedTuple):
    """C chunks of V columns and W weights; `masked` where not all keys are seen."""

    scale: float
    chunks: int
    columns: int
    weights: int
    masked: bool


def forward(sizes: Sizes, q, k, columns, weights, lengths, interpret=None):
    """Sums [N, T, C·V] and [N, T, C·W] in float32, of arrays in bfloat16.

    T and S are multiples of 128, D and V of 64, W of 16. Where `sizes.masked`, a query sees the
    first `lengths` [N] keys, at least one.
    """
    (N, T, D), S = q.shape, k.shape[1]
    V, W = sizes.columns, sizes.weights
    call = gpu.kernel(
        functools.partial(_program, sizes, S),
        out_type=[
            jax.ShapeDtypeStruct((N, T, sizes.chunks * width), jnp.float32) for width in (V, W)
        ],
        grid=(sizes.chunks, T // (COMPUTING * QUERIES), N),
        grid_names=("chunk", "queries", "row"),
        num_threads=COMPUTING + 1,
        thread_name="group",
        scratch_types=[
            _shared(COMPUTING, QUERIES, D),
            _shared(SLOTS, BLOCK_KEYS, D),
            _shared(SLOTS, BLOCK_KEYS, V),
            _shared(SLOTS, BLOCK_KEYS, W),
            gpu.Barrier(num_barriers=COMPUTING),
            gpu.Barrier(num_barriers=SLOTS),
            gpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            gpu.Barrier(num_arrivals=COMPUTING, num_barriers=SLOTS),
            gpu.Barrier(num_arrivals=COMPUTING, num_barriers=SLOTS),
            gpu.Barrier(num_arrivals=COMPUTING),
        ],
        compiler_params=gpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return call(q, k, columns, weights, lengths)


def _shared(*shape):
    """Blocks as the tensor core reads them."""
    width = math.gcd(shape[-1], 64)
    transforms = gpu.TilingTransform((8, width)), gpu.SwizzleTransform(2 * width)
    return gpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def _program(
    sizes, S, q, k, columns, weights, lengths, sums, weight_sums,
    q_block, k_blocks, column_blocks, weight_blocks,
    has_q, has_k, has_columns, k_is_free, columns_are_free, turn,
):  # fmt: skip
    row, chunk = jax.lax.axis_index("row"), jax.lax.axis_index("chunk")
    group = jax.lax.axis_index("group")
    V, W, unit = sizes.columns, sizes.weights, sizes.scale * math.log2(math.e)
    length = lengths[row] if sizes.masked else S
    steps = pl.cdiv(length, BLOCK_KEYS) if sizes.masked else S // BLOCK_KEYS

    def pass_turn():
        gpu.barrier_arrive(turn)
        gpu.barrier_wait(turn)

    @pl.when(group < COMPUTING)
    def _compute():
        gpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        start = (jax.lax.axis_index("queries") * COMPUTING + group) * QUERIES
        own = pl.ds(start, QUERIES)
        gpu.copy_gmem_to_smem(q.at[row, own], q_block.at[group], has_q.at[group])
        gpu.barrier_wait(has_q.at[group])
        m = _full((QUERIES,), -jnp.inf, gpu.Layout.WGMMA.reduce(1))
        acc = _full((QUERIES, V), 0, gpu.Layout.WGMMA)
        acc_weights = _full((QUERIES, W), 0, gpu.Layout.WGMMA)
        gpu.barrier_wait(has_k.at[0])
        pl.when(group == 1)(pass_turn)

        def step(i, carry, masked=False):
            acc, acc_weights, m = carry
            slot = jax.lax.rem(i, jnp.int32(SLOTS))

            def scores(ref):
                gpu.wgmma(ref, q_block.at[group], gpu.transpose_ref(k_blocks.at[slot], (1, 0)))
                pass_turn()
                return ref[...]

            s = pl.run_scoped(scores, gpu.ACC((QUERIES, BLOCK_KEYS), jnp.float32))
            gpu.barrier_arrive(k_is_free.at[slot])
            if masked:
                key = gpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=gpu.Layout.WGMMA)
                s = jnp.where(key < length - i * BLOCK_KEYS, s, -jnp.inf)
            higher = jnp.maximum(m, s.max(axis=1))
            # The difference first: see `blocks.exponential`.
            e = jnp.exp2((s - jax.lax.broadcast_in_dim(higher, s.shape, [0])) * unit)
            e = e.astype(jnp.bfloat16)
            shrink = jnp.exp2((m - higher) * unit)
            acc *= jax.lax.broadcast_in_dim(shrink, acc.shape, [0])
            acc_weights *= jax.lax.broadcast_in_dim(shrink, acc_weights.shape, [0])
            acc, acc_weights, e, higher = jax.lax.optimization_barrier(
                (acc, acc_weights, e, higher)
            )
            gpu.barrier_arrive(turn)
            gpu.barrier_wait(has_columns.at[slot])
            gpu.barrier_wait(turn)

            def add(ref, ref_weights):
                gpu.wgmma(ref, e, column_blocks.at[slot])
                gpu.wgmma(ref_weights, e, weight_blocks.at[slot])
                following = jax.lax.rem(i + 1, jnp.int32(SLOTS))

                @pl.when(i + 1 < steps)
                def _():
                    gpu.barrier_wait(has_k.at[following])

            acc, acc_weights = pl.run_state(lambda refs: add(*refs))(
                (gpu.ACC.init(acc), gpu.ACC.init(acc_weights))
            )
            gpu.barrier_arrive(columns_are_free.at[slot])
            return acc, acc_weights, higher

        carry = acc, acc_weights, m
        if sizes.masked:
            # Only the last block has keys to hide.
            carry = jax.lax.fori_loop(0, steps - 1, step, carry)
            carry = jax.lax.fori_loop(steps - 1, steps, functools.partial(step, masked=True), carry)
        else:
            carry = jax.lax.fori_loop(0, steps, step, carry)
        acc, acc_weights, _ = carry
        pl.when(group == 0)(pass_turn)
        sums[row, own, pl.ds(chunk * V, V)] = acc
        weight_sums[row, own, pl.ds(chunk * W, W)] = acc_weights

    @pl.when(group == COMPUTING)
    def _load():
        gpu.set_max_registers(LOAD_REGISTERS, action="decrease")

        def load_k(i, slot):
            keys = pl.ds(i * BLOCK_KEYS, BLOCK_KEYS)
            gpu.copy_gmem_to_smem(k.at[row, keys], k_blocks.at[slot], has_k.at[slot])

        def load_columns(i, slot):
            keys = pl.ds(i * BLOCK_KEYS, BLOCK_KEYS)
            for of_all, width, blocks in ((columns, V, column_blocks), (weights, W, weight_blocks)):
                mine = of_all.at[row, keys, pl.ds(chunk * width, width)]
                gpu.copy_gmem_to_smem(mine, blocks.at[slot], has_columns.at[slot])

        @pl.loop(0, steps)
        def _(i):
            slot = jax.lax.rem(i, jnp.int32(SLOTS))
            pl.when(i >= SLOTS)(lambda: gpu.barrier_wait(k_is_free.at[slot]))
            load_k(i, slot)
            pl.when(i >= SLOTS)(lambda: gpu.barrier_wait(columns_are_free.at[slot]))
            load_columns(i, slot)

        @pl.loop(0, jnp.minimum(steps, SLOTS))
        def _(slot):
            gpu.barrier_wait(k_is_free.at[slot])
            gpu.barrier_wait(columns_are_free.at[slot])


def _full(shape, value, layout):
    return gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
