"""What decides about the kernels for Hopper: one command, for a card that is at hand for minutes.

    python experiments/kernels_gpu/gpu_kernels.py --out kernels    # on a Hopper GPU
    python experiments/kernels_gpu/gpu_kernels.py --out smoke --smoke

The first takes nine minutes at most, the second runs all steps on a CPU, with kernels emulated.
Steps, in the order in which they decide, each a process of its own under `timeout`, since a kernel
that deadlocks never returns:

    device       rates of a product and of copies
    peers        attention of all heads, and of one key head, by cuDNN; by PyTorch
    probe        cuDNN with a few wide heads that repeat one query and key: a way without kernels?
    right        the engine beside float64: masks, dropout, sizes of blocks and clusters
    forward      the engine by block of keys and slots, beside its peers
    conditional  the same with XLA's conditionals in CUDA graphs
    backward     with gradients, by tile and cluster; `mva-narrow`; dropout; the last product
    random       1,000 calls of random shapes and masks beside the engine `xla`
    decode, bert a translation model; train steps of BERT-base
    ncu          both kernels by Nsight Compute, where that is installed

A step (gpu_cases.py) compiles all it has in threads, then measures alone (gpu_programs.py); what is
compared takes turns. Each result is a line of kernels.jsonl, and another call on the same device
goes on from there. A case in which a step hung or died is a line that says so; the step goes on
without it, but not more than once. The table at the end has the bars. Exit status 1: something is
wrong, hung or failed, and is named.
"""

import argparse
import importlib.util
import itertools
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "attention")]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room on a GPU
# What reads text and checkpoints, of which there are none here: a machine with a GPU may lack it.
for each in ("google_crc32c", "grain", "sacrebleu", "sentencepiece"):
    if importlib.util.find_spec(each) is None:
        sys.modules[each] = types.ModuleType(each)

import emulated  # noqa: E402  # pyright: ignore[reportMissingImports]  # of the tests
import jax  # noqa: E402

from experiments import command_line, reports, timing  # noqa: E402
from experiments.kernels_gpu import gpu_cases  # noqa: E402
from experiments.kernels_gpu.gpu_programs import (  # noqa: E402
    FORWARD,
    GRADIENTS,
    clocks,
    told,
    watched,
)
from experiments.kernels_gpu.log import Cases, Log, go_on  # noqa: E402
from mhe_jax.attention.engines.shared import (  # noqa: E402
    hopper_backward,
    hopper_forward,
    mosaic,
)
from mhe_jax.cli.process import ask_for_huge_pages  # noqa: E402

