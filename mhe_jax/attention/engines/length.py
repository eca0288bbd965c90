"""Rows that a mesh splits along their length: each of P devices has its queries, and all keys.

Keys, values and key biases are gathered. A row has 2P parts, and device i attends for the queries
of parts i and 2P - 1 - i, so that under a causal mask all devices have as many scores to compute,
those of 2P + 1 parts. The queries travel there, and outputs back.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.mask import Mask


def exchanged(run: Callable, axis: str, devices: int) -> Callable:
    """`run(query, key, value, key_bias, seen)` inside `jax.shard_map`: of its two parts, all keys.

    The even part comes first.
    """

    def local(query, key, value, key_bias, seen):
        gather = functools.partial(jax.lax.all_gather, axis_name=axis, axis=1, tiled=True)
        memory = jax.tree.map(gather, (key, value, key_bias))
        output = run(_exchange(query, axis, devices), *memory, seen)
        return jax.tree.map(lambda x: _exchange(x, axis, devices, back=True), output)

    return local


def part_by_part(run: Callable, axis: str, devices: int, skips: bool = False) -> Callable:
    """`exchanged`, with a call of `run` for each part, which has a `Seen` of its own.

    Args:
      skips: `run` leaves out keys past `Mask.lengths` that are known on the device alone. Else
        there is a program for each device, with the keys that its queries may see, and the gradient
        computes the forward pass again.
    """

    def on(device, query, key, value, key_bias, seen):
        size, keys = query.shape[1] // 2, key.shape[1]
        before, after = seen.mask.static_bounds()
        outputs = []
        for part, own in zip(parts_of(device, devices), jnp.split(query, 2, 1), strict=True):
            start, first, stop = part * size, 0, keys
            if not skips and after is not None:
                stop = min(start + size + after, keys)
            if not skips and before is not None:
                first = min(max(start - before, 0), stop - 1)
            seen_here = seen.block(start, size, stop, first)
            if skips and after is not None:
                mask = seen_here.mask & Mask.lengths(start + size + after)
                seen_here = seen_here._replace(mask=mask)
            memory = (x if x is None else x[:, first:stop] for x in (key, value, key_bias))
            # One after the other, as each needs much memory; in the gradient, too.
            own, outputs = jax.lax.optimization_barrier((own, outputs))
            outputs.append(run(own, *memory, seen_here))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *outputs)

    def on_each(function, *call):
        programs = [functools.partial(function, device) for device in range(devices)]
        return jax.lax.switch(jax.lax.axis_index(axis), programs, *call)

    # By hand: JAX would keep for the gradient what the program of any device needs.
    @jax.custom_vjp
    def output(*call):
        return on_each(on, *call)

    def forward(*call):
        return output(*call), call

    def backward(call, cotangent):
        def gradients(device, seen, cotangent, *arrays):
            return jax.vjp(lambda q, k, v, b: on(device, q, k, v, b, seen), *arrays)[1](cotangent)

        *arrays, seen = call
        return *on_each(gradients, seen, cotangent, *arrays), None

    output.defvjp(forward, backward)
    if skips:
        return exchanged(lambda *call: on(jax.lax.axis_index(axis), *call), axis, devices)
    return exchanged(output, axis, devices)


def parts_of(device, devices: int) -> tuple[Any, Any]:
    """The even and the odd part of a device, of 2P.

    >>> [parts_of(device, 3) for device in range(3)]
    [(0, 5), (4, 1), (2, 3)]
    """
    last = 2 * devices - 1
    even = device + device % 2 * (last - 2 * device)
    return even, last - even


def positions_of(devices: int, queries: int) -> np.ndarray:
    """In the row, of the queries of each device [P, T / P]."""
    size = queries // 2
    parts = np.array([parts_of(device, devices) for device in range(devices)])
    return (parts[..., None] * size + np.arange(size)).reshape(devices, -1)


def _exchange(x, axis: str, devices: int, back: bool = False):
    """x [B, 2n, ..] of devices in the order of a row, as the parts of each device; or `back`."""
    halves = []
    for odd, half in enumerate(jnp.split(x, 2, 1)):
        # Part 2i + odd lies on device i.
        ways = [(i, min(2 * i + odd, 2 * (devices - i) - 1 - odd)) for i in range(devices)]
        ways = [(there, here) for here, there in ways] if back else ways
        halves.append(jax.lax.ppermute(half, axis, ways))
    return jnp.concatenate(halves, 1)
