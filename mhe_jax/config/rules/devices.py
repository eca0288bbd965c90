"""Rules for the mesh, and what it divides."""

import math

from mhe_jax.config import (
    Config,
    InputError,
    MeshConfig,
)
from mhe_jax.config.rules.ranges import refuse


def mesh_shape(mesh: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with the -1 filled in.

    >>> mesh_shape(MeshConfig(data=-1, tensor=2), 8)
    (4, 1, 2)
    """
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise refuse(f"mesh.{axis}", size, "takes 1 or more, or -1 for all that are left")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise InputError(f"mesh.{free[0]} and mesh.{free[1]} are both -1: one at most")
    given = math.prod(size for size in sizes.values() if size != -1)
    asked = " · ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != -1)
    if free:
        if num_devices % given:
            raise InputError(f"{asked} is {given}: must divide the {num_devices} devices there are")
        sizes[free[0]] = num_devices // given
    elif given != num_devices:
        raise InputError(f"{asked} is {given}: there are {num_devices} devices")
    return sizes["data"], sizes["fsdp"], sizes["tensor"]


def check_devices(config: Config, num_devices: int) -> None:
    """Raises InputError if the config cannot be laid over this many devices.

    Rows must divide over `data` and `fsdp` in each accumulated part, the model's width over `fsdp`,
    and heads, MLP and vocabulary over `tensor`; with `mesh.length` so must the lengths of rows.
    """
    data, fsdp, tensor = mesh_shape(config.mesh, num_devices)
    model = config.model
    rows = config.facts.rows
    parts = data * fsdp * config.optimizer.accumulate_steps
    if getattr(config.data, rows) % parts:
        raise refuse(
            f"data.{rows}",
            getattr(config.data, rows),
            f"must be a multiple of data · fsdp · accumulate_steps = {data} · {fsdp} · "
            f"{config.optimizer.accumulate_steps} = {parts}",
        )
    if model.features % fsdp:
        raise refuse("model.features", model.features, f"must be a multiple of mesh.fsdp={fsdp}")
    if model.has_table and model.padded_vocabulary_size % tensor:
        raise refuse(
            "model.vocabulary_size",
            model.vocabulary_size,
            f"must be a multiple of mesh.tensor={tensor}, or be padded to one by "
            "model.vocabulary_multiple (128, say)",
        )
    split = {"model.mlp_features": model.mlp_features}
    if config.mesh.length == "tensor":
        if config.facts.content == "pair" and not config.data.length_buckets:
            raise InputError("data.length_buckets is not set: mesh.length=tensor needs it")
        split["data.sequence_length"] = config.data.sequence_length
        for i, length in enumerate(config.data.length_buckets):
            split[f"data.length_buckets[{i}]"] = length
    for role in config.facts.roles:
        own = getattr(model.attention_by_role, role).num_heads is not None
        name = f"attention_by_role.{role}" if own else "attention"
        split[f"model.{name}.num_heads"] = model.attention_for(role).num_heads
    for name, size in split.items():
        if size % tensor:
            raise refuse(name, size, f"must be a multiple of mesh.tensor={tensor}")
