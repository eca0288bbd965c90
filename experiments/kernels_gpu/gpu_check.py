"""Whether every engine is right on the device at hand, above all a GPU.

    python experiments/kernels_gpu/gpu_check.py --out gpu            # each engine against float64
    python experiments/kernels_gpu/gpu_check.py --out cpu --smoke    # at a small size

Each kind and form on each engine, under each mask, in each type. Output and all gradients may err
by twice as much, against float64, as those of an ordinary softmax by the engine `xla` in the same
type, and half a rounding more, but by no more than `LARGEST_ERROR`: root mean squares, as shares of
the truth. A refused call is listed with the reason. Each case that is done is a line of
DIRECTORY/check.jsonl; another call on the same device goes on from there. Exit status 1: something
is wrong, and is named.
"""

import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments import command_line, reports
from experiments.kernels_gpu.log import Cases, Log, device_is_lost, go_on, reason_of
from experiments.robustness import fuzz
from mhe_jax.attention import engines
from mhe_jax.config import InputError

TYPES = ("bfloat16", "float32", "float16")
MASKS = "none", "causal", "causal offset", "lengths", "padding", "segments", "window and lengths"
# Such as no bug stays below; a GPU has TF32's precision in products of float32.
LARGEST_ERROR = {"bfloat16": 2**-4, "float32": 2**-6, "float16": 2**-6}
# More than a block of queries of any engine but `xla` for one score matrix, which takes 2,048.
LENGTHS = 576, 576
HEAD_FEATURES = 64  # as wide as those of models
AHEAD = 16  # cases that are compiled while another is checked


def cases(smoke: bool, chosen: list[str] | None = None) -> Cases:
    """Of the kinds and forms that have one of the `chosen` engines; None: any engine."""
    kinds = {}
    for case in fuzz.CASES:
        grouped = case.grouped or case.kv_heads not in (None, 2)
        names = [name for name in ladder(case) if chosen is None or name in chosen]
        if names and (not grouped or case.form == "shared"):
            score_features = case.score_features and 32
            kinds[str(case)] = dataclasses.replace(
                case, score_features=score_features, head_features=HEAD_FEATURES
            )
    masks, types, lengths = MASKS, TYPES, LENGTHS
    if smoke:
        kinds = {name: kinds[name] for name in ("mha", "mhe_add-shared") if name in kinds}
        masks, types, lengths = ("none", "causal offset"), ("bfloat16", "float16"), (6, 10)
    pool, compiled, checks = ThreadPoolExecutor(os.cpu_count()), {}, []
    for dtype, (about, kind), mask in itertools.product(types, kinds.items(), masks):
        names = [name for name in ladder(kind) if chosen is None or name in chosen]
        checks.append(Check(about, kind, mask, dtype, names, lengths, pool, compiled))
    return {
        str(check): functools.partial(check.run, checks[i + 1 : i + AHEAD])
        for i, check in enumerate(checks)
    }


def ladder(kind) -> dict:
    """Its engines by name."""
    return engines.OF_FORMS.get(kind.form, engines.LADDER)


