"""The devices of a call: their platform, and the rows and heads of each by `jax.shard_map`."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec


def platform() -> str:
    """The platform that a call is compiled for: 'cpu', 'gpu' or 'tpu'.

    That of the current mesh, whose devices need not be present, else JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def gpu_capability() -> float | None:
    """Compute capability of the local GPU; None for one that is only described."""
    if jax.default_backend() != "gpu":
        return None
    return float(jax.local_devices(backend="gpu")[0].compute_capability)


def over_rows(run: Callable, query, key, value, key_bias, parts: Any) -> Any:
    """`run` for a call of `engines.attend_shared`, with N rows of examples times groups.

    `run(q, k, v, b, parts)` takes q [N, T, D], k [N, S, D], v [N, S, R or 1, E], b [N, S, R] for
    the R heads of a group, and gives [N, T, R, E], or a tree of such arrays. Leaves of `parts` have
    a row for each example, or one for all, and reach `run` with N or one.

    On a mesh each device has its own rows and heads: batch and heads are split as the logical axis
    rules say for `batch` and `activation_heads`, where they divide the sizes; several groups of
    heads are split by group. Without a mesh, or inside another `shard_map`, nothing is split.
    """

    def local(query, key, value, key_bias, parts):
        (B, T, G, _), S, H = query.shape, key.shape[1], key_bias.shape[2]
        if 0 in (B, T, S):
            return jnp.zeros((B, T, H, value.shape[-1]), query.dtype)
        q, k, v = (_rows(x.reshape(*x.shape[:2], G, -1, x.shape[-1])) for x in (query, key, value))
        b = _rows(key_bias.reshape(B, S, G, -1))
        if G > 1:
            parts = jax.tree.map(lambda x: x if len(x) == 1 else jnp.repeat(x, G, 0), parts)

        def of_heads(x):
            return x.reshape(B, G, T, H // G, -1).swapaxes(1, 2).reshape(B, T, H, -1)

        return jax.tree.map(of_heads, run(q[:, :, 0], k[:, :, 0], v, b, parts))

    mesh, batch, heads = _mesh_axes()
    if mesh is None:
        return local(query, key, value, key_bias, parts)
    (B, _, G, _), H, K = query.shape, key_bias.shape[2], value.shape[2]
    batch = _if_divides(mesh, batch, B)
    heads = _if_divides(mesh, heads, H if G == 1 else G)
    grouped = PartitionSpec(batch, None, heads if G > 1 else None, None)
    own = PartitionSpec(batch, None, heads, None)
    rows = jax.tree.map(lambda x: PartitionSpec(batch if len(x) == B else None), parts)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            grouped,
            grouped,
            own if K == H else grouped,
            PartitionSpec(batch, None, heads),
            rows,
        ),
        out_specs=own,
        check_vma=False,
    )(query, key, value, key_bias, parts)


def over_heads(run: Callable, query, key, value, key_bias, parts: Any) -> Any:
    """`run` for a call of `engines.attend`; on a mesh each device has its own examples and heads.

    `run(query, key, value, key_bias, parts)` has the shapes of the call and gives arrays
    [B, T, H, ·]. Leaves of `parts` have a row for each example, or one for all; the dense part of a
    mask, and random keys [B, H], also have one for each head, or one for all. Key heads that are
    too few to be split are repeated, except a single one, which every device has whole.
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
        by_head = x.ndim == 4 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        axes = [(batch, B), (heads, H)][: 2 if by_head else 1]
        return PartitionSpec(
            *(axis if n == size else None for (axis, size), n in zip(axes, x.shape, strict=False))
        )

    own = PartitionSpec(batch, None, heads, None)
    of_keys = own if K > 1 else PartitionSpec(batch)
    of_bias = None if key_bias is None else PartitionSpec(batch, None, heads)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(own, of_keys, of_keys, of_bias, jax.tree.map(spec, parts)),
        out_specs=own,
        check_vma=False,
    )(query, key, value, key_bias, parts)


def varying(tree: Any, like: Any) -> Any:
    """`tree`, marked as varying over the mesh axes over which leaves of `like` vary.

    Inside `jax.shard_map`, the start of a loop and the result of a branch must be so marked.
    """
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
    return 1 if mesh is None else _size(mesh, heads)


def parts_of_call(examples: int, heads: int) -> int:
    """Into how many parts the mesh splits the scores of a call."""
    mesh, *axes = _mesh_axes()
    if mesh is None:
        return 1
    sizes = (
        _size(mesh, _if_divides(mesh, a, n)) for a, n in zip(axes, (examples, heads), strict=True)
    )
    return math.prod(sizes)


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
