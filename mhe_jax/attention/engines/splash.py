"""Softmax attention on a TPU by splash attention, the Pallas kernels that come with JAX.

Padding and segments become segment ids, which the kernel compares; a key bias becomes columns of
the keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import NamedSharding, PartitionSpec

from mhe_jax.attention.engines import blocks as common
from mhe_jax.attention.engines.blocks import BIAS_PARTS, even, pad, round_up, why_not
from mhe_jax.attention.engines.length import exchanged, positions_of
from mhe_jax.attention.engines.mesh import axis_size, mesh_of_length, over_heads, platform
from mhe_jax.attention.mask import Mask

LANES = 128
MAX_WIDTH = 1024
# A few queries leave a block of the kernel nearly empty; their scores are small.
FEW_QUERIES = 128
# Queries and keys of a block, and keys of a product, by the widest head: of the sizes that compile
# for v5e, v6e and v5p, those of the fewest cycles (`experiments/kernels_tpu/cycles.py --tune`).
BLOCKS = {
    128: (1024, 1024, 1024),
    256: (1024, 1024, 512),
    512: (512, 1024, 512),
    MAX_WIDTH: (256, 512, 256),
}


def unsuited(arrays, widths: tuple[int, int], mask: Mask, options) -> str | None:
    """Why no kernel for a TPU can do a call of these arrays and widths of heads, or None."""
    dtypes = {x.dtype for x in arrays}
    ours = len(dtypes) == 1 and dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}
    names = ", ".join(sorted(map(str, dtypes)))
    too_wide = f"needs heads no wider than {MAX_WIDTH}, not {widths[0]} and {widths[1]}"
    return why_not(
        mask,
        options,
        "precision dense",
        (platform() != "tpu", f"needs a TPU, this is {platform()}"),
        (not ours, f"needs query, key and value in one of bfloat16 and float32, not {names}"),
        (max(widths) > MAX_WIDTH, too_wide),
    )


def refusal(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why splash attention cannot do this call, or None."""
    widths = query.shape[-1] + BIAS_PARTS * (key_bias is not None), value.shape[-1]
    return unsuited((query, key, value), widths, mask, options) or why_not(
        mask,
        options,
        "dropout sowing",
        (
            any(bound is not None for bound in mask.query_bounds(1)),
            "takes a causal mask or a window without an offset only",
        ),
        (
            mask.window is not None and query.shape[1] > key.shape[1] + mask.window[0],
            "takes a window only where each query has a key in it",
        ),
    )


def passed_by(query, key, value, key_bias, mask: Mask, options) -> str | None:
    """Why `auto` takes another engine for a call that this one can do, or None."""
    if query.shape[1] < FEW_QUERIES:
        return f"is slower for fewer than {FEW_QUERIES} queries"
    return None


def attend(query, key, value, key_bias, mask, options, *, scale, blocks=None, interpret=False):
    """See `engines.attend`; `interpret` runs the kernels on any device, slowly."""
    mesh, axis = mesh_of_length(query.shape[1], key.shape[1])
    devices = axis_size(mesh, axis)

    def local(query, key, value, key_bias, mask):
        (B, T, H, _), S, E = query.shape, key.shape[1], value.shape[-1]
        if 0 in (B, T, S):
            return jnp.zeros((B, T, H, E), query.dtype)
        query = query * jnp.asarray(scale, query.dtype)
        if key_bias is not None:
            query, key, value = common.with_bias_columns(query, key, value, key_bias)
        sizes = blocks or _blocks(T, S, max(query.shape[-1], E))
        padded = round_up(T, sizes[0]), round_up(S, sizes[1])
        ids = _segments(mask, B, devices * T, S, padded[1])
        if axis is None:
            kernel = _kernel(mask, H, np.arange(T)[None], *padded, sizes, interpret)
        else:
            positions = positions_of(devices, T)
            kernel = _kernel(mask, H, positions, *padded, sizes, interpret)
            if kernel.fwd_mask_info.q_sequence is not None:
                kernel = _of_device(kernel, mesh, axis)
            if ids is not None:
                own = jnp.asarray(positions)[jax.lax.axis_index(axis)]
                ids = ids._replace(q=ids.q[:, own])
        if ids is not None:
            ids = ids._replace(q=jnp.pad(ids.q, ((0, 0), (0, padded[0] - T))))
        query, key, value = (
            pad(x, size).swapaxes(1, 2)
            for x, size in zip((query, key, value), (padded[0], padded[1], padded[1]), strict=True)
        )
        output: Any = jax.vmap(kernel)(query, key, value, ids)
        return output[:, :, :T].swapaxes(1, 2)

    output = over_heads(local, query, key, value, key_bias, mask, exchanged)
    # The kernel averages the values of a row without keys.
    has_key = mask.row_has_key(query.shape[1], key.shape[1], output.dtype)
    return output * has_key, has_key


