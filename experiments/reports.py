"""Reports of experiments: the header (device, versions, command, date), tables and JSON."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import flax
import jax

from experiments import pytorch
from experiments.timing import PEAK, TORCH_PEAK, LeftOut
from mhe_jax.analysis.ahead import describe_devices
from mhe_jax.config import InputError

ROOT = Path(__file__).parents[1]
PEERS = ("torch", "transformers")


# What the rows of one table share.
OF_ONE = ("part", "task", "length", "run", "search", "batch")


def tables(rows: list[dict]) -> list[list[dict]]:
    """Rows that were measured in turn, fastest first, as the programs print them."""
    apart: dict[tuple, list[dict]] = {}
    for row in rows:
        apart.setdefault(tuple(row.get(field) for field in OF_ONE), []).append(row)
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


def beside_peers(results: list[dict]) -> None:
    """Adds to each row its speed beside the fastest peer's in its table."""
    for rows in tables(results):
        fastest = next((row for row in rows if row["peer"]), None)
        for row in rows:
            row["fastest_peer"] = fastest and fastest["case"]
            row["speed"] = fastest and fastest["median_ms"] / row["median_ms"]


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
        "command": " ".join(["python", str(Path(file).relative_to(ROOT)), *given]),
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


def peak_line(peak: dict[str, Any]) -> str:
    """Both peaks, as the pages tell them."""
    line = f"peak {peak['flops_per_second'] / 1e9:,.0f} GFLOP/s"
    if torch := peak.get("torch_flops_per_second"):
        line += f", of PyTorch {torch / 1e9:,.0f}"
    return line


def table(columns: dict[str, Callable[[dict], str]], rows: list[dict]) -> str:
    """Markdown: a column for each function of a row."""
    return grid(list(columns), [[make(row) for make in columns.values()] for row in rows])


def grid(head: list[str], rows: list[list[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:]])


def rows_of(text: str) -> list[str]:
    """The rows of tables, their heads included."""
    return [line for line in text.splitlines() if line.startswith("|") and "---" not in line]


def shown(number: float | None, digits: int = 0) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


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


def ahead_of_time(parser, topology: str) -> Any:
    """The first device of a topology; one that there is not is a mistake of the call."""
    try:
        return describe_devices(topology)[0]
    except InputError as error:
        parser.error(str(error))


def header_ahead(file: str, arguments: list[str] | None, device: Any, shape: str, **libraries: str):
    """What was compiled, printed: the compilers of `libraries`, the command and when it was run."""
    versions = {"jax": jax.__version__, **libraries}
    about = {"device": device.device_kind, "shape": shape, **versions, **made_by(file, arguments)}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{about['device']}, ahead of time; {told}")
    print(f"`{about['command']}`, {about['date']}; {shape}", flush=True)
    return about


def finish(
    path: Path | None,
    about: dict[str, Any],
    columns: dict[str, Callable[[dict], str]],
    results: list[dict],
    left_out: LeftOut,
    *notes: str,
    **more: Any,
) -> int:
    """Prints the header, notes, tables and what was left out; writes the JSON; exit status 0."""
    print(*header_lines(about), *notes, sep="\n\n")
    for rows in tables(results):
        title = ", ".join(f"{name} {rows[0][name]}" for name in OF_ONE if name in rows[0])
        print("", *[f"### {title}\n"] * bool(title), table(columns, rows), sep="\n")
    print("", *left_out.lines(), sep="\n")
    save(path, {"header": about, **more, "results": results, "left_out": left_out.reasons})
    return 0


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
