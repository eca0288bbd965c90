"""Running an engine on each device's own rows and heads, by `jax.shard_map`."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, PartitionSpec


def over_mesh(run: Callable, query, key, value, key_bias, parts: Any) -> jax.Array:
    """`run(query, key, value, key_bias, parts)` of `engines.attend_shared`, device by device.

    Batch and heads are split as the logical axis rules say for `batch` and `activation_heads`, as
    far as they divide; groups of heads stay whole, unless there are as many as to split. Leaves of
    `parts` have a row for each example, or one for all. Without a mesh, or inside another
    `shard_map`, this is `run`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not nn.get_logical_axis_rules() or AxisType.Manual in mesh.axis_types:
        return run(query, key, value, key_bias, parts)
    (B, _, G, _), H, K = query.shape, key_bias.shape[2], value.shape[2]
    batch, heads = nn.logical_to_mesh_axes(("batch", "activation_heads")) or (None, None)
    batch = _if_divides(mesh, batch, B)
    heads = _if_divides(mesh, heads, H if G == 1 else G)
    groups = heads if G > 1 else None
    shared = PartitionSpec(batch, None, groups, None)
    own = PartitionSpec(batch, None, heads, None)
    rows = jax.tree.map(lambda x: PartitionSpec(batch if x.shape[0] == B else None), parts)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(
            shared,
            shared,
            own if K == H else shared,
            PartitionSpec(batch, None, heads),
            rows,
        ),
        out_specs=own,
        check_vma=False,
    )(query, key, value, key_bias, parts)


def _if_divides(mesh, axes, size: int):
    names = (axes,) if isinstance(axes, str) else axes or ()
    return axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None
