"""Programs of gpu_kernels.py: how they are compiled, timed, and compared with the truth.

The time of a call is that of 21 in one program, each of which waits for the one before, over three
sets of random inputs. Times of kernels are medians over such calls, by CUPTI.
"""

import functools
import statistics
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments import timing
from experiments.kernels_gpu import gpu_check
from experiments.kernels_gpu.log import reason_of

ROOT = Path(__file__).parents[2]
FORWARD, GRADIENTS = "forward", "with gradients"
TURNS, SETS = 7, 3  # of the calls in a program
LARGEST_ERROR = gpu_check.LARGEST_ERROR["bfloat16"]
# How XLA compiles what is not timed.
UNTUNED = {"xla_gpu_autotune_level": "0", "xla_allow_excess_precision": False}


class Traced(threading.local):
    """Of the program that a thread traces: sizes that it forces on kernels, and their FLOP."""

    forced: dict[str, dict] = {}
    flops: dict[str, float] = {}


traced = Traced()


def watched(name: str, kernel: Callable, of_keys: slice) -> Callable:
    """`kernel`, which multiplies queries and keys once a chunk, and E with the arrays `of_keys`."""

    def run(sizes, *arrays):
        (N, T, D), S = arrays[0].shape, arrays[1].shape[1]
        width = getattr(sizes, "chunks", 1) * D + sum(x.shape[2] for x in arrays[of_keys])
        traced.flops[name] = 2.0 * N * T * S * width
        return kernel(sizes._replace(**traced.forced.get(name, {})), *arrays)

    return run


class Program(NamedTuple):
    """A function of random arrays, or that with its gradients; `truth` gives what it should."""

    name: str
    function: Callable
    shapes: list[jax.ShapeDtypeStruct]
    flops: float  # of the function
    run: str = FORWARD
    truth: Callable | None = None
    forced: dict[str, dict] = {}


class Comparison:
    """Programs, and cases of PyTorch, that take turns."""

    def __init__(self, smoke: bool, programs: list[Program], *others: Callable):
        self.turns, self.rounds = (1, 2) if smoke else (TURNS, 10)
        self.programs, self.others = programs, others

    def begin(self, pool: ThreadPoolExecutor) -> None:
        self.compiled = [pool.submit(compiled, program, self.turns) for program in self.programs]

    def __call__(self) -> dict:
        cases, wrong, left_out, calls = [], [], timing.LeftOut(), SETS * self.turns
        for program, future in zip(self.programs, self.compiled, strict=True):
            try:
                draw, chain, error, flops = future.result()
                sets = [draw(seed) for seed in range(SETS)]
                about = {"case": program.name, "calls_in_one": calls, "kernel_flops": flops}
                about["kernels"] = of_kernels(chain, sets, calls)
                if error is not None:
                    about["error"] = float(error(*sets[0]))
                    if not about["error"] <= LARGEST_ERROR:
                        wrong.append(f"{program.name}: differs by {about['error']:.1e}")
            except Exception as failure:  # any library may fail in its own way
                left_out.add(program.name, failure)
                continue
            flops = (3 if program.run == GRADIENTS else 1) * program.flops * calls
            cases.append(timing.Case(about, functools.partial(chain, sets), flops))
        for other in self.others:
            cases += timing.attempt(left_out, "PyTorch SDPA", other)
        found = timed(cases, self.rounds, left_out)
        for row in found["results"]:
            calls = row.pop("calls_in_one", 1)
            row |= {name: row[name] / calls for name in ("median_ms", "fastest_ms", "flops")}
            row["quartiles_ms"] = [ms / calls for ms in row["quartiles_ms"]]
        return found | {"wrong": wrong}


def timed(cases: list[timing.Case], rounds: int, left_out: timing.LeftOut) -> dict:
    rows = timing.measure(cases, rounds, left_out)
    return {"results": rows, "left_out": left_out.reasons, "clocks": clocks()}