def _blocks(T: int, S: int, width: int) -> tuple[int, int, int]:
    """Queries and keys of a block, keys of a product: at most `BLOCKS`, with little padding."""
    queries, keys, step = next(sizes for most, sizes in BLOCKS.items() if width <= most)
    queries, keys = even(T, queries, LANES), even(S, keys, LANES)
    return queries, keys, max(n for n in range(LANES, step + 1, LANES) if keys % n == 0)


def _segments(mask: Mask, B, T, S, padded_keys):
    """Segment ids of queries and keys, with another id for hidden keys; None if all match."""
    # The causal mask alone hides the keys that are padding where no query comes after them.
    no_padding = padded_keys == S or (mask.is_causal and T <= S)
    parts = mask.key_lengths, mask.key_valid, mask.segment_ids
    if no_padding and all(part is None for part in parts):
        return None
    ids = mask.segment_ids or (jnp.zeros((1, 1), int),) * 2
    of_queries, of_keys = (x.astype(jnp.int32) for x in ids)
    hidden = of_queries.min() - 1
    if mask.key_valid is not None:
        of_keys = jnp.where(mask.key_valid, of_keys, hidden)
    if mask.key_lengths is not None:
        of_keys = jnp.where(jnp.arange(S)[None] < mask.key_lengths[:, None], of_keys, hidden)
    of_keys = jnp.broadcast_to(of_keys, (B, S))
    behind = jnp.broadcast_to(hidden, (B, padded_keys - S))
    of_keys = jnp.concatenate([of_keys, behind], 1)
    return splash.SegmentIds(jnp.broadcast_to(of_queries, (B, T)), of_keys)


def _of_device(kernel, mesh, axis: str):
    """The kernel of one device."""

    def own(x, spec):
        for number, name in enumerate(spec):
            if name == axis:
                size = x.shape[number] // axis_size(mesh, axis)
                start = jax.lax.axis_index(axis) * size
                x = jax.lax.dynamic_slice_in_dim(x, start, size, number)
        return x

    spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, axis)))
    return jax.tree.map(own, kernel, spec)


def _kernel(mask: Mask, heads, positions, queries, keys, blocks, interpret):
    """The kernel of all devices; `positions` are those of the queries of each, before padding."""
    block_queries, block_keys, step = blocks
    parts = len(positions) if mask.is_causal or mask.window else 1
    window, shape = mask.window, (parts * queries, keys)
    if window is not None:
        window = (window[0], 0) if mask.is_causal else window
        one = splash.LocalMask(shape, window, offset=0)
    else:
        one = (splash.CausalMask if mask.is_causal else splash.FullMask)(shape)
    if not isinstance(one, splash.FullMask):
        positions = np.pad(positions, ((0, 0), (0, queries - positions.shape[1])))
        one.q_sequence = positions.astype(np.int32).reshape(-1)
    return splash.make_splash_mha(
        splash.MultiHeadMask([one] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block_queries,
            block_kv=block_keys,
            block_kv_compute=step,
            block_q_dkv=block_queries,
            block_kv_dkv=block_keys,
            block_kv_dkv_compute=step,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=parts,
        residual_checkpoint_name=common.KEPT,
        interpret=interpret,
    )
