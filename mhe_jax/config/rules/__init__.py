"""Rules between the fields of a config, checked before anything is compiled.

Each broken rule is one line: the dotted name of a field, its value, and what is allowed. The range
of one field stands in its type. Here is what the devices must divide.
"""

import math
from functools import partial

from mhe_jax.config import Config, InputError, MeshConfig
from mhe_jax.config.fields import checked, require
from mhe_jax.config.rules.data import check_data, check_evaluation, training_sources
from mhe_jax.config.rules.model import check_model, check_roles

__all__ = ["check", "check_devices", "mesh_shape", "training_sources"]


def check(config: Config, *, trains: bool = True) -> None:
    """Raises InputError for the first rule that the config breaks; needs text only if it trains."""
    checked(Config, config)
    check_model(config)
    check_roles(config)
    check_data(config, trains)
    check_evaluation(config)


def mesh_shape(mesh: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with the -1 filled in.

    >>> mesh_shape(MeshConfig(data=-1, tensor=2), 8)
    (4, 1, 2)
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
    """Raises InputError if the config cannot be laid over this many devices."""
    need, model, rows = partial(require, config), config.model, config.facts.rows
    data, fsdp, tensor = mesh_shape(config.mesh, num_devices)
    parts = (data, fsdp, config.optimizer.accumulate_steps)
    product = f"data · fsdp · accumulate_steps = {' · '.join(map(str, parts))}"
    whole = getattr(config.data, rows) % math.prod(parts) == 0
    need(f"data.{rows}", whole, f"must be a multiple of {product}")
    multiple = f"must be a multiple of mesh.fsdp={fsdp}"
    need("model.features", model.features % fsdp == 0, multiple)
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
