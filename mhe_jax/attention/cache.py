"""The key/value cache of one attention module, a `cache` collection, filled T ≥ 1 tokens at a time.

Leaves: `cached_NAME` [B, S, ...] for each array that the kind's `memory` returns, and
`cache_index` [B], the number of tokens that each row holds. Each row has its own position: after a
prefill of right-padded prompts, set `cache_index` to their lengths, and later tokens overwrite the
padding.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType

from mhe_jax.attention.mask import Mask

# The arrays [B, S, ...] that a kind's `memory` returns, by name.
KeyValues = dict[str, jax.Array]


def is_filled_once(module: nn.Module) -> bool:
    """Whether the cache is the fixed one of cross-attention, written by `fill_cache`."""
    return not _is_begun(module) and bool(read(module))


def positions(module: nn.Module, tokens: int) -> jax.Array:
    """Positions of the next `tokens` of each row, [B, tokens]; [1, tokens] without a cache."""
    places = jnp.arange(tokens)[None]
    if _is_begun(module):
        places += module.get_variable("cache", "cache_index")[:, None]
    return places


def fill(module: nn.Module, entries: KeyValues) -> None:
    """Write all of `entries` once, to be read by every later call."""
    if _is_begun(module):
        raise ValueError("fill_cache: takes an empty cache, and a call has begun this one")
    for name, array in entries.items():
        module.variable("cache", f"cached_{name}", jnp.zeros_like, array).value = array


def read(module: nn.Module) -> KeyValues:
    """The arrays of the cache."""
    leaves, prefix = module.variables.get("cache", {}), "cached_"
    return {name.removeprefix(prefix): x for name, x in leaves.items() if name.startswith(prefix)}


def extend(
    module: nn.Module, entries: KeyValues, mask: Mask, queries: int
) -> tuple[KeyValues, Mask, jax.Array | None]:
    """Append the entries of a self-attention call, or make a cache of their length.

    Returns all that the cache holds, `mask` for it, and which rows ran past the end [B].
    """
    B, keys = next(iter(entries.values())).shape[:2]
    if not _is_begun(module):
        for name, array in entries.items():
            module.variable("cache", f"cached_{name}", jnp.zeros, array.shape, array.dtype)
        module.variable("cache", "cache_index", jnp.zeros, (B,), jnp.int32)
        return entries, mask, None
    if keys != queries:
        needs = "as in cross-attention, need a cache filled by fill_cache"
        raise ValueError(f"decode=True: {queries} queries and {keys} keys, {needs}")
    offset = module.get_variable("cache", "cache_index")
    merged = {name: append(module, name, array, offset) for name, array in entries.items()}
    length = next(iter(merged.values())).shape[1]
    overflow = offset + queries > length
    if not isinstance(overflow, Tracer) and bool(overflow.any()):
        raise ValueError(
            f"the cache holds {length} tokens; a row with {int(offset.max())} got {queries} more"
        )
    module.put_variable("cache", "cache_index", offset + queries)
    for name, array in merged.items():
        module.put_variable("cache", f"cached_{name}", array)
    if mask.is_causal and mask.offset is None:
        mask = dataclasses.replace(mask, is_causal=False)
    if mask.window is not None and mask.window_offset is None:
        mask = dataclasses.replace(mask, window_offset=offset)
    # One query sees the first keys, up to its own place: lengths, which more engines take.
    earlier = Mask.lengths(offset + 1) if queries == 1 else Mask.causal(offset)
    return merged, mask & earlier, overflow


def append(module: nn.Module, name: str, array: jax.Array, index: jax.Array) -> jax.Array:
    """One array of the cache with T new tokens after each row's last, at `index` [B].

    A token past the end is not written. On a mesh with Explicit axes it raises ValueError.
    """
    cached, tokens = module.get_variable("cache", f"cached_{name}"), array.shape[1]
    if AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types:
        raise ValueError(
            "decoding is not for a mesh with Explicit axes; make it of Auto axes by "
            "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * number_of_axes)"
        )
    if array.shape[0] != cached.shape[0] or array.shape[2:] != cached.shape[2:]:
        raise ValueError(f"cached_{name} is {cached.shape}, which {array.shape} does not fit")
    if tokens > cached.shape[1]:
        raise ValueError(f"{tokens} new tokens do not fit in a cache of {cached.shape[1]}")
    rows = jnp.arange(array.shape[0])[:, None]
    positions = index[:, None] + jnp.arange(tokens)[None, :]
    new = array.astype(cached.dtype)
    return cached.at[rows, positions].set(new, mode="drop", unique_indices=True)


def _is_begun(module: nn.Module) -> bool:
    return module.has_variable("cache", "cache_index")
