"""What a GPU is asked: whether every engine is right, and how fast attention, steps, decoding are.

    python benchmarks/gpu.py check --out gpu         # each engine against float64: see gpu_check.py
    python benchmarks/gpu.py cores --out gpu         # attention beside its peers
    python benchmarks/gpu.py steps --out gpu         # whole train steps
    python benchmarks/gpu.py decode --out gpu
    python benchmarks/gpu.py check --out cpu --smoke # the same at a small size, on any device

Each case that is done is a line of gpu/PART.jsonl. A part starts none that may not end within
--minutes; called again, it goes on with those that are not there. It needs the same device and
versions for that, else another --out. What there is so far is in gpu/PART.json, and as tables in
gpu/PART.md. A case in which the process ended twice, as for want of memory, is not run again.

Most of the time goes into compiling. Where a machine has cores to spare, several processes do that
at a time, each for a share, and with --turns they measure one after the other:

    for i in 1 2 3; do python benchmarks/gpu.py steps --share $i/3 --turns turns --out gpu$i & done

Exit status 1: something is wrong or failed, and is named.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room on a GPU
# What reads text and checkpoints, of which there are none here: a machine with a GPU may lack it.
for name in ("google_crc32c", "grain", "sacrebleu", "sentencepiece"):
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = types.ModuleType(name)

import jax  # noqa: E402

from benchmarks import attention, command_line, decode, gpu_check, reports, timing, train_step  # noqa: E402
from mhe_jax.cli.process import ask_for_huge_pages  # noqa: E402

# A run of a case gives what its line says; one that is wrong says so under "wrong".
Cases = dict[str, Callable[[], dict]]


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--minutes", type=float, default=9.0, help="that a part may take")
    parser.add_argument(
        "--engines", nargs="+", choices=attention.ENGINES, metavar="ENGINE",
        help="that check and cores have, else all",
    )  # fmt: skip
    parser.add_argument(
        "--share",
        type=share,
        default="1/1",
        metavar="I/N",
        help="of the cases (check: of the kinds), every N-th from I on",
    )
    parser.add_argument(
        "--turns",
        type=Path,
        metavar="FILE",
        help="that calls at a time share: none measures while another works",
    )
    parser.add_argument("--smoke", action="store_true", help="small sizes, on any device")
    args = parser.parse_args(arguments)
    if jax.default_backend() != "gpu" and not args.smoke:
        parser.error(f"needs an NVIDIA GPU, this is {jax.default_backend()}; --smoke runs anywhere")
    end = time.monotonic() + 60 * args.minutes
    if args.turns:
        timing.take_turns(args.turns)
    dtypes = gpu_check.TYPES if args.part == "check" else ("bfloat16",)
    about = reports.header(__file__, ", ".join(dtypes), arguments)
    about |= {"smoke": args.smoke, "engines": args.engines}
    cases, tables = PARTS[args.part]
    log = Log(args.out / f"{args.part}.jsonl", about)
    if log.differs(about):
        parser.error(
            f"{log.path} was measured elsewhere or with other versions: give another --out"
        )
    left = go_on(cases(args.smoke, args.engines, args.share), log, end)
    done, failed = log.done(), log.failed()
    reports.save(args.out / f"{args.part}.json", {"header": log.header, "results": done})
    page = "\n\n".join([*reports.header_lines(log.header), *tables(done)])
    args.out.joinpath(f"{args.part}.md").write_text(page + "\n", encoding="utf-8")
    print(page)
    print("", f"{len(done)} cases are done, {left} are left", *failed, sep="\n")
    return int(bool(failed))


def share(text: str) -> slice:
    """I/N: every N-th case from the I-th on, which is 1 or more."""
    first, _, step = text.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise argparse.ArgumentTypeError(f"is {text!r}, takes I/N, I from 1 to N, as 2/4")
    return slice(int(first) - 1, None, int(step))


class Log:
    """The lines of a part: its header, then each case as it begins and as it is done."""

    def __init__(self, path: Path, about: dict):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # A process that was killed may leave a part of a line.
        whole, _, rest = text.rpartition("\n")
        if rest:
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        self.rows = [json.loads(line) for line in whole.splitlines()]
        if not self.rows:
            self.append({"header": about})
        self.header = self.rows[0]["header"]

    def append(self, row: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)

    def differs(self, about: dict) -> bool:
        same = "device", "versions", "smoke", "engines"
        return any(self.header.get(name) != about[name] for name in same)

    def done(self) -> list[dict]:
        return [row for row in self.rows if "seconds" in row]

    def failed(self) -> list[str]:
        return [f"{row['case']}: {why}" for row in self.done() for why in row.get("wrong", [])]


def go_on(cases: Cases, log: Log, end: float) -> int:
    """Runs the cases that are not done, as long as the longest so far would; how many are left."""
    done = {row["case"] for row in log.done()}
    begun = Counter(row["begun"] for row in log.rows if "begun" in row)
    todo = {name: run for name, run in cases.items() if name not in done}
    longest = max((row["seconds"] for row in log.done()), default=0.0)
    left = len(todo)
    for name, run in todo.items():
        if begun[name] > 1:
            log.append({"case": name, "seconds": 0.0, "wrong": ["the process ended in it twice"]})
            left -= 1
            continue
        begin = time.monotonic()
        if begin + longest >= end:
            break
        log.append({"begun": name})
        try:
            found = run()
        except Exception as error:  # any library may fail in its own way
            if gpu_check.device_is_lost():
                raise
            found = {"wrong": [gpu_check.reason_of(error)]}
        seconds = time.monotonic() - begin
        log.append({"case": name, "seconds": seconds, **found})
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        longest, left = max(longest, seconds), left - 1
    return left


# How fast it is.


def timed(program, *arguments: Any) -> dict:
    """What a benchmark command measures; what it prints goes to standard error."""
    given = [str(argument) for argument in arguments]
    parsed = program.parse(given)
    parsed = parsed if isinstance(parsed, tuple) else (parsed,)
    about = reports.header(program.__file__, "bfloat16", given)
    with contextlib.redirect_stdout(sys.stderr):
        return {"content": program.measured(*parsed, about)}


BFLOAT16 = ("--dtype", "bfloat16", "--kinds")
TINY = ("--layers", 1, "--features", 12, "--heads", 3, "--mlp_features", 8, "--vocabulary", 300)


def core_cases(smoke: bool, engines: list[str] | None, share: slice) -> Cases:
    """The lengths that say most come first."""
    chosen = ("--engines", *engines) if engines else ()
    kinds = *BFLOAT16, "mha", "sha", "mqa", "mhe_mul", "mhe_add", "mva"
    forms = "--forms", "shared", "folded", "materialized"
    heads, lengths, tokens, rounds = ((12, 64), (8, 128)), (1024, 4096, 2048, 512, 8192), 16384, 20
    if smoke:
        kinds = *BFLOAT16, "mha", "mhe_add"
        heads, lengths, tokens, rounds = ((3, 8),), (8, 4), 16, 2
    cases = {}
    for length, (H, D), mask in itertools.product(lengths, heads, ([], ["--causal"])):
        name = f"{H} heads of {D}, T = {length}{', causal' if mask else ''}"
        shape = "--lengths", length, "--tokens", tokens, "--heads", H, "--head_features", D
        how = "--part", "core", *forms, "--rounds", rounds, *mask, *chosen
        cases[name] = functools.partial(timed, attention, *kinds, *shape, *how)
    return dict(list(cases.items())[share])


def step_cases(smoke: bool, engines, share: slice) -> Cases:
    """BERT-base, without dropout of attention and with it, and Transformer-big."""
    kinds = *BFLOAT16, "mha", "sha", "mhe_mul", "mhe_add", "--forms", "auto", "folded"
    rounds = "--rounds", 20
    bert = "--tasks", "mlm", "--length", 512, "--batch", 32
    big = "--features", 1024, "--heads", 16, "--mlp_features", 4096
    shapes = {
        "BERT-base, no dropout of attention": (*bert, "--attention_dropout", 0),
        "BERT-base": bert,
        "Transformer-big": ("--tasks", "translation", *big, "--length", 128, "--batch", 128),
    }
    if smoke:
        kinds, rounds = (*BFLOAT16, "mhe_add", "--forms", "auto"), ("--rounds", 2, *TINY)
        shapes = {"small": ("--tasks", "mlm", "--length", 6, "--batch", 2)}
    return {
        name: functools.partial(timed, train_step, *kinds, *rounds, *shape)
        for name, shape in list(shapes.items())[share]
    }


def decode_cases(smoke: bool, engines, share: slice) -> Cases:
    kinds = *BFLOAT16, "mha", "sha", "mqa", "mhe_mul", "mhe_add", "mva"
    shapes, how = ((1, 64, 64), (1, 1024, 64), (4, 64, 64), (1, 256, 256), (1, 1, 64)), (10,)
    if smoke:
        kinds = *BFLOAT16, "mha", "mhe_add"
        shapes, how = ((1, 2, 6), (2, 2, 6)), (2, *TINY)
    return {
        f"{beams} beam(s), {rows} rows, {length} tokens": functools.partial(
            timed, decode, *kinds, "--beams", beams, "--min_batch", rows, "--max_batch", rows,
            "--length", length, "--rounds", *how,
        )
        for beams, rows, length in shapes[share]
    }  # fmt: skip


def timed_tables(program, done: list[dict]) -> list[str]:
    """The tables of `program`, under what was measured, and with which command."""
    parts = []
    for row in (row for row in done if "content" in row):
        content = row["content"]
        about = content["header"]
        parts += [f"### {row['case']}", f"`{about['command']}`, {about['date']}"]
        if "empty" in content:
            empty, peak = reports.milliseconds(content["empty"]), content["peak"]
            peak = f"{peak['flops_per_second'] / 1e9:,.0f} GFLOP/s"
            parts.append(f"An empty call takes {empty} ms; peak of a matrix product {peak}.")
        for table in reports.tables(content["results"]):
            titles = [table[0][key] for key in ("run", "search", "task") if key in table[0]]
            parts += [f"**{', '.join(titles)}**", reports.table(program.COLUMNS, table)]
        reasons = content["left_out"].items()
        parts += [f"left out: {', '.join(names)}: {why}" for why, names in reasons]
    return parts


def core_tables(done: list[dict]) -> list[str]:
    """Before all tables one of the fastest engine of each kind, and of each library."""
    rows = []
    for row in (row for row in done if "content" in row):
        for table in reports.tables(row["content"]["results"]):
            rows.append({"case": f"{row['case']}, {table[0]['run']}", "table": table})
    columns: dict[str, Callable[[dict], str]] = {"median ms": lambda row: row["case"]}
    for name in (
        "mha",
        "mqa",
        "mhe_mul folded",
        "mhe_add shared",
        "mva shared",
        "mva materialized",
        "sha",
    ):
        columns[name] = functools.partial(fastest, f"{name} ")
    for name in ("jax.nn cudnn", "Pallas flash", "PyTorch", "plain XLA MHA"):
        columns[name] = functools.partial(fastest, name)
    return [reports.table(columns, rows), *timed_tables(attention, done)]


def fastest(name: str, row: dict) -> str:
    """The first row of a sorted table that is of a case that begins so, and how that goes on."""
    for found in row["table"]:
        for case in found["cases"]:
            if case.startswith(name):
                return (
                    f"{reports.milliseconds(found)} {case.removeprefix(name).strip(' ,')}".strip()
                )
    return "-"


PARTS: dict[str, tuple[Callable[..., Cases], Callable[[list[dict]], list[str]]]] = {
    "check": (gpu_check.cases, gpu_check.tables),
    "cores": (core_cases, core_tables),
    "steps": (step_cases, functools.partial(timed_tables, train_step)),
    "decode": (decode_cases, functools.partial(timed_tables, decode)),
}


if __name__ == "__main__":
    ask_for_huge_pages()  # as `train.py` does
    sys.exit(main())
