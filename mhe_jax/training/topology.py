"""Devices that need not be there, to compile for."""

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from mhe_jax.config import InputError
from mhe_jax.fields import did_you_mean, nearest

# Slices that can be had, to name near ones; libtpu knows more.
KNOWN = (
    *("v4:2x2x1", "v4:4x4x4", "v4:8x8x8"),
    *("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16"),
    *("v5p:2x2x1", "v5p:2x2x2", "v5p:4x4x4", "v5p:8x8x8", "v5p:16x16x24"),
    *("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16", "v6e:16x16"),
    *("tpu7x:2x2x1", "tpu7x:4x4x4"),
)
# What a program may fill of a device's HBM, in GiB, as the compiler itself says where one is too
# big. A device of v4 and tpu7x is half a chip here.
HBM_GIB = {
    "TPU v4": 15.25,
    "TPU v5 lite": 15.75,
    "TPU v5": 95.74,
    "TPU v6 lite": 31.25,
    "TPU7x": 94.75,
}
# libtpu asks nobody else where it is.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-256",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def describe_devices(name: str, num_slices: int = 1) -> list[Any]:
    """The devices of `num_slices` slices of TPUs called `name`, such as v5e:16x16.

    They can be compiled for and nothing else.

    Raises:
      InputError: no such topology, or libtpu, which knows them all, is not installed.
    """
    if not re.fullmatch(r"\w+:\d+(x\d+)+", name):
        raise InputError(
            f"--topology is {name!r}: takes a TPU and its layout, as v5e:16x16{_near(name)}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(f"--topology {name} needs libtpu: pip install 'mhe_jax[tpu]'")
    os.environ.update(ENVIRONMENT)
    slices = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(name, "tpu", **slices).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise InputError(f"--topology {name}: {reason}{_near(name)}") from error


def hbm_bytes(device_kind: str) -> int | None:
    """What a program may fill of the memory of a device; None where that is not known."""
    return int(HBM_GIB[device_kind] * 2**30) if device_kind in HBM_GIB else None


def _near(name: str) -> str:
    return did_you_mean(nearest(name, [known for known in KNOWN if known != name]))
