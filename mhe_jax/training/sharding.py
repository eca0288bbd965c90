"""The mesh (data, fsdp, tensor), and how every array is laid over it.

Every parameter carries a logical name for each of its axes; `RULES` says which mesh axis a name is
split over. XLA derives the rest, so the same code runs on one device and on a pod.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mhe_jax.checks import check_devices, mesh_shape
from mhe_jax.config import Config, InputError

AXES = ("data", "fsdp", "tensor")

# Logical axis name -> mesh axis; None keeps the axis whole on every device.
RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    # Parameters.
    ("embed", "fsdp"),  # M
    ("heads", "tensor"),  # H
    ("kv_heads", None),  # K of gqa, often fewer than devices
    ("groups", None),  # G of shared projections
    ("head_features", None),  # D
    ("mlp", "tensor"),  # F
    ("vocabulary", "tensor"),  # V
    ("kronecker_rank", None),  # small factors, whole on every device
    ("positions", None),
    ("token_types", None),
    ("norm", None),  # LayerNorm scales and biases
    ("layers", None),  # leading axis of scanned layers
    # Activations.
    ("batch", ("data", "fsdp")),
    ("length", None),
    ("activation_embed", None),
    ("activation_heads", "tensor"),
    ("activation_mlp", "tensor"),
    ("activation_vocabulary", "tensor"),
)

BATCH = PartitionSpec(("data", "fsdp"))


def make_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (all there are by default), with Auto axes.

    Raises:
      InputError: the config cannot be laid over so many devices, or `tensor` would spread the same
        rows over several processes (each process reads its own rows).
    """
    devices = jax.devices() if devices is None else list(devices)
    check_devices(config, len(devices))
    shape = mesh_shape(config.mesh, len(devices))
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
    for row in mesh.devices.reshape(-1, shape[-1]):
        if len({device.process_index for device in row}) > 1:
            raise InputError(
                f"mesh.tensor={shape[-1]} spans several processes: "
                f"at most the {jax.local_device_count()} devices of one"
            )
    return mesh


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Logical names mean something inside: to initialise, trace and run what is sharded."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield


def parameter_shardings(boxed: Any, mesh: Mesh) -> Any:
    """Shardings of parameters whose leaves are boxed with logical names (abstract ones will do).

    Raises:
      ValueError: an axis has a name that `RULES` does not have.
      InputError: a mesh axis does not divide an axis that is split over it.
    """
    known = {name for name, _ in RULES}
    specs = nn.get_partition_spec(boxed)
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        unknown = [name for name in spec if name is not None and name not in known]
        if unknown:
            raise ValueError(f"{path_name(path)}: no rule for the logical axis {unknown[0]!r}")
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    shapes = jax.tree_util.tree_leaves_with_path(nn.unbox(boxed))
    for (path, leaf), sharding, names in zip(
        shapes, jax.tree.leaves(shardings), jax.tree.leaves(specs, is_leaf=is_spec), strict=True
    ):
        for size, axis, name in zip(leaf.shape, sharding.spec, names, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise InputError(
                    f"mesh.{axis}={mesh.shape[axis]} must divide the {size} of axis {name!r} of "
                    f"parameter {path_name(path)}"
                )
    return shardings


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def global_batch(rows: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The rows that this process has read, as its part of arrays split over `data` and `fsdp`."""
    sharding = NamedSharding(mesh, BATCH)
    return {
        name: jax.make_array_from_process_local_data(sharding, np.asarray(array))
        for name, array in rows.items()
    }


def round_up_rows(rows: int, mesh: Mesh) -> int:
    """The smallest number of rows, `rows` or more, that divides over the mesh and the processes."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    multiple = math.lcm(shards, jax.process_count())
    return -(-rows // multiple) * multiple


def path_name(path) -> str:
    """`encoder/layer_0/kernel` for a key path of jax.tree_util.

    >>> path_name((jax.tree_util.DictKey("encoder"), jax.tree_util.DictKey("kernel")))
    'encoder/kernel'
    """
    return "/".join(path_parts(path))


def path_parts(path) -> tuple[str, ...]:
    """The names along a key path of jax.tree_util."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
