"""The common part of the benchmarks: cases in turn, their summaries, tables and JSON.

Each case gets its turn once a round, so that whatever else the machine does hits all of them alike;
the order is drawn anew each round, so that none always finds the caches that the same other left.
"""

import argparse
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import flax
import jax
import jax.numpy as jnp

from benchmarks import pytorch
from mhe_jax.attention import KINDS, make_attention
from mhe_jax.attention.cost import parameters
from mhe_jax.config import Form

# Fields that a kind is run with beside its forms, from the number of heads: more variants of a kind
# are more entries of its list.
VARIANTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "gqa": lambda heads: [{"num_kv_heads": _divisor(heads, at_most=heads // 3)}],
    "mfa": lambda heads: [{}, {"reuse_keys": True}],
    "gta": lambda heads: [{"num_kv_heads": _divisor(heads, at_most=heads // 4)}],
}
PEERS = ("torch", "transformers")
PEAK, TORCH_PEAK = "peak", "peak of PyTorch"
PEAK_SIZE = {"cpu": 2048}
PEAK_SIZE_ELSEWHERE = 8192
# A sample is at least so long, so that neither the clock nor the wait for a GPU is part of it.
SAMPLE_SECONDS = 5e-3
# That compile at a time, before anything is timed.
THREADS = min(16, max(4, os.cpu_count() or 1))
# All that have a name.
FORMS = [form for form in typing.get_args(Form) if form != "auto"]
# The file of `take_turns`, while it is open.
_turns: list[IO] = []


class PlainParser(argparse.ArgumentParser):
    """A mistake is one line and exit status 2."""

    def __init__(self, doc: str | None):
        super().__init__(
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        self.exit(2, f"error: {' '.join(message.split())} (--help shows what there is)\n")


class Parser(PlainParser):
    """One thing to time."""

    def __init__(self, doc: str | None, forms: Iterable[str] = FORMS, timed: bool = True):
        super().__init__(doc)
        self.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
        self.add_argument("--forms", nargs="+", choices=typing.get_args(Form), default=forms)
        self.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        if timed:
            self.add_argument("--rounds", type=positive, default=10, help="calls of each case")
        self.add_argument("--out", type=Path, metavar="FILE.json", help="where the JSON goes")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def variants(
    kinds: Iterable[str], forms: Iterable[str], num_heads: int
) -> dict[str, dict[str, Any]]:
    """`name -> fields`, fields of `AttentionConfig`: every kind in those of `forms` that it has.

    'auto', which every kind has, is the form that the kind takes by itself, and has no name.
    """
    found = {}
    for kind in kinds:
        for extra in VARIANTS[kind](num_heads) if kind in VARIANTS else [{}]:
            known = getattr(KINDS[kind], "forms", ())
            for form in [f for f in forms if f in known or f == "auto"] if known else ["auto"]:
                named = {} if form == "auto" else {"form": form}
                told = [f"{name}={value}" for name, value in extra.items()]
                found[" ".join([kind, *named.values(), *told])] = {"kind": kind, **extra, **named}
    return found


def _divisor(number: int, at_most: int) -> int:
    return max(n for n in range(1, max(at_most, 1) + 1) if number % n == 0)


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


def made(makes: dict[str, Callable[[], Case]], left_out: LeftOut) -> list[Case]:
    """The cases that can be made: XLA compiles most of a program on one core."""
    with ThreadPoolExecutor(THREADS) as pool:
        tried = pool.map(lambda name: attempt(left_out, name, lambda: [makes[name]()]), makes)
        return [case for cases in tried for case in cases]


def measure(
    cases: list[Case], rounds: int, left_out: LeftOut, calls: int | None = None
) -> list[dict]:
    """Every case once a round; `about` with median and quartiles in milliseconds.

    A sample is the mean of `calls` calls that are queued one behind the other; None: for each case
    as many as take `SAMPLE_SECONDS`. A case that fails at its first call, as for want of memory, is
    left out.
    """
    with _alone():
        return _measure(cases, rounds, left_out, calls)


def take_turns(path: Path) -> None:
    """From now on none of the processes that do this with `path` measures while another works."""
    if not _turns:
        _turns.append(path.open("a"))
        fcntl.flock(_turns[0], fcntl.LOCK_SH)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    for file in _turns:
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        for file in _turns:
            fcntl.flock(file, fcntl.LOCK_SH)


def _measure(cases, rounds, left_out, calls) -> list[dict]:
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


def tables(rows: list[dict]) -> list[list[dict]]:
    """Rows that were measured in turn, fastest first, as the programs print them."""
    of_one = ("part", "task", "length", "run", "search", "batch")
    apart: dict[tuple, list[dict]] = {}
    for row in rows:
        apart.setdefault(tuple(row.get(field) for field in of_one), []).append(row)
    return [sorted(table, key=lambda row: row.get("median_ms", 0)) for table in apart.values()]


def split_peak(results: list[dict]) -> tuple[dict, list[dict]]:
    """The peak, as its fastest call, and each other result with its share `of_peak`."""
    peaks = {r["case"]: r for r in results if r["case"] in (PEAK, TORCH_PEAK)}
    for r in peaks.values():
        r["flops_per_second"] = r["flops"] / r["fastest_ms"] * 1e3
    peak = peaks[PEAK]
    if TORCH_PEAK in peaks:
        peak["torch_flops_per_second"] = peaks[TORCH_PEAK]["flops_per_second"]
    others = [r for r in results if r["case"] not in peaks]
    for r in others:
        r["of_peak"] = r["flops_per_second"] / peak["flops_per_second"]
    return peak, others


def header(file: str, dtype: str, arguments: list[str] | None) -> dict[str, Any]:
    """Where, with what and when the command in `file` was run."""
    import jaxlib

    device = jax.devices()[0]
    name = device.device_kind
    if device.platform == "cpu":
        name = f"{processor()}, {_cores()} cores"
    peers = {p: version_of(p) for p in PEERS if importlib.util.find_spec(p)}
    return {
        "device": name,
        "backend": device.platform,
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "flax": flax.__version__,
            "python": platform.python_version(),
            **peers,
        },
        # As train.py runs, where the machine has them: see docs/runs.md.
        "huge_pages": "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", ""),
        "dtype": dtype,
        **({"torch": pytorch.build(found[0])} if (found := pytorch.here()) else {}),
        **made_by(file, arguments),
    }


def made_by(file: str, arguments: list[str] | None) -> dict[str, str]:
    """The command in `file`, with what it was given, and when that was."""
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "command": " ".join(["python", f"benchmarks/{Path(file).name}", *given]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def version_of(package: str) -> str:
    """The version that is installed."""
    return importlib.metadata.version(package)


def header_lines(about: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    pages = "; huge pages" if about["huge_pages"] else ""
    torch = f"; PyTorch: {about['torch']}" if "torch" in about else ""
    return [
        f"{about['device']} ({about['backend']}); {versions}; {about['dtype']}{pages}{torch}",
        f"`{about['command']}`, {about['date']}",
    ]


def mha_note(kinds: Iterable[str], features: int, heads: int) -> list[str]:
    """The remark that a comparison with MHA needs, with numbers from the cost table."""
    mhe = [kind for kind in kinds if kind.startswith("mhe_")]
    if not mhe:
        return []
    mha, first = (make_attention(kind, num_heads=heads, use_bias=False) for kind in ("mha", mhe[0]))
    ratio = parameters(mha, features) / parameters(first, features)
    return [
        f"MHA, ours and any peer's, is another model than {', '.join(mhe)}, with {ratio:.1f} times "
        "the attention parameters: speed is compared here, not quality."
    ]


def table(columns: dict[str, Callable[[dict], str]], rows: list[dict]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    head = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    body = [f"| {' | '.join(make(row) for make in columns.values())} |" for row in rows]
    return "\n".join(head + body)


def milliseconds(row: dict) -> str:
    return _three_digits(row["median_ms"])


def quartiles(row: dict) -> str:
    return " to ".join(map(_three_digits, row["quartiles_ms"]))


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if number >= 1 else f"{number:.4f}"


def megabytes(row: dict) -> str:
    return "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:.1f}"


def save(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def processor() -> str:
    """The name of the CPU, with its family and model: rented ones of many speeds share a name."""
    path, found = Path("/proc/cpuinfo"), {}
    for line in path.read_text().splitlines() if path.exists() else ():
        field, _, value = line.partition(":")
        found.setdefault(field.strip(), value.strip())
    if "model name" not in found:
        return platform.processor() or platform.machine()
    parts = [f"{part} {found[part]}" for part in ("cpu family", "model") if part in found]
    return ", ".join([found["model name"], *parts])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_line(peak: dict[str, Any]) -> str:
    """Both peaks, as the pages tell them."""
    line = f"peak {peak['flops_per_second'] / 1e9:,.0f} GFLOP/s"
    if torch := peak.get("torch_flops_per_second"):
        line += f", of PyTorch {torch / 1e9:,.0f}"
    return line
