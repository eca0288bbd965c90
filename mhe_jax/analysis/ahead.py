"""Compiling ahead of time: whether the train step fits devices, also absent ones, and its cost.

TPUs are compiled for by libtpu, GPUs by the CUDA plug-in. Nothing is read but the config, and
labels of your own examples; nothing is written or run. The step, mesh, state and optimizer are
those of training, and so is the batch, in translation that of the longest bucket.
"""

import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from mhe_jax import tasks
from mhe_jax.analysis.hlo import Program, collectives_of
from mhe_jax.attention import choices, recording
from mhe_jax.config import Config, InputError, Target, not_installed
from mhe_jax.config.rules import mesh_shape
from mhe_jax.data import examples
from mhe_jax.hashformers import BYTES
from mhe_jax.tasks.task import SIGNATURES
from mhe_jax.training import meter, sharding
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import TrainState, initializer_of
from mhe_jax.training.step import train_step_of

GIB = 2**30
# GiB of a device that a program may fill: of TPUs as the compiler itself says of a program that is
# too big (a device of v4 and tpu7x is half a chip), of GPUs the 75 % that JAX takes.
HBM_GIB = {
    "TPU v4": 15.25,
    "TPU v5 lite": 15.75,
    "TPU v5": 95.74,
    "TPU v6 lite": 31.25,
    "TPU7x": 94.75,
    "NVIDIA H100 80GB HBM3": 59.36,
    "NVIDIA H200 141GB HBM3e": 105.75,
}
# libtpu reads its place in a pod here, and asks no metadata server.
TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-256",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
# Name, bytes of memory, and bytes per second to it; the rest, of compute capability 9.0, is shared.
GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 84_978_434_048, 3_352_320_000_000),
    "h200": ("NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800_000_000_000),
}
HOPPER = """
gpu_device_info {{
  device_memory_size: {1} memory_bandwidth: {2}
  cuda_compute_capability {{ major: 9 }} core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  l2_cache_size: 52428800 shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 threads_per_core_limit: 2048 threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{0}"
"""


def describe_devices(name: str, num_slices: int = 1) -> list[Any]:
    """What to compile for: v5e:16x16 are TPUs by their layout, h100:2x8 two hosts of 8 GPUs."""
    kind, _, layout = name.partition(":")
    gpus = kind in GPUS
    if not re.fullmatch(r"\w+:\d+x\d+" if gpus else r"\w+:\d+(x\d+)+", name):
        raise InputError(
            f"--topology is {name!r}: takes a kind of device and its layout, as v5e:16x16, or "
            "HOSTSxGPUS as h100:1x8"
        )
    packages = ("jax_cuda12_plugin", "jax_cuda13_plugin") if gpus else ("libtpu",)
    if not any(map(importlib.util.find_spec, packages)):
        raise not_installed(f"--topology {name} needs {packages[-1]}", "cuda" if gpus else "tpu")
    if gpus:
        platform, how = "cuda", {"topology": f"{num_slices}x{layout}"}
        how["target_config"] = HOPPER.format(*GPUS[kind])
    else:
        os.environ.update(TPU_ENVIRONMENT)
        platform, how = "tpu", {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(name, platform, **how).devices)
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"--topology {name}: {error}") from error


def compile_ahead(config: Config, target: Target) -> dict[str, Any]:
    config = tasks.resolve(config)
    devices = describe_devices(target.topology, target.num_slices)
    answer = search_batch if target.search_batch else compile_step
    found = {"topology": target.topology, "num_slices": target.num_slices}
    found |= answer(config, devices)
    print("\n".join(described(found)), file=sys.stderr)
    return found


def compile_step(config: Config, devices: Sequence[Any]) -> dict[str, Any]:
    """One compilation: `fits`, `bytes_per_chip`, and if it fits, what the program says of itself.

    The `total` is what the compiler reserves, padded arguments, temporaries and the program; or for
    a step that does not fit, what the compiler says it would need.
    """
    mesh = sharding.make_mesh(config, devices)
    task, length = tasks.of(config), config.data.sequence_length
    rows = task.rows_per_batch(config)
    state, lowered, made = lower(config, mesh)
    own = {
        "parameters": shard_bytes(state.params),
        "optimizer": shard_bytes(state.opt_state),
        "averaged_parameters": shard_bytes(state.ema_params),
    }
    began, program = time.monotonic(), None
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        total = needed_bytes(str(error))
        if total is None:
            raise
    else:
        memory = compiled.memory_analysis()
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        own["batch_and_padding"] = memory.argument_size_in_bytes - sum(own.values())
        own["temporaries"] = memory.temp_size_in_bytes + outputs
        own["program"] = memory.generated_code_size_in_bytes
        total, program = sum(own.values()), Program(compiled.as_text())
    seconds = time.monotonic() - began
    parts = mesh.size if config.mesh.length == "everywhere" else mesh.size // mesh.shape["tensor"]
    hbm = int(HBM_GIB.get(mesh.devices.flat[0].device_kind, 0) * GIB) or None
    flops = task.step_flops(config, rows)
    return {
        **meter.described(config, mesh, state.params),
        "attention": made,
        "mesh": dict(mesh.shape),
        "batch": {
            "rows": rows,
            "length": length,
            "rows_per_chip": rows / parts,
            "tokens": len(task.token_inputs) * rows * length,
        },
        "fits": program is not None and (hbm is None or total <= hbm),
        "bytes_per_chip": {**own, "total": total},
        "hbm_bytes": hbm,
        "collectives": program and collectives_of(program),
        "flops": flops,
        "flops_per_chip": flops / mesh.size,
        "estimated_cycles": program and program.cycles(),
        "compile_seconds": round(seconds, 1),
    }


