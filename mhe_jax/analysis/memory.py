"""Memory of the attention calculation: what one layer needs beside its inputs and parameters.

    bytes = temporaries + outputs, as the compiler lays them out

of `attention(x)`, x [B, T, M], forward; or of its output with the gradients of x and all
parameters. Nothing is computed: the layer is compiled for the device at hand, or for one that is
not there.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mhe_jax.attention import Mask
from mhe_jax.config import InputError


def layer_memory(
    module: nn.Module,
    shape: tuple[int, int, int],
    dtype: str,
    *,
    causal: bool = False,
    gradients: bool = False,
    mesh: Any = None,
) -> int:
    """Bytes of temporaries and outputs of `module` on x of `shape` [B, T, M].

    Args:
      module: self-attention, with the call of `nn.MultiHeadDotProductAttention`.
      shape: of the input.
      dtype: of the input.
      causal: under a causal mask.
      gradients: of x and all parameters too.
      mesh: a mesh of one device to compile for, such as one of a TPU that is not here; None is the
        first device there is.

    Raises:
      ValueError: the compiler does not say.
    """
    x = jax.ShapeDtypeStruct(shape, dtype)
    params = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
    if mesh is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        params, x = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), (params, x)
        )
    mask = Mask.causal() if causal else Mask()

    def apply(params, x) -> Any:
        return module.apply(params, x, mask=mask)

    def with_gradients(params, x):
        output, pull = jax.vjp(apply, params, x)
        return output, pull(jnp.ones_like(output))

    compiled = jax.jit(with_gradients if gradients else apply).lower(params, x).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("the compiler does not say how much memory it takes")
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


# What a container may use: of control groups of version 2, and of version 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_memory() -> int:
    """Bytes of memory: the machine's, or a container's limit where that is lower."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file; "max"
            found.append(int(path.read_text()))
    return min(found)


def check_fits(compiled: Any, mesh: Any, rows: int, length: int) -> None:
    """Raises InputError where a program needs more memory than the machine has.

    Linux promises a CPU any memory, and ends the process when it is used; a GPU or TPU refuses it
    by itself. A long row needs much: attention's weights grow with the square of its tokens.
    """
    analysis = compiled.memory_analysis()
    if mesh.devices.flat[0].platform != "cpu" or analysis is None:
        return
    needed = (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    there = machine_memory()
    if needed > there:
        raise InputError(
            f"{rows} rows of {length:,} tokens need {needed / 1e9:,.1f} GB of memory, the machine "
            f"has {there / 1e9:,.1f}: takes shorter lines, or a smaller --batch_size or --beam_size"
        )
