"""The mesh (data, fsdp, tensor), and how every array is laid over it.

Every parameter carries a logical name for each of its axes; `RULES` says which mesh axis a name is
split over. XLA derives the rest, so the same code runs on one device and on a pod.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mhe_jax.config import Config, InputError, MeshConfig
from mhe_jax.config.fields import set_field
from mhe_jax.config.rules import check_devices, mesh_shape

AXES = ("data", "fsdp", "tensor")

# Logical axis name -> mesh axis; None keeps the axis whole on every device.
Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]
RULES: Rules = (
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
    ("norm", None),  # scales and biases of norms
    ("layers", None),  # leading axis of scanned layers
    # Activations.
    ("batch", ("data", "fsdp")),
    ("activation_embed", None),
    ("activation_heads", "tensor"),
    ("activation_mlp", "tensor"),
    ("activation_vocabulary", "tensor"),
    ("length", None),
)
# By mesh.length; the earlier rule gets the axis.
RULES_BY_LENGTH: dict[str, Rules] = {
    "whole": RULES,
    "tensor": (*RULES[:-1], ("length", "tensor")),
    "everywhere": (("length", "tensor"), *RULES[:-1]),
}

BATCH = PartitionSpec(("data", "fsdp"))


def make_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (all there are by default), with Auto axes; InputError if none fits.

    `data` goes between slices (of TPUs, or groups of GPUs with a fast network of their own), and so
    does `fsdp` if there are more slices than that; `tensor` stays within one.
    """
    devices = jax.devices() if devices is None else list(devices)
    check_devices(config, len(devices))
    shape = mesh_shape(config.mesh, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    data = math.gcd(shape[0], slices)
    fsdp = math.gcd(shape[1], slices // data)
    if data * fsdp != slices:
        raise InputError(
            f"mesh.data={shape[0]} · mesh.fsdp={shape[1]} must be a multiple of the {slices} "
            "slices: mesh.tensor cannot span slices"
        )
    # A torus of chips is cut if none of its axes is as long as one of ours.
    cut = {"devices": devices, "allow_split_physical_axes": True}
    if slices == 1:
        grid = mesh_utils.create_device_mesh(shape, **cut)
    else:
        within = (shape[0] // data, shape[1] // fsdp, shape[2])
        grid = mesh_utils.create_hybrid_device_mesh(within, (data, fsdp, 1), **cut)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: Rules = RULES) -> Iterator[None]:
    """Binds logical names inside: to initialise, trace and run what is sharded."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


class OnMesh:
    """A function under jit, called or lowered with logical names bound to the mesh."""

    def __init__(self, function, mesh: Mesh, rules: Rules = RULES, **options):
        self.jitted, self.mesh, self.rules = jax.jit(function, **options), mesh, rules

    def __call__(self, *args):
        with use_mesh(self.mesh, self.rules):
            return self.jitted(*args)

    def lower(self, *args):
        with use_mesh(self.mesh, self.rules):
            return self.jitted.lower(*args)


def mesh_at_hand(config: Config, doing: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The run's mesh if its devices are there, else all there are along `data`, with a note."""
    # What training requires of its batches does not matter: they are rounded up, or there are none.
    if devices is not None and not isinstance(devices, Sequence):
        raise InputError(f"devices={devices!r}: takes a list of devices, as jax.devices() gives")
    count = jax.device_count() if devices is None else len(devices)
    for rows in ("data.batch_size", "data.row_multiple"):
        config = set_field(config, rows, count)
    config = set_field(config, "optimizer.accumulate_steps", 1)
    try:
        return make_mesh(config, devices)
    except InputError as error:
        print(f"note: {error}; {doing} with mesh.data={count}", file=sys.stderr)
        return make_mesh(set_field(config, "mesh", MeshConfig()), devices)


def parameter_shardings(boxed: Any, mesh: Mesh) -> Any:
    """Shardings of parameters whose leaves are boxed with logical names (abstract ones will do)."""
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    shapes = jax.tree_util.tree_leaves_with_path(nn.unbox(boxed))
    for (path, leaf), sharding in zip(shapes, jax.tree.leaves(shardings), strict=True):
        for size, axis in zip(leaf.shape, sharding.spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                name = "/".join(path_parts(path))
                raise InputError(
                    f"mesh.{axis}={mesh.shape[axis]} must divide {size}, an axis of {name}"
                )
    return shardings


def shardings_of(tree: Any) -> Any:
    """The sharding of each leaf, an array or its shape."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def global_batch(rows: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The rows that this process has read, as its part of arrays split over `data` and `fsdp`."""
    sharding = NamedSharding(mesh, BATCH)
    make = jax.make_array_from_process_local_data
    return {name: make(sharding, np.asarray(array)) for name, array in rows.items()}


def feed(batches: Iterable[Any], put: Callable[[Any], Any]) -> Generator[Any, None, None]:
    """`put(batch)` of each in order, one ahead in a thread. Close this one before `batches`."""
    fed: Iterator[Any] = map(put, batches)
    end: Any = object()
    with ThreadPoolExecutor(1, "feed") as thread:
        ahead = thread.submit(next, fed, end)
        while (batch := ahead.result()) is not end:
            ahead = thread.submit(next, fed, end)
            yield batch


def share_of_rows(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """(i, n): `process` (None: this one) reads part i of n equal parts of each global batch.

    n is the number of processes, or fewer where `tensor` spreads the same rows over several.
    InputError if processes share some of their rows, but not all.
    """
    process = jax.process_index() if process is None else process
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    held: dict[int, set[int]] = {}
    for shard, devices in enumerate(mesh.devices.reshape(shards, -1)):
        for device in devices:
            held.setdefault(device.process_index, set()).add(shard)
    parts = sorted({tuple(sorted(part)) for part in held.values()})
    if sum(map(len, parts)) != shards or len(set(map(len, parts))) > 1:
        raise InputError(
            f"mesh.tensor={mesh.shape['tensor']} cuts across the {len(held)} processes: it must "
            "divide the devices of one, or be a multiple of them"
        )
    return parts.index(tuple(sorted(held[process]))), len(parts)


def round_up_rows(rows: int, mesh: Mesh) -> int:
    """The smallest number of rows, `rows` or more, that divides over the mesh."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-rows // shards) * shards


def path_parts(path) -> tuple[str, ...]:
    """The names along a key path of jax.tree_util."""
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
