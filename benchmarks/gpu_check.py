"""The check of benchmarks/gpu.py: each kind and form on each engine, under each mask, in each type.

Output and all gradients may err by twice as much, against float64, as those of an ordinary softmax
by the engine `xla` in the same type, and half a rounding more, but by no more than `LARGEST_ERROR`:
root mean squares, as shares of the truth. A refused call is listed with the reason.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import fuzz, reports
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


def cases(
    smoke: bool, chosen: list[str] | None = None, share: slice = slice(None)
) -> dict[str, Callable[[], dict]]:
    """Of a share of the kinds and forms that have one of the `chosen` engines; None: any engine."""
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
    shared = list(kinds.items())[share]
    for dtype, (about, kind), mask in itertools.product(types, shared, masks):
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


def tables(done: list[dict]) -> list[str]:
    """The worst of all masks for each kind and engine, in terms of what is allowed; refusals."""
    parts, reasons = [], {}
    rows = [row for row in done if "engines" in row]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        here = [row for row in rows if row["dtype"] == dtype]
        names = list(dict.fromkeys(name for row in here for name in row["engines"]))
        table = []
        for kind in dict.fromkeys(row["kind"] for row in here):
            ratios = {name: [] for name in names}
            for row in (row for row in here if row["kind"] == kind):
                for name, found in row["engines"].items():
                    if "refused" in found:
                        case = f"{kind}, {row['mask']}, {dtype}"
                        reasons.setdefault(f"{name}: {found['refused']}", []).append(case)
                    else:
                        ratios[name].append(found["ratio"])
            table.append({"kind": kind, "ratios": ratios})
        columns: dict[str, Callable[[dict], str]] = {"kind": lambda row: row["kind"]}
        for name in names:
            columns[name] = functools.partial(worst, name)
        parts += [f"**{dtype}**", reports.table(columns, table)]
    parts += [f"refused, {len(cases)} cases: {why}" for why, cases in reasons.items()]
    return parts


def worst(name: str, row: dict) -> str:
    ratios = row["ratios"][name]
    return f"{max(ratios):.2f} ({len(ratios)} masks)" if ratios else "-"


def device_is_lost() -> bool:
    """Whether nothing runs any more, as after an access to memory that is not there."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        return True
    return False


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
