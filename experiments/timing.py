"""Cases timed in turn, and their summaries.

Each case gets its turn once a round, so that whatever else the machine does hits all of them alike;
the order is drawn anew each round, so that none always finds the caches that the same other left.
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from experiments import pytorch

PEAK, TORCH_PEAK = "peak", "peak of PyTorch"
PEAK_SIZE = {"cpu": 2048}
PEAK_SIZE_ELSEWHERE = 8192
# A sample is at least so long, so that neither the clock nor the wait for a GPU is part of it.
SAMPLE_SECONDS = 5e-3
# That compile at a time, before anything is timed.
THREADS = min(16, max(4, os.cpu_count() or 1))


@dataclass
class Case:
    """A call to time. `about` says in the JSON what it is."""

    about: dict[str, Any]
    call: Callable[[], Any]
    flops: float = 0.0
    memory: int | None = None


class LeftOut:
    """Cases that could not be measured, and why."""

    def __init__(self):
        self.reasons: dict[str, list[str]] = {}

    def add(self, name: str, reason: Exception | str) -> None:
        if isinstance(reason, Exception) and not isinstance(reason, ValueError | ImportError):
            reason = f"{type(reason).__name__}: {reason}"
        names = self.reasons.setdefault(" ".join(str(reason).split())[:200], [])
        if name not in names:
            names.append(name)

    def lines(self) -> list[str]:
        return [f"left out: {', '.join(names)}: {why}" for why, names in self.reasons.items()]


def attempt(left_out: LeftOut, name: str, make: Callable[[], list[Case]]) -> list[Case]:
    """The cases that `make` gives, or a line that says why there are none."""
    try:
        return make()
    except Exception as error:  # a kind may refuse, a library or the device's memory fail
        left_out.add(name, error)
        return []


def made(makes: dict[str, Callable[[], list[Case]]], left_out: LeftOut) -> list[Case]:
    """The cases that can be made: XLA compiles most of a program on one core."""
    with ThreadPoolExecutor(THREADS) as pool:
        tried = pool.map(lambda name: attempt(left_out, name, makes[name]), makes)
        return [case for cases in tried for case in cases]


def measure(
    cases: list[Case], rounds: int, left_out: LeftOut, calls: int | None = None
) -> list[dict]:
    """Every case once a round; `about` with median and quartiles in milliseconds.

    A sample is the mean of `calls` calls that are queued one behind the other; None: for each case
    as many as take `SAMPLE_SECONDS`. A case that fails at its first call, as for want of memory, is
    left out.
    """
    ready = []
    for case in cases:
        try:
            jax.block_until_ready(case.call())
            ready.append(case)
        except Exception as error:  # any library may fail in its own way
            left_out.add(str(case.about.get("case")), error)
    seconds: list[list[float]] = [[] for _ in ready]
    counts = [calls or enough_calls(case) for case in ready]
    turns = list(zip(ready, counts, seconds, strict=True))
    order = random.Random(0)
    for _ in range(rounds):
        for case, count, samples in order.sample(turns, len(turns)):
            samples.append(sample(case, count) / count)
    return [{**summary(case, samples), "calls": count} for case, count, samples in turns]


def sample(case: Case, calls: int) -> float:
    """The seconds of `calls` calls that are queued one behind the other."""
    begin = time.perf_counter()
    result = None
    for _ in range(calls):
        result = case.call()
    jax.block_until_ready(result)
    return time.perf_counter() - begin


def enough_calls(case: Case) -> int:
    """A power of 2: so many calls that they take `SAMPLE_SECONDS`; they also warm up."""
    calls = 1
    while sample(case, calls) < SAMPLE_SECONDS and calls < 1024:
        calls *= 2
    return calls


def summary(case: Case, seconds: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    low, _, high = quantiles(seconds)
    return {
        **case.about,
        "median_ms": 1e3 * median,
        "quartiles_ms": [1e3 * low, 1e3 * high],
        "fastest_ms": 1e3 * min(seconds),
        "rounds": len(seconds),
        "flops": case.flops,
        "flops_per_second": case.flops / median,
        "memory_bytes": case.memory,
    }


def quantiles(numbers: list[float]) -> list[float]:
    """The quartiles; of one number it is three times that."""
    many = numbers if len(numbers) > 1 else numbers * 2
    return statistics.quantiles(many, n=4, method="inclusive")


def memory_of(compiled) -> int | None:
    """Bytes of temporaries and outputs, as the compiler counts them."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def peak_cases(dtype: str) -> list[Case]:
    """A big matrix product: what the device can do in this dtype, by XLA and by PyTorch."""
    n = PEAK_SIZE.get(jax.default_backend(), PEAK_SIZE_ELSEWHERE)
    # Drawn: a GPU multiplies equal numbers faster, as they take less power.
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    compiled = jax.jit(jnp.matmul).lower(a, a).compile()
    flops = 2.0 * n**3
    cases = [Case({"case": PEAK, "size": n}, lambda: compiled(a, a), flops)]
    if found := pytorch.here():
        torch, device = found
        b = torch.randn(n, n, dtype=getattr(torch, dtype), device=device)
        call = lambda: pytorch.Result(torch, b @ b)  # noqa: E731
        cases.append(Case({"case": TORCH_PEAK, "size": n}, call, flops))
    return cases


def empty_case() -> Case:
    """A call that computes nothing: what no call of JAX can be faster than."""
    x = jnp.zeros(())
    compiled = jax.jit(jnp.negative).lower(x).compile()
    return Case({"case": "empty"}, lambda: compiled(x))
