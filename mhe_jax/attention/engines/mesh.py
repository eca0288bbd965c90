"""The devices of a call: their platform, and the rows and heads of each by `jax.shard_map`."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec


def platform() -> str:
    """'cpu', 'gpu' or 'tpu': of the current mesh, which may be only described, or JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def gpu_capability() -> float | None:
    """Compute capability of the local GPU; None for one that is only described."""
    if jax.default_backend() != "gpu":
        return None
    return float(jax.local_devices(backend="gpu")[0].compute_capability)


def over_rows(run: Callable, query, key, value, key_bias, parts: Any) -> Any:
    """`run(q, k, v, b, parts)` of `engines.shared`, with rows of examples times groups.

    On a mesh each device has its own: examples and heads (of several groups, groups) are split as
    the logical axis rules say for `batch` and `activation_heads`, where they divide the sizes.
    Leaves of `parts` have a row for each example, or one for all, and reach `run` with N or one.
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

    mesh, batch, heads = _mesh_axes()
    if mesh is None:
        return local(query, key, value, key_bias, parts)
    (B, _, G, _), H, K = query.shape, key_bias.shape[2], value.shape[2]
    batch = _if_divides(mesh, batch, B)
    heads = _if_divides(mesh, heads, H if G == 1 else G)
    grouped = PartitionSpec(batch, None, heads if G > 1 else None, None)
    own, bias = PartitionSpec(batch, None, heads, None), PartitionSpec(batch, None, heads)
    rows = jax.tree.map(lambda x: PartitionSpec(batch if len(x) == B else None), parts)
    specs = grouped, grouped, own if K == H else grouped, bias, rows
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False)
    return mapped(query, key, value, key_bias, parts)


def over_heads(run: Callable, query, key, value, key_bias, parts: Any) -> Any:
    """`run` for a call of `engines.attend`; on a mesh each device has its own examples and heads.

    Leaves of `parts` have a row for each example, or one for all, and those of `has_heads` likewise
    for each head. Key heads that are too few to be split are repeated; a single one is whole.
    """
    mesh, batch, heads = _mesh_axes()
    if mesh is None:
        return run(query, key, value, key_bias, parts)
    (B, _, H, _), K = query.shape, key.shape[2]
    batch, heads = _if_divides(mesh, batch, B), _if_divides(mesh, heads, H)
    if K > 1:
        repeats = math.lcm(K, _size(mesh, heads)) // K
        key, value = (jnp.repeat(x, repeats, 2) if repeats > 1 else x for x in (key, value))

    def spec(x):
        axes = [(batch, B), (heads, H)][: 1 + has_heads(x)]
        sizes = zip(axes, x.shape, strict=False)
        return PartitionSpec(*(axis if n == size else None for (axis, size), n in sizes))

    own = PartitionSpec(batch, None, heads, None)
    of_keys = own if K > 1 else PartitionSpec(batch)
    of_bias = None if key_bias is None else PartitionSpec(batch, None, heads)
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
    mesh, _, heads = _mesh_axes()
    return _size(mesh, heads)


def parts_of_call(examples: int, heads: int) -> int:
    """Into how many parts the mesh splits the scores of a call."""
    mesh, *axes = _mesh_axes()
    both = zip(axes, (examples, heads), strict=True)
    return math.prod(_size(mesh, _if_divides(mesh, axis, n)) for axis, n in both)


def sees_one_device() -> bool:
    """Whether arrays here are those of one device, inside `over_heads` too, as far as is known."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def _mesh_axes():
    """The mesh, and its axes that split examples and heads; None where nothing is split."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not nn.get_logical_axis_rules() or AxisType.Manual in mesh.axis_types:
        return None, None, None
    return mesh, *(nn.logical_to_mesh_axes(("batch", "activation_heads")) or (None, None))


def _rows(x):
    """[B, T, G, ...] to [B·G, T, ...]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def _if_divides(mesh, axes, size: int):
    return axes if size % _size(mesh, axes) == 0 else None


def _size(mesh, axes) -> int:
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)