CUT = "cut off: no time was left"
# How XLA compiles a smoke run.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class Step(NamedTuple):
    seconds: int  # at most
    cases: Callable[[bool], Cases]  # of whether it is a smoke run
    flags: str = ""  # of XLA


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("step", nargs="?", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--minutes", type=float, default=9.0, help="that all steps may take")
    parser.add_argument("--smoke", action="store_true", help="small sizes, on any device")
    args = parser.parse_args(arguments)
    if jax.default_backend() != "gpu" and not args.smoke:
        parser.error(f"needs an NVIDIA GPU, this is {jax.default_backend()}; --smoke runs anywhere")
    about = reports.header(__file__, "bfloat16", arguments)
    about |= {"smoke": args.smoke, "commit": told("git", "rev-parse", "HEAD")}
    log = Log(args.out / "kernels.jsonl", about)
    if log.differs(about):
        parser.error(f"{log.path} was measured elsewhere: give another --out")
    if args.step:
        run_step(args.step, log, args.smoke)
        return 0
    end = time.monotonic() + 60 * args.minutes
    for name in (*STEPS, *STEPS):
        log = supervised(name, log, args, end)
    done, failed = log.done(), log.failed()
    reports.save(args.out / "kernels.json", {"header": log.header, "results": done})
    left = [name for name in STEPS if {"ended": name, "how": "done"} not in log.rows]
    print("\n\n".join([*reports.header_lines(log.header), *tables(done, args.smoke)]))
    told_left = f"{len(done)} cases are done; steps left: {', '.join(left) or 'none'}"
    print("", told_left, *failed, sep="\n")
    return int(bool(failed))


def supervised(name: str, log: Log, args, end: float) -> Log:
    """Runs a step that is not done nor was tried twice, if there is time; the log after it."""
    tries = sum(row.get("step") == name for row in log.rows)
    tries -= log.rows.count({"ended": name, "how": CUT})
    most, left = STEPS[name].seconds * (3 if args.smoke else 1), int(end - time.monotonic())
    if {"ended": name, "how": "done"} in log.rows or tries > 1 or left < min(most, 20):
        return log
    log.append({"step": name, "clocks": clocks()})
    flags = QUICK if args.smoke else ""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(args.out.absolute() / "cache"),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {STEPS[name].flags} {flags}",
    }
    command = "timeout", "-k", "5", str(min(most, left)), *child(name, args)
    status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
    how = "done" if status == 0 else f"died with status {status}"
    if status in (124, 137):  # the second after it did not heed the first
        how = f"hung, or was not done in {most} s" if left >= most else CUT
    log = Log(log.path, log.header)
    if how not in ("done", CUT):  # in no case where none is begun, as while it compiles
        begun = [row["begun"] for row in log.rows if row.get("begun", "").startswith(f"{name}: ")]
        open_case = begun and begun[-1] not in {row["case"] for row in log.done()}
        case = begun[-1] if open_case else name
        log.append({"case": case, "seconds": 0.0, "wrong": [how]})
    log.append({"ended": name, "how": how})
    print(f"{name}: {how}", file=sys.stderr, flush=True)
    return log


def child(name: str, args) -> list[str]:
    """The command of a step's own process."""
    return [sys.executable, __file__, name, "--out", str(args.out), *["--smoke"] * args.smoke]


def run_step(name: str, log: Log, smoke: bool) -> None:
    """The cases of a step that are not done: all are compiled, then each is measured."""
    forward, backward = hopper_forward.forward, hopper_backward.products
    if smoke:
        forward, backward, mosaic.refusal = emulated.forward, emulated.products, lambda *call: None
    hopper_forward.forward = watched("forward", forward, slice(2, 4))
    hopper_backward.products = watched("backward", backward, slice(3, 4))
    done = {row["case"] for row in log.done()}
    cases = {f"{name}: {case}": run for case, run in STEPS[name].cases(smoke).items()}
    cases = {case: run for case, run in cases.items() if case not in done}
    with ThreadPoolExecutor(timing.THREADS) as pool:
        for run in cases.values():
            getattr(run, "begin", lambda pool: None)(pool)
    go_on(cases, log)


def tables(done: list[dict], smoke: bool) -> list[str]:
    """All that was timed; what was not, and why; the bars."""
    rows = {row["case"]: row.get("content", row) for row in done}
    columns = {
        "case": lambda r: r["of"],
        "median ms": reports.milliseconds,
        "quartiles": reports.quartiles,
        "TFLOP/s": lambda r: f"{r['flops_per_second'] / 1e12:,.0f}",
        "kernels of mosaic": lambda r: "; ".join(own_kernels(r)) or "-",
        "differs by": lambda r: f"{r['error']:.1e}" if "error" in r else "-",
    }
    timed, lines = [], []
    for case, row in rows.items():
        timed += [r | {"of": f"{case}: {r['case']}"} for r in row.get("results", ())]
        left_out = row.get("left_out", {}).items()
        lines += [f"left out: {case}: {', '.join(names)}: {why}" for why, names in left_out]
        lines += row.get("lines", ())
    told: list = [{"bar": bar, "measured": found} for bar, found in bars(rows, smoke)]
    heads = {"bar": lambda r: r["bar"], "measured": lambda r: r["measured"] or "not measured"}
    return [reports.table(columns, timed), *lines, reports.table(heads, told)]


