"""Compiling ahead of time: whether the train step fits devices, also absent ones, and its cost.

Nothing is read but the config, and labels of your own examples; nothing is written or run. The step
is the one that training runs, over the same mesh, state and optimizer. The batch has the shape of
training, in translation that of the longest bucket. A step that does not fit is an answer, not an
error.
"""

import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mhe_jax import tasks
from mhe_jax.analysis.collectives import collectives_of
from mhe_jax.analysis.hlo import Program
from mhe_jax.analysis.topology import describe_devices, hbm_bytes
from mhe_jax.attention import Mask, choices, recording
from mhe_jax.config import Config, Target
from mhe_jax.config.rules import mesh_shape
from mhe_jax.data import examples
from mhe_jax.hashformers.hashes import BYTES
from mhe_jax.tasks.task import SIGNATURES
from mhe_jax.training import sharding, summary
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import TrainState, initializer_of
from mhe_jax.training.step import train_step_of

GIB = 2**30


def compile_ahead(config: Config, target: Target) -> dict[str, Any]:
    """Prints and returns the needs of the train step of `config` on `target`."""
    config = tasks.resolve(config)
    devices = describe_devices(target.topology, target.num_slices)
    answer = search_batch if target.search_batch else compile_step
    found = {"topology": target.topology, "num_slices": target.num_slices}
    found |= answer(config, devices)
    print("\n".join(described(found)), file=sys.stderr)
    return found


def compile_step(config: Config, devices: Sequence[Any]) -> dict[str, Any]:
    """One compilation: `fits`, `bytes_per_chip`, and if it fits, what the program says of itself.

    The `total` is what the compiler reserves: arguments, padded as they lie in memory, temporaries
    (activations, gradients, whatever is gathered) and the program. For a step that does not fit, it
    is what the compiler says it would need.
    """
    mesh = sharding.make_mesh(config, devices)
    task, length = tasks.of(config), config.data.sequence_length
    rows = task.rows_per_batch(config)
    state, lowered, made = lower(config, mesh)
    began = time.monotonic()
    compiled, total = None, 0
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        total = needed
    seconds = time.monotonic() - began
    program = compiled and Program(compiled.as_text())

    own = {
        "parameters": shard_bytes(state.params),
        "optimizer": shard_bytes(state.opt_state),
        "averaged_parameters": shard_bytes(state.ema_params),
    }
    if compiled is not None:
        memory = compiled.memory_analysis()
        arguments = memory.argument_size_in_bytes
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        own["batch_and_padding"] = arguments - sum(own.values())
        own["temporaries"] = memory.temp_size_in_bytes + outputs
        own["program"] = memory.generated_code_size_in_bytes
        total = sum(own.values())
    hbm = hbm_bytes(mesh.devices.flat[0].device_kind)
    flops = task.step_flops(config, rows)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    return {
        **summary.described(config, mesh, state.params),
        "attention": made,
        "mesh": dict(mesh.shape),
        "batch": {
            "rows": rows,
            "length": length,
            "rows_per_chip": rows // shards,
            "tokens": len(task.token_inputs) * rows * length,
        },
        "fits": compiled is not None and (hbm is None or total <= hbm),
        "bytes_per_chip": {**own, "total": total},
        "hbm_bytes": hbm,
        "collectives": program and collectives_of(program),
        "flops": flops,
        "flops_per_chip": flops / mesh.size,
        "estimated_cycles": program and program.cycles(),
        "loops_counted_once": program and len(program.unknown_loops),
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
    """A training batch without its numbers."""
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
    unit = math.lcm(data * fsdp * config.optimizer.accumulate_steps, task.row_multiple(config))
    tries: dict[int, dict[str, Any]] = {}
    most, too_many, units = 0, 0, 1
    while units and units not in tries:
        found = tries[units] = compile_step(task.with_rows(config, units * unit), devices)
        b, verdict = found["batch"], "fits" if found["fits"] else "does not fit"
        size = f"{found['bytes_per_chip']['total'] / GIB:.2f} GiB"
        print(f"{b['rows']} rows of {b['length']} tokens: {size}, {verdict}", file=sys.stderr)
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
    """Bytes of HBM that a program needs, from the compiler's error; None for another error.

    >>> needed_bytes("RESOURCE_EXHAUSTED: ... in memory space hbm. Used 2.50G of 1.50G hbm.")
    2684354560
    """
    if "RESOURCE_EXHAUSTED" not in message or not re.search(r"\bhbm\b", message, re.IGNORECASE):
        return None
    sizes = re.findall(r"([\d.]+)([KMGT])\b", message)
    number, unit = sizes[0] if sizes else ("0", "K")
    return int(float(number) * 2 ** (10 * (1 + "KMGT".index(unit))))


def layer_memory(
    module: nn.Module,
    shape: tuple[int, int, int],
    dtype: str,
    *,
    causal: bool = False,
    gradients: bool = False,
    mesh: Mesh | None = None,
) -> int:
    """Bytes that self-attention needs on x of `shape` [B, T, M], beside x and the parameters.

        bytes = temporaries + outputs, as the compiler lays them out

    of `module(x)`, or with `gradients` of its output and the gradients of x and all parameters.
    `mesh` is of one device, such as a TPU that is not here; without one it is the first there is.
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
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def described(found: dict[str, Any]) -> Iterator[str]:
    """The report for people, as lines."""
    b, hbm = found["batch"], found["hbm_bytes"]
    yield (
        f"{found['task']} ({summary.runs_as(found['attention'])}) on {found['topology']}: "
        f"{found['num_devices']} × {found['device']}; compiled in {found['compile_seconds']} s"
    )
    yield f"{b['rows']:,} rows of {b['length']:,} tokens, {b['rows_per_chip']:,} a chip"
    yield "on each chip:"
    for name, size in found["bytes_per_chip"].items():
        yield f"  {name.replace('_', ' '):24}{size / GIB:10.3f} GiB"
    there = f" in {hbm / GIB:.2f} GiB" if hbm else ""
    yield f"  {'fits' if found['fits'] else 'does not fit'}{there}"
    for kind, c in (found["collectives"] or {}).items():
        yield f"  {kind:24}{c['bytes'] / GIB:10.3f} GiB in {c['count']:,}"
    yield f"  FLOPs of a step {found['flops_per_chip']:.3g}"
    if found["estimated_cycles"] is not None:
        yield f"  estimated cycles {found['estimated_cycles']:,}, without kernels"