class Check:
    """A kind under a mask in a type, on each engine."""

    def __init__(self, name, kind, mask, dtype, names, lengths, pool, compiled):
        self.name, self.kind, self.mask, self.dtype = name, kind, mask, dtype
        self.names = names
        self.sizes = 2, *lengths
        self.pool, self.compiled = pool, compiled

    def __str__(self):
        return f"{self.name}, {self.mask}, {self.dtype}"

    @functools.cached_property
    def program(self) -> fuzz.Program:
        return fuzz.Program(self.kind, self.mask, getattr(jnp, self.dtype), self.sizes)

    @functools.cached_property
    def drawn(self):
        # A GPU would compile each of the many small operations of this, and for a long time.
        with jax.default_device(jax.devices("cpu")[0]):
            drawn = self.program.drawn(np.random.default_rng(0), 1.0, 1.0, 1.0, spread=10.0)
        about, *arrays, allowed, spread = drawn
        return about, *jax.device_put(jax.tree.map(np.asarray, arrays)), allowed, spread

    @functools.cached_property
    def engines(self) -> dict[str, Future]:
        """The call on each engine, as it is compiled."""
        return {name: self._compiled(self.kind, name) for name in self.names}

    @functools.cached_property
    def ordinary(self) -> Future:
        form = "materialized" if self.kind.form else None
        return self._compiled(dataclasses.replace(self.kind, form=form), "xla")

    @functools.cached_property
    def truth(self) -> Future:
        _, given, _, allowed, _ = self.drawn
        return self.pool.submit(self.program.truth, given, allowed)

    def _compiled(self, kind, engine: str) -> Future:
        _, given, mask, *_ = self.drawn
        program = fuzz.Program(kind, self.mask, self.program.dtype, self.sizes)

        def make():
            lowered = jax.jit(program.call_of(engine=engine)).lower(*given, mask)
            # What is fast does not matter here, and to find it takes most of the time.
            return lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})

        key = str(kind), engine, self.mask, self.dtype
        if key not in self.compiled:
            self.compiled[key] = self.pool.submit(make)
        return self.compiled[key]

    def begin(self) -> None:
        """Compiles and computes the truth, in other threads."""
        _ = self.engines, self.ordinary, self.truth

    def run(self, next_ones: "list[Check]") -> dict:
        for check in (self, *next_ones):
            check.begin()
        _, given, mask, *_ = self.drawn
        truth = self.truth.result()
        ordinary = self.ordinary.result()(*given, mask)
        found, wrong = {}, []
        for name, future in self.engines.items():
            try:
                result = jax.block_until_ready(future.result()(*given, mask))
            except InputError as refusal:
                found[name] = {"refused": refusal_of(name, refusal)}
                continue
            except Exception as error:  # as it comes from the compiler, or from the device
                if device_is_lost():
                    raise
                wrong.append(f"{name}: {reason_of(error)}")
                continue
            ratio, reasons = judged(result, ordinary, truth, self.dtype)
            found[name] = {"ratio": ratio}
            wrong += [f"{name}: {reason}" for reason in reasons]
        about = {"kind": self.name, "mask": self.mask, "dtype": self.dtype}
        return {**about, "engines": found, "wrong": wrong}


def refusal_of(engine: str, refusal: InputError) -> str:
    """The reason alone."""
    return str(refusal).rpartition(f"; {engine}: ")[2].rpartition("cannot do this call: ")[2]


def judged(found, ordinary, truth, dtype: str) -> tuple[float, list[str]]:
    """The largest error in terms of what is allowed, and those that are larger than that.

    A gradient that is 0 by algebra may err by a share of the largest one.
    """
    eps, most = float(jnp.finfo(dtype).eps), LARGEST_ERROR[dtype]
    top = max(map(rms, jax.tree.leaves(truth)))
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree.leaves(ordinary),
        jax.tree.leaves(truth),
        strict=True,
    )
    worst, reasons = 0.0, []
    for (path, x), other, z in leaves:
        vanishes = rms(z) < 1e-9 * top
        unit = top if vanishes else rms(z)
        error, of_other = (rms(np.asarray(a, np.float64) - z) / unit for a in (x, other))
        allowed = most if vanishes else min(2 * of_other + eps / 2, most)
        ratio = float(np.nan_to_num(error / allowed, nan=np.inf))
        worst = max(worst, ratio)
        if ratio > 1:
            name = jax.tree_util.keystr(path)
            reasons.append(f"{name} errs by {error:.1e} of its size, allowed {allowed:.1e}")
    return worst, reasons


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--engines", nargs="+", choices=command_line.ENGINES, metavar="ENGINE")
    parser.add_argument("--smoke", action="store_true", help="small sizes, on any device")
    args = parser.parse_args(arguments)
    about = reports.header(__file__, ", ".join(TYPES), arguments) | {"smoke": args.smoke}
    log = Log(args.out / "check.jsonl", about)
    if log.differs(about):
        parser.error(f"{log.path} was measured elsewhere: give another --out")
    go_on(cases(args.smoke, args.engines), log)
    names = list(dict.fromkeys(name for row in log.done() for name in row.get("engines", ())))
    columns: dict[str, Callable[[dict], str]] = {"case": lambda row: row["case"]}
    columns |= {name: functools.partial(told, name) for name in names}
    print(*reports.header_lines(log.header), reports.table(columns, log.done()), sep="\n\n")
    print("", *log.failed(), sep="\n")
    return int(bool(log.failed()))


def told(engine: str, row: dict) -> str:
    found = row.get("engines", {}).get(engine, {})
    return found.get("refused") or reports.shown(found.get("ratio"), 2)


if __name__ == "__main__":
    sys.exit(main())