def lower(config: Config, mesh: Mesh) -> tuple[TrainState, Any, dict[str, str]]:
    """The abstract training state, its step traced for the devices of `mesh`, and its `choices`."""
    model, optimizer = tasks.of(config).model(config.model), make_optimizer(config)
    _, state = initializer_of(config, model, optimizer, mesh)
    step: Any = train_step_of(config, model, optimizer, mesh, sharding.shardings_of(state))
    with recording():
        return state, step.lower(state, abstract_batch(config, mesh)), choices()


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    task = tasks.of(config)
    rows, row = task.rows_per_batch(config), task.empty_row(config)
    if config.data.packing:
        of = examples.SEGMENTS_OF
        row |= {of[name]: row[name] for name in of if name in row}
    if not config.model.has_table:
        row[SIGNATURES] = np.zeros((*row["tokens"].shape, BYTES), np.uint8)
    spread = NamedSharding(mesh, sharding.BATCH)
    return {
        name: jax.ShapeDtypeStruct((rows, *row[name].shape), row[name].dtype, sharding=spread)
        for name in task.read(row)
    }


def search_batch(config: Config, devices: Sequence[Any]) -> dict[str, Any]:
    """`compile_step` of the largest batch that fits, else of the smallest, with all `tries`.

    Batches are multiples of the smallest that the mesh divides, or of data.row_multiple in
    translation. The smallest is doubled until one does not fit; from there by halves.
    """
    data, fsdp, _ = mesh_shape(config.mesh, len(devices))
    task = tasks.of(config)
    multiple = config.data.row_multiple if config.facts.content == "pair" else 1
    unit = math.lcm(data * fsdp * config.optimizer.accumulate_steps, multiple)
    tries: dict[int, dict[str, Any]] = {}
    most, too_many, units = 0, 0, 1
    while units and units not in tries:
        found = tries[units] = compile_step(task.with_rows(config, units * unit), devices)
        size = f"{found['bytes_per_chip']['total'] / GIB:.2f} GiB"
        verdict = "fits" if found["fits"] else "does not fit"
        print(f"{found['batch']['rows']} rows: {size}, {verdict}", file=sys.stderr)
        most, too_many = (units, too_many) if found["fits"] else (most, units)
        units = (most + too_many) // 2 if too_many else 2 * most
    told = [
        {"rows": t["batch"]["rows"], "fits": t["fits"], "total": t["bytes_per_chip"]["total"]}
        for t in tries.values()
    ]
    return {**tries[max(most, 1)], "tries": told}


def shard_bytes(tree: Any) -> int:
    """Bytes that one device holds of the arrays of a tree, without padding."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def needed_bytes(message: str) -> int | None:
    """Bytes of HBM that a program needs, from the compiler's error; None for another error."""
    if "RESOURCE_EXHAUSTED" not in message or not re.search(r"\bhbm\b", message, re.IGNORECASE):
        return None
    sizes = re.findall(r"([\d.]+)([KMGT])\b", message)
    number, unit = sizes[0] if sizes else ("0", "K")
    return int(float(number) * 2 ** (10 * (1 + "KMGT".index(unit))))


def described(found: dict[str, Any]) -> Iterator[str]:
    batch, hbm, devices = found["batch"], found["hbm_bytes"], found["num_devices"]
    rows = batch["rows_per_chip"]
    yield f"{found['task']} ({meter.in_words(found['attention'])}) on {found['topology']}"
    yield f"{devices} × {found['device']}; compiled in {found['compile_seconds']} s"
    yield f"{batch['rows']:,} rows of {batch['length']:,} tokens, {rows:,g} a chip"
    fits = "fits" if found["fits"] else "does not fit"
    yield f"{fits} in {hbm / GIB:.2f} GiB a chip:" if hbm else f"{fits}; on each chip:"
    for name, size in found["bytes_per_chip"].items():
        yield f"  {name.replace('_', ' '):24}{size / GIB:10.3f} GiB"
    for kind, sent in (found["collectives"] or {}).items():
        yield f"  {kind:24}{sent['bytes'] / GIB:10.3f} GiB in {sent['count']:,}"
    yield f"  FLOPs of a step {found['flops_per_chip']:.3g}"
    if found["estimated_cycles"] is not None:
        yield f"  estimated cycles {found['estimated_cycles']:,}, without kernels"
