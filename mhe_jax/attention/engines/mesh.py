"""The devices of a call: their platform, and the rows and heads of each by `jax.shard_map`.

The mesh axes of the logical name `length` split rows along their length (see `length`).
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from mhe_jax.attention.engines.length import part_by_part


def platform() -> str:
    """'cpu', 'gpu' or 'tpu': of the current mesh, which may be only described, or JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def gpu_capability() -> float | None:
    """Compute capability of the local GPU; None for one that is only described."""
    if jax.default_backend() != "gpu":
        return None
    return float(jax.local_devices(backend="gpu")[0].compute_capability)


def over_rows(run: Callable, query, key, value, key_bias, parts: Any, skips=False) -> Any:
    """`run(q, k, v, b, parts)` of `engines.shared`, with rows of examples times groups.

    On a mesh each device has its own: examples, heads (of several groups, groups) and lengths are
    split as the logical axis rules say for `batch`, `activation_heads` and `length`, where they
    divide the sizes. Leaves of `parts`, `blocks.Seen`, have a row for each example, or one for all,
    and reach `run` with N or one. `skips` as of `part_by_part`.
    """

    def local(query, key, value, key_bias, parts):
        (B, T, G, _), S, H = query.shape, key.shape[1], key_bias.shape[2]
        if 0 in (B, T, S):
            return jnp.zeros((B, T, H, value.shape[-1]), query.dtype)
        q, k, v = (_rows(x.reshape(*x.shape[:2], G, -1, x.shape[-1])) for x in (query, key, value))
        b = _rows(key_bias.reshape(B, S, G, -1))
        if G > 1:
            parts = jax.tree.map(lambda x: x if len(x) == 1 else jnp.repeat(x, G, 0), parts)

        output = run(q[:, :, 0], k[:, :, 0], v, b, parts)
        return output.reshape(B, G, T, H // G, -1).swapaxes(1, 2).reshape(B, T, H, -1)

    mesh, batch, length, heads = _mesh_axes(query.shape[1], key.shape[1])
    if mesh is None:
        return local(query, key, value, key_bias, parts)
    (B, _, G, _), H, K = query.shape, key_bias.shape[2], value.shape[2]
    batch = _if_divides(mesh, batch, B)
    heads = _if_divides(mesh, heads, H if G == 1 else G)
    if length is not None:
        local = part_by_part(local, length, axis_size(mesh, length), skips)
    grouped = PartitionSpec(batch, length, heads if G > 1 else None, None)
    own, bias = PartitionSpec(batch, length, heads, None), PartitionSpec(batch, length, heads)
    rows = jax.tree.map(lambda x: PartitionSpec(batch if len(x) == B else None), parts)
    specs = grouped, grouped, own if K == H else grouped, bias, rows
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False)
    return mapped(query, key, value, key_bias, parts)


def over_heads(
    run: Callable, query, key, value, key_bias, parts: Any, of_queries: Callable = part_by_part
) -> Any:
    """`run` for a call of `engines.attend`; on a mesh each device has its own examples and heads.

    And its own queries, by `of_queries`, where rows are split. Leaves of `parts`, `blocks.Seen`,
    have a row for each example, or one for all, and those of `has_heads` likewise for each head.
    Key heads that are too few to be split are repeated; a single one is whole.
    """
    mesh, batch, length, heads = _mesh_axes(query.shape[1], key.shape[1])
    if mesh is None:
        return run(query, key, value, key_bias, parts)
    (B, _, H, _), K = query.shape, key.shape[2]
    batch, heads = _if_divides(mesh, batch, B), _if_divides(mesh, heads, H)
    if K > 1:
        repeats = math.lcm(K, axis_size(mesh, heads)) // K
        key, value = (jnp.repeat(x, repeats, 2) if repeats > 1 else x for x in (key, value))

    def spec(x):
        axes = [(batch, B), (heads, H)][: 1 + has_heads(x)]
        sizes = zip(axes, x.shape, strict=False)
        return PartitionSpec(*(axis if n == size else None for (axis, size), n in sizes))

    if length is not None:
        run = of_queries(run, length, axis_size(mesh, length))
    own = PartitionSpec(batch, length, heads, None)
    of_keys = own if K > 1 else PartitionSpec(batch, length)
    of_bias = None if key_bias is None else PartitionSpec(batch, length, heads)
    specs = own, of_keys, of_keys, of_bias, jax.tree.map(spec, parts)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False)
    return mapped(query, key, value, key_bias, parts)


def has_heads(x) -> bool:
    """Whether its second axis is heads, as of the dense part of a mask."""
    return x.ndim == 4


def varying(tree: Any, like: Any) -> Any:
    """`tree`, marked as varying as `like`: inside `shard_map` starts of loops must be so marked."""
    axes = frozenset[str]().union(*map(_varying_axes, jax.tree.leaves(like)))

    def vary(x):
        missing = tuple(axes - _varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _varying_axes(x) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    # The name differs between versions of JAX.
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def parts_of_heads() -> int:
    """Into how many parts the mesh splits the heads of a call."""
    mesh, _, _, heads = _mesh_axes(1, 1)
    return axis_size(mesh, heads)


def mesh_of_length(queries: int, keys: int) -> tuple[Any, Any]:
    """The mesh, and its axis that splits the rows of a call along their length, or None."""
    mesh, _, length, _ = _mesh_axes(queries, keys)
    return mesh, length


def parts_of_call(examples: int, heads: int, queries: int, keys: int) -> int:
    """Into how many parts the mesh splits the scores of a call."""
    mesh, batch, length, heads_axis = _mesh_axes(queries, keys)
    axes = _if_divides(mesh, batch, examples), length, _if_divides(mesh, heads_axis, heads)
    return math.prod(axis_size(mesh, axis) for axis in axes)


def sees_one_device() -> bool:
    """Whether arrays here are those of one device, inside `over_heads` too, as far as is known."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def _mesh_axes(queries: int, keys: int):
    """The mesh, and its axes that split examples, lengths and heads; None where nothing is split.

    Lengths are split in twice as many parts as devices, or not at all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not nn.get_logical_axis_rules() or AxisType.Manual in mesh.axis_types:
        return None, None, None, None
    axes = nn.logical_to_mesh_axes(("batch", "length", "activation_heads")) or (None,) * 3
    batch, length, heads = axes
    parts = 2 * axis_size(mesh, length)
    return mesh, batch, None if parts == 2 or queries % parts or keys % parts else length, heads


def _rows(x):
    """[B, T, G, ...] to [B·G, T, ...]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def _if_divides(mesh, axes, size: int):
    return axes if size % axis_size(mesh, axes) == 0 else None


def axis_size(mesh, axes) -> int:
    """Devices along an axis of the mesh, several of them, or None."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)
