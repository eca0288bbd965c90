"""Compiled searches: a program for each shape, and whether it fits into memory."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mhe_jax.config import InputError
from mhe_jax.training.sharding import BATCH, replicated, use_mesh

# What a container may use: of control groups of version 2, and of version 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def padded_length(longest: int, least: int, most: int) -> int:
    """The power of two that holds `longest`, from `least` to `most`: few shapes are compiled.

    >>> padded_length(3, 8, 20), padded_length(9, 8, 20), padded_length(17, 8, 20)
    (8, 16, 20)
    """
    return min(max(least, 1 << (longest - 1).bit_length()), most)


class Programs:
    """`search(params, tokens [rows, length], *numbers)`, compiled once for each rows and length.

    There are `count` arrays of `numbers` [rows]. `seconds` is the time that compiling took.
    """

    def __init__(self, search: Callable[..., Any], params: Any, mesh: Mesh, count: int):
        self._search, self._params, self._mesh, self._count = search, params, mesh, count
        self._compiled: dict[tuple[int, int], Any] = {}
        self.seconds = 0.0

    def __call__(self, rows: int, length: int) -> Any:
        """The program of this shape.

        Raises:
          InputError: it needs more memory than the machine has.
        """
        if (rows, length) not in self._compiled:
            begin = time.perf_counter()
            whole = NamedSharding(self._mesh, BATCH)
            numbers = jax.ShapeDtypeStruct((rows,), np.int32, sharding=whole)
            tokens = jax.ShapeDtypeStruct((rows, length), np.int32, sharding=whole)
            with use_mesh(self._mesh):
                jitted = jax.jit(self._search, out_shardings=replicated(self._mesh))
                compiled = jitted.lower(self._params, tokens, *[numbers] * self._count).compile()
            check_fits(compiled, self._mesh, rows, length)
            self._compiled[rows, length] = compiled
            self.seconds += time.perf_counter() - begin
        return self._compiled[rows, length]


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
