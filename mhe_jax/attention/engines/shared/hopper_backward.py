"""The backward kernel of `mosaic`: E and the gradient of the scores, for all heads at once.

q [N, T, D], k [N, S, D], dsums [N, T, X] and columns [N, S, X], whose first `values` columns are
under dropout and whose others are not; m [N, T] are the maxima of the forward pass. With Z 1 where
dropout keeps, else 0,

    E = exp(scale · (q·k - m))
    dS = E ⊙ [Z ⊙ (dsums·columnsᵀ of values) + dsums·columnsᵀ of others]

A program has a tile of 128 queries and `keys` keys. Two warpgroups have 64 queries each, with the
products in registers; a third loads 64 columns at a time into slots. The programs of a cluster have
the same keys and each loads its part of them for all: a slot is free when all warpgroups of the
cluster have read it, and no program ends before all have read what it loaded for them.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from mhe_jax.attention.engines.shared import hopper_forward as hopper
from mhe_jax.attention.engines.shared.hopper_forward import in_shared_memory, kept_of, vector

QUERIES, COMPUTING, DEPTH = 64, 2, 64
# Bytes of shared memory, less what barriers take.
SHARED_BYTES = 232448 - 1024
# Registers of a thread that computes, and of one that loads.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40


class Sizes(NamedTuple):
    """Programs of `cluster` times 128 queries share loads of a tile of `keys`."""

    scale: float
    values: int
    keys: int = 256
    cluster: int = 2


def products(sizes: Sizes, q, k, dsums, columns, maxima, visible):
    """E and dS [N, T, S] in bfloat16, 0 where a query does not see the key.

    T is a multiple of 128 · cluster, S of keys, D, X and values of 64.
    """
    (N, T, D), S, X = q.shape, k.shape[1], columns.shape[2]
    keys, cluster, rows = sizes.keys, sizes.cluster, COMPUTING * QUERIES
    room = SHARED_BYTES - 2 * rows * keys
    slots = min(room // (2 * (rows + keys) * DEPTH), (D + X) // DEPTH)
    call = gpu.kernel(
        functools.partial(_program, sizes, slots),
        out_type=[jax.ShapeDtypeStruct((N, T, S), jnp.bfloat16)] * 2,
        # The last is the fastest: programs at a time share keys.
        grid=(N, S // keys, T // (cluster * rows)),
        grid_names=("row", "keys", "queries"),
        cluster=(cluster,),
        cluster_names=("cluster",),
        num_threads=COMPUTING + 1,
        thread_name="group",
        scratch_types=[
            in_shared_memory(slots, rows, DEPTH),
            in_shared_memory(slots, keys, DEPTH),
            in_shared_memory(COMPUTING, QUERIES, keys),
            gpu.Barrier(num_arrivals=2, num_barriers=slots),
            gpu.ClusterBarrier(
                collective_axes=("cluster",), num_arrivals=COMPUTING, num_barriers=slots
            ),
        ],
        compiler_params=gpu.CompilerParams(approx_math=True),
    )
    return call(q, k, dsums, columns, maxima, visible)


def _program(
    sizes, slots, q, k, dsums, columns, maxima, visible, e_out, ds_out,
    of_queries, of_keys, tiles, loaded, free,
):  # fmt: skip
    keys, unit = sizes.keys, sizes.scale * math.log2(math.e)
    row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
    of_cluster = jax.lax.axis_index("queries") * sizes.cluster
    block = of_cluster + jax.lax.axis_index("cluster")
    first_key = jax.lax.axis_index("keys") * keys
    there = pl.ds(first_key, keys)
    # Steps of the scores end here, and those of columns under dropout.
    of_scores = q.shape[2] // DEPTH
    of_values, steps = of_scores + sizes.values // DEPTH, of_scores + columns.shape[2] // DEPTH

    sees = True
    if visible.ranges is not None:
        # The programs of a cluster load together, or not at all.
        ranges = [
            [visible.ranges[row, of_cluster + i, n] for i in range(sizes.cluster)] for n in (0, 1)
        ]
        start = functools.reduce(jnp.minimum, ranges[0])
        end = functools.reduce(jnp.maximum, ranges[1])
        sees = (start < first_key + keys) & (first_key < end)

    def slot(n):
        return jax.lax.rem(n, jnp.int32(slots))

    @pl.when(group < COMPUTING)
    def _compute():
        gpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = pl.ds(group * QUERIES, QUERIES)
        own = pl.ds((block * COMPUTING + group) * QUERIES, QUERIES)
        tile = tiles.at[group]
        nothing = hopper.full((QUERIES, keys), 0, gpu.Layout.WGMMA)

        def store(array, x):
            gpu.wait_smem_to_gmem(0, wait_read_only=True)
            tile[...] = x.astype(jnp.bfloat16)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(tile, array.at[row, own, there])

        def product(start, end, acc):
            """acc and the product of these steps."""

            def add(acc):
                @pl.loop(start, end)
                def _(n):
                    gpu.barrier_wait(loaded.at[slot(n)])
                    columns_of_keys = of_keys.at[slot(n)].transpose((1, 0))
                    gpu.wgmma(acc, of_queries.at[slot(n), mine], columns_of_keys)
                    # The product before this one has read its slot.
                    gpu.wgmma_wait(1)
                    pl.when(n > start)(lambda: gpu.barrier_arrive(free.at[slot(n - 1)]))

            found: Any = pl.run_state(add)(gpu.ACC.init(acc))
            gpu.barrier_arrive(free.at[slot(end - 1)])
            return found

        def products():
            highest, see = vector(maxima.at[row, own], 1), hopper.sight(visible, row, own)
            ids = visible.ids and vector(visible.ids[1].at[row, there], 0)
            s = product(0, of_scores, nothing)

            def store_e(test_bounds):
                x = s
                if test_bounds or visible.ids is not None:
                    x = jnp.where(see(s, first_key, ids, test_bounds), s, -jnp.inf)
                # The difference first: see `blocks.exponential`.
                store(e_out, jnp.exp2((x - hopper.of_rows(highest, x)) * unit))

            if visible.bounds is None:
                store_e(False)
            else:
                start, end = (visible.ranges[row, block, n] for n in (2, 3))
                all_see = (start <= first_key) & (first_key + keys <= end)
                jax.lax.cond(all_see, lambda: store_e(False), lambda: store_e(True))
            if visible.bits is None:
                de = product(of_scores, steps, nothing)
            else:
                words = hopper.words_of(visible, row, there, own)
                de = kept_of(product(of_scores, of_values, nothing), words)
                de = product(of_values, steps, de)
            # Read again: held in registers, E would make them spill.
            store(ds_out, tile[...].astype(jnp.float32) * de)

        def clear():
            store(e_out, nothing)
            store(ds_out, nothing)

        if visible.ranges is None:
            products()
        else:
            jax.lax.cond(sees, products, clear)
        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load():
        here = pl.ds(block * COMPUTING * QUERIES, COMPUTING * QUERIES)

        def load_all(a, b, start, end):
            @pl.loop(start, end)
            def _(n):
                pl.when(n >= slots)(lambda: gpu.barrier_wait(free.at[slot(n)]))
                part = pl.ds((n - start) * DEPTH, DEPTH)
                has = loaded.at[slot(n)]
                gpu.copy_gmem_to_smem(a.at[row, here, part], of_queries.at[slot(n)], has)
                gpu.copy_gmem_to_smem(
                    b.at[row, there, part], of_keys.at[slot(n)], has, collective_axes=("cluster",)
                )

        load_all(q, k, 0, of_scores)
        load_all(dsums, columns, of_scores, steps)

        # No program ends while another may still arrive at its barriers.
        @pl.loop(steps - slots, steps)
        def _(n):
            gpu.barrier_wait(free.at[slot(n)])

    @pl.when(group == COMPUTING)
    def _():
        gpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        pl.when(sees)(load)
