"""Devices to compile for, which need not be there: TPUs by libtpu, GPUs by the CUDA plug-in."""

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from mhe_jax.config import InputError, not_installed

# The memory of a device that a program may fill, in GiB, as the compiler itself says of a program
# that is too big. A device of v4 and tpu7x is half a chip here.
HBM_GIB = {
    "TPU v4": 15.25,
    "TPU v5 lite": 15.75,
    "TPU v5": 95.74,
    "TPU v6 lite": 31.25,
    "TPU7x": 94.75,
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
  device_memory_size: {memory} memory_bandwidth: {bandwidth}
  cuda_compute_capability {{ major: 9 }} core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  l2_cache_size: 52428800 shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 threads_per_core_limit: 2048 threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def describe_devices(name: str, num_slices: int = 1) -> list[Any]:
    """The devices of `num_slices` slices called `name`.

    v5e:16x16 names TPUs by the layout of their chips, h100:2x8 two hosts of eight GPUs. Programs
    can be compiled for them, and nothing else.
    """
    if not re.fullmatch(r"\w+:\d+(x\d+)+", name):
        raise InputError(
            f"--topology is {name!r}: takes a kind of device and its layout, as v5e:16x16 or "
            "h100:1x8"
        )
    kind, _, layout = name.partition(":")
    try:
        if kind in GPUS:
            return _gpus(name, kind, f"{num_slices}x{layout}")
        return _tpus(name, {"num_slices": num_slices} if num_slices > 1 else {})
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise InputError(f"--topology {name}: {reason}") from error


def _tpus(name: str, slices: dict[str, int]) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise not_installed(f"--topology {name} needs libtpu", "tpu")
    os.environ.update(TPU_ENVIRONMENT)
    return list(topologies.get_topology_desc(name, "tpu", **slices).devices)


def _gpus(name: str, kind: str, layout: str) -> list[Any]:
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise not_installed(f"--topology {name} needs the CUDA plug-in", "cuda")
    if layout.count("x") != 2:
        raise InputError(f"--topology {name}: takes HOSTSxGPUS, the GPUs of each host")
    told = dict(zip(("name", "memory", "bandwidth"), GPUS[kind], strict=True))
    described = topologies.get_topology_desc(
        name, "cuda", topology=layout, target_config=HOPPER.format(**told)
    )
    return list(described.devices)


def hbm_bytes(device_kind: str) -> int | None:
    """Bytes of a device's memory that a program may fill; None where that is not known.

    For a GPU it is the share that JAX takes: 75 %, or XLA_PYTHON_CLIENT_MEM_FRACTION if it is set.
    """
    for gpu, memory, _ in GPUS.values():
        if gpu == device_kind:
            return int(float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")) * memory)
    return int(HBM_GIB[device_kind] * 2**30) if device_kind in HBM_GIB else None