def compiled(program: Program, turns: int):
    """How inputs are drawn, the calls `chained`, distance from the truth, FLOP of kernels."""
    traced.forced, traced.flops = program.forced, {}
    function, shapes, truth, error = program.function, program.shapes, program.truth, None
    if program.run == GRADIENTS:
        shapes = [*shapes, jax.eval_shape(function, *shapes)]
        function, truth = with_gradients(function), truth and with_gradients(truth)
    function, draw = jax.jit(function), jax.jit(functools.partial(drawn, shapes))
    chain = jax.jit(functools.partial(chained, function, turns)).lower([shapes] * SETS).compile()
    if truth is not None:
        error = jax.jit(lambda *given: apart(function(*given), truth(*given)))
        error = error.lower(*shapes).compile(UNTUNED)
    return draw.lower(0).compile(), chain, error, traced.flops


def with_gradients(function: Callable) -> Callable:
    def run(*given):
        *given, cotangent = given
        output, pull = jax.vjp(function, *given)
        return [x for x in (output, *pull(cotangent)) if x.dtype != jax.dtypes.float0]

    return run


def drawn(shapes, seed):
    """Normal numbers, or random bits."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    floats = (jnp.issubdtype(x.dtype, jnp.floating) for x in shapes)
    draws = (jax.random.normal if each else jax.random.bits for each in floats)
    return [d(key, x.shape, x.dtype) for d, key, x in zip(draws, keys, shapes, strict=True)]


def chained(function: Callable, turns: int, sets):
    """Calls of `function` on each of the sets, `turns` times, one number of a call in the next.

    XLA does not look through the barriers: it neither leaves out outputs that nobody reads, nor
    takes out of the loop, or computes once, what calls have in common.
    """

    def turn(_, carry):
        firsts, number = carry
        for i, (_, *others) in enumerate(sets):
            firsts[i] = firsts[i].at[(0,) * firsts[i].ndim].set(number.astype(firsts[i].dtype))
            given = jax.lax.optimization_barrier((firsts[i], *others))
            found = jax.lax.optimization_barrier(jax.tree.leaves(function(*given)))
            number = jnp.stack([x[(0,) * x.ndim].astype(jnp.float32) for x in found]).sum()
        return firsts, number

    start = [first for first, *_ in sets], jnp.zeros((), jnp.float32)
    return jax.lax.fori_loop(0, turns, turn, start)[1]


def apart(found, wanted):
    """The largest error of an output: root mean squares, as shares; the least count as larger."""
    found, wanted = ([x.astype(jnp.float32) for x in jax.tree.leaves(y)] for y in (found, wanted))
    sizes = jnp.stack([jnp.sqrt(jnp.square(z).mean()) for z in wanted])
    errors = [jnp.sqrt(jnp.square(x - z).mean()) for x, z in zip(found, wanted, strict=True)]
    least = jnp.maximum(LARGEST_ERROR * sizes.max(), jnp.finfo(jnp.float32).tiny)
    return (jnp.stack(errors) / jnp.maximum(sizes, least)).max()


def of_kernels(chain, sets, calls: int) -> list | str:
    """Kernels that each call launches, with the medians of their milliseconds."""
    if jax.default_backend() != "gpu":
        return "needs a GPU"
    from jax.experimental.mosaic.gpu import profiler

    times = defaultdict(list)
    try:
        for name, ms in profiler.measure(chain, aggregate=False)(sets)[1] or ():
            times[name].append(ms)
    except Exception as failure:  # the whole is timed without it
        return reason_of(failure)
    each = ((name, ms, len(ms) // calls) for name, ms in times.items())
    return [[name, statistics.median(ms[i::n])] for name, ms, n in each for i in range(n)]


def told(*command: str) -> str | None:
    """The last line that a program prints; None where it is not there or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip().rpartition("\n")[2]


def clocks() -> str | None:
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return told("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