def own_kernels(row: dict) -> list[str]:
    kernels, flops = row.get("kernels", ""), row.get("kernel_flops", {})
    own = [ms for name, ms in kernels if "mosaic" in name] if isinstance(kernels, list) else []
    pairs = zip(flops.items(), own, strict=False)
    return [f"{name} {ms:.4f} ms, {n / ms / 1e9:,.0f} TFLOP/s" for (name, n), ms in pairs]


def bars(rows: dict[str, dict], smoke: bool) -> list[tuple[str, str]]:
    """What decides, and what was found, or nothing."""

    def results(case):
        return {r["case"]: r for r in rows.get(case, {}).get("results", ())}

    def times_faster(case, ours, *others):
        ms = {name: r["median_ms"] for name, r in results(case).items()}
        best = min((ms[name] for name in others if name in ms), default=0.0)
        if not best or ours not in ms:
            return ""
        return f"{best / ms[ours]:.2f}: {ms[ours]:.3f} ms to {best:.3f}"

    def calls(step):
        found = [row for case, row in rows.items() if case.startswith(f"{step}: ")]
        runs, bad = sum(row.get("runs", 1) for row in found), sum(bool(r["wrong"]) for r in found)
        return f"{runs:,} calls, {bad} of {len(found)} cases wrong" if found else ""

    first, second, *_ = every = gpu_cases.cores(smoke)
    found = [(f"{step}, calls", calls(step)) for step in ("right", "right, cluster of 1", "random")]
    for case, run in itertools.product(gpu_cases.probe(smoke), (FORWARD, GRADIENTS)):
        r = results(f"probe: {case}").get(run)
        told = r and f"{r['median_ms']:.3f} ms, differs by {r['error']:.1e}"
        found.append((f"cuDNN, {case}, {run}", told or ""))
    for step, core in itertools.product(("forward", "conditional", "backward"), (first, second)):
        kernels = own_kernels(results(f"{step}: {core.name}").get("mosaic", {}))
        found.append((f"{step}, {core.name}, kernels", "; ".join(kernels)))
    for step, core in itertools.product(("forward", "backward"), every):
        case, mha = f"{step}: {core.name}", ("mha cudnn", "PyTorch SDPA")
        found.append((f"{case}: times faster than mha", times_faster(case, "mosaic", *mha)))
        found.append((f"{case}: than mqa", times_faster(case, "mosaic", "mqa cudnn")))
    for case, other in itertools.product(gpu_cases.bert(smoke), ("mha", "xla", "folded")):
        told = times_faster(f"bert: {case}", "mosaic", other)
        found.append((f"BERT-base, {case}: times faster than {other}", told))
    for case, kind in itertools.product(gpu_cases.decode(smoke), ("mva", "mhe_add")):
        told = times_faster(f"decode: {case}", kind, "mha")
        found.append((f"decoding, {case}: {kind} times faster than mha", told))
    return found


STEPS = {
    "device": Step(60, gpu_cases.device),
    "peers": Step(90, gpu_cases.peer),
    "probe": Step(60, gpu_cases.probe),
    "right": Step(120, gpu_cases.right),
    "right, cluster of 1": Step(60, partial(gpu_cases.right, cluster=1)),
    "forward": Step(120, gpu_cases.forward),
    "conditional": Step(60, gpu_cases.conditional, "--xla_gpu_enable_command_buffer=+CONDITIONAL"),
    "backward": Step(150, gpu_cases.backward),
    "random": Step(150, gpu_cases.random),
    "decode": Step(90, gpu_cases.decode),
    "bert": Step(270, gpu_cases.bert),
    "ncu": Step(60, gpu_cases.ncu),
}


if __name__ == "__main__":
    ask_for_huge_pages()  # as `train.py` does
    sys.exit(main())
