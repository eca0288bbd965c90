"""Rules for the mesh, and what it divides."""

import math
from functools import partial

from mhe_jax.config import Config, InputError, MeshConfig
from mhe_jax.config.fields import require


def mesh_shape(mesh: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with the -1 filled in.

    >>> mesh_shape(MeshConfig(data=-1, tensor=2), 8)
    (4, 1, 2)

    Raises:
      InputError: two are -1, one is 0, or their product is not the number of devices.
    """
    sizes = [mesh.data, mesh.fsdp, mesh.tensor]
    given = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) < 2 and given > 0 and num_devices % given == 0:
        data, fsdp, tensor = (num_devices // given if size == -1 else size for size in sizes)
        if data * fsdp * tensor == num_devices:
            return data, fsdp, tensor
    raise InputError(
        f"mesh.data={mesh.data} · mesh.fsdp={mesh.fsdp} · mesh.tensor={mesh.tensor} must be the "
        f"{num_devices} devices there are; one may be -1, for all that are left"
    )


def check_devices(config: Config, num_devices: int) -> None:
    """Raises InputError if the config cannot be laid over this many devices.

    Rows must divide over `data` and `fsdp` in each accumulated part, the model's width over `fsdp`,
    and heads, MLP and vocabulary over `tensor`; with `mesh.length` so must the lengths of rows.
    """
    need, model, rows = partial(require, config), config.model, config.facts.rows
    data, fsdp, tensor = mesh_shape(config.mesh, num_devices)
    accumulated = config.optimizer.accumulate_steps
    parts = data * fsdp * accumulated
    product = f"data · fsdp · accumulate_steps = {data} · {fsdp} · {accumulated} = {parts}"
    whole = getattr(config.data, rows) % parts == 0
    need(f"data.{rows}", whole, f"must be a multiple of {product}")
    whole = model.features % fsdp == 0
    need("model.features", whole, f"must be a multiple of mesh.fsdp={fsdp}")
    multiple = f"must be a multiple of mesh.tensor={tensor}"
    whole = not model.has_table or model.padded_vocabulary_size % tensor == 0
    padded = f"{multiple}, or be padded to one by model.vocabulary_multiple (128, say)"
    need("model.vocabulary_size", whole, padded)
    need("model.mlp_features", model.mlp_features % tensor == 0, multiple)
    for role in config.facts.roles:
        own = getattr(model.attention_by_role, role).num_heads is not None
        name = f"attention_by_role.{role}" if own else "attention"
        heads = model.attention_for(role).num_heads
        need(f"model.{name}.num_heads", heads % tensor == 0, multiple)
    if config.mesh.length == "tensor":
        length, buckets = config.data.sequence_length, config.data.length_buckets
        need("data.sequence_length", length % tensor == 0, multiple)
        whole = all(bucket % tensor == 0 for bucket in buckets)
        known = buckets or config.facts.content != "pair"
        takes = f"each {multiple} with mesh.length=tensor"
        need("data.length_buckets", whole and known, takes)
