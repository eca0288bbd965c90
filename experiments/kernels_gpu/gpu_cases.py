"""The steps of gpu_kernels.py, a function each: its cases by name, at full size or small."""

import contextlib
import functools
import itertools
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import models, reports, timing
from experiments.kernels_gpu import gpu_check
from experiments.kernels_gpu.gpu_programs import (
    FORWARD,
    GRADIENTS,
    LARGEST_ERROR,
    ROOT,
    UNTUNED,
    Comparison,
    Program,
    Traced,
    apart,
    drawn,
    timed,
    traced,
    with_gradients,
)  # fmt: skip
from experiments.kernels_gpu.log import Cases
from experiments.speed import decode as decoding
from experiments.speed import peers, steps, train_step
from mhe_jax.attention import Mask
from mhe_jax.attention.engines import Options
from mhe_jax.attention.engines.shared import mosaic, xla

RATE = 0.1  # of dropout, where there is any


class Core(NamedTuple):
    """Heads that share scores: q and k `scored` wide, so many `values`; MHA's are `of_mha` wide."""

    name: str
    rows: int
    length: int
    heads: int
    width: int
    scored: int
    values: int
    of_mha: int


def cores(smoke: bool) -> list[Core]:
    """The bars are those of the first two, and of `mva-narrow`."""
    rows, M = [(16, 1024, 12, 64), (4, 4096, 12, 64), (16, 1024, 8, 128), (4, 4096, 8, 128)], 768
    rows, narrow = [*rows, (32, 512, 12, 64)], (8, 12)
    if smoke:
        rows, M, narrow = [(2, 24, 3, 16), (1, 40, 3, 16)], 64, (2,)
    (B, T, *_), *_ = rows
    return [Core(f"{H} x {E}, T = {T}", B, T, H, E, E, 1, E) for B, T, H, E in rows] + [
        Core(f"mva-narrow, {H} heads", B, T, H, M // 2 // H, 3 * M // 8, H, M // H) for H in narrow
    ]


def attention(smoke, core: Core, run: str, ours=True, rate=0.0, **forced) -> Comparison:
    """The engine beside `xla`, MHA and MQA; with sizes that are forced on a kernel, alone."""
    B, T, H, E, D, K, of_mha = core[1:]
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arrays = [bf16((B, T, 1, D)), bf16((B, T, 1, D)), bf16((B, T, K, E))]
    arrays.append(jax.ShapeDtypeStruct((B, T, H), jnp.float32))
    shapes = {"query": (B, T, 1, D), "key": (B, T), "value": (E,), "key_bias": (B, T, H)}
    flops = peers.core_flops(shapes, False)

    def of_engine(engine, q, k, v, b, *rng):
        options = Options(rate, jax.random.wrap_key_data(*rng) if rate else None)
        return engine.attend(q, k, v, b, Mask(), options, scale=D**-0.5)[0]

    def torch():
        args = {"tokens": B * T, "heads": H, "head_features": of_mha, "dtype": "bfloat16"}
        args = types.SimpleNamespace(**args, causal=False)
        cases = peers.torch_sdpa(None, {"case": "PyTorch SDPA"}, args, T)
        return [case for case in cases if case.about["run"] == run]

    if rate:
        arrays.append(jax.ShapeDtypeStruct((2,), jnp.uint32))
    mosaics, plain = (functools.partial(of_engine, engine) for engine in (mosaic, xla))
    found = [Program("mosaic", mosaics, arrays, flops, run, plain, forced)] if ours else []
    if forced:
        return Comparison(smoke, found)
    found += [Program("xla", plain, arrays, flops, run)] if ours else []
    of_heads, flops = (B, T, H, of_mha), 4.0 * B * T * T * H * of_mha
    for name, K in (("mha cudnn", H), ("mqa cudnn", 1)):
        given = [bf16(of_heads), *[bf16((B, T, K, of_mha))] * 2]
        found.append(Program(name, by_cudnn, given, flops, run))
    return Comparison(smoke, found, torch)


def by_cudnn(q, k, v):
    peers.needs("gpu")
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def repeated_by_cudnn(q, k, v):
    """n heads of values, of any width, for one query and key."""
    # The public function refuses values of another width before cuDNN is asked.
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    peers.needs("gpu")
    q, k = (jnp.repeat(x, v.shape[2], 2) for x in (q, k))
    return dot_product_attention(q, k, v, scale=q.shape[3] ** -0.5)


def repeated(q, k, v):
    scores = jnp.einsum("btgd,bsgd->bts", q, k, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(scores * q.shape[3] ** -0.5)
    return jnp.einsum("bts,bshe->bthe", p, v.astype(jnp.float32)).astype(v.dtype)


def peer(smoke: bool) -> Cases:
    runs = itertools.product(cores(smoke), (FORWARD, GRADIENTS))
    return {f"{core.name}, {run}": attention(smoke, core, run, ours=False) for core, run in runs}


def probe(smoke: bool) -> Cases:
    (B, T), cases = (2, 24) if smoke else (16, 1024), {}
    for D, E, n in ((64, 256, 3), (64, 200, 4), (64, 128, 6), (64, 128, 7), (128, 256, 4)):
        shapes = (B, T, 1, D), (B, T, 1, D), (B, T, n, E)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        call = repeated_by_cudnn, arrays, 2.0 * B * T * T * n * (D + E)
        programs = [Program(run, *call, run, repeated) for run in (FORWARD, GRADIENTS)]
        cases[f"{n} heads of {D} and {E}"] = Comparison(smoke, programs)
    return cases


def right(smoke: bool, cluster: int = 2) -> Cases:
    """Those of gpu_check.py; with a cluster of one, of `mhe_add` alone."""
    Traced.forced = {"backward": {"cluster": 1}} if cluster == 1 else {}
    cases = gpu_check.cases(smoke, ["mosaic"])
    end = "causal offset, bfloat16" if smoke else "bfloat16"
    start = "mhe_add" if cluster == 1 else ""
    return {k: run for k, run in cases.items() if k.startswith(start) and k.endswith(end)}


def forward(smoke: bool) -> Cases:
    cases = {core.name: attention(smoke, core, FORWARD) for core in cores(smoke)}
    blocks, most = [(128, 2, 2), (128, 3, 2), (64, 4, 4), (64, 3, 3)], 1 if smoke else 4
    for core, block in itertools.product(cores(smoke)[:most], blocks[:most]):
        forced = dict(zip(("keys", "key_slots", "column_slots"), block, strict=True))
        name = ", ".join(f"{field} {n}" for field, n in forced.items())
        cases[f"{core.name}, {name}"] = attention(smoke, core, FORWARD, forward=forced)
    return cases


def conditional(smoke: bool) -> Cases:
    return {core.name: attention(smoke, core, FORWARD) for core in cores(smoke)[:2]}


def backward(smoke: bool) -> Cases:
    every = cores(smoke)
    cases = {core.name: attention(smoke, core, GRADIENTS) for core in every}
    cases[f"{every[0].name}, dropout"] = attention(smoke, every[0], GRADIENTS, rate=RATE)
    tiles, most = [(256, 1), (256, 2), (128, 1), (128, 2)], 1 if smoke else 4
    for core, tile in itertools.product(every[:most], tiles[:most]):
        forced = dict(zip(("keys", "cluster"), tile, strict=True))
        name = ", ".join(f"{field} {n}" for field, n in forced.items())
        cases[f"{core.name}, {name}"] = attention(smoke, core, GRADIENTS, backward=forced)
    cases["last product"] = Comparison(smoke, last_products(every[0]))
    return cases


def last_products(core: Core) -> list[Program]:
    """E, transposed, times gradients of sums: of values and weights together, and apart."""
    B, T, X = core.rows, core.length, core.heads * core.width
    arrays = [jax.ShapeDtypeStruct((B, T, n), jnp.bfloat16) for n in (T, X + 64)]

    def product(e, dsums, dtype=jnp.float32):
        return jnp.einsum("nts,ntx->nsx", e, dsums, preferred_element_type=dtype)

    ways = {
        "together": product,
        "in bfloat16": functools.partial(product, dtype=jnp.bfloat16),
        "apart": lambda e, dsums: [product(e, x) for x in (dsums[..., :X], dsums[..., X:])],
    }
    return [Program(name, way, arrays, 2.0 * B * T * T * (X + 64)) for name, way in ways.items()]


class Calls:
    """Random calls of a shape under a kind of mask: outputs and gradients beside those of `xla`."""

    def __init__(self, mask: str, shape: tuple[int, ...], rate: float, cluster: int, runs: int):
        self.mask, self.shape, self.rate, self.runs = mask, shape, rate, runs
        self.forced = {"backward": {"cluster": 1}} if cluster == 1 else {}

    def begin(self, pool: ThreadPoolExecutor) -> None:
        mask = random_masks(np.random.default_rng(0), self.shape)[self.mask]
        self.compiled = pool.submit(self._compiled, mask)

    def _compiled(self, mask: Mask):
        traced.forced = self.forced
        B, T, S, G, H, D, E = self.shape
        shapes = (B, T, G, D), (B, S, G, D), (B, S, H, E), (B, S, H), (B, T, H, E)
        types = *[jnp.bfloat16] * 3, jnp.float32, jnp.bfloat16
        arrays = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, types, strict=True)]

        def run(seed, mask):
            options = Options(self.rate, jax.random.key(seed) if self.rate else None)
            how = {"mask": mask, "options": options, "scale": D**-0.5}
            ours, plain = (functools.partial(engine.attend, **how) for engine in (mosaic, xla))
            given = drawn(arrays, seed)
            return apart(*(with_gradients(lambda *a, f=f: f(*a)[0])(*given) for f in (ours, plain)))

        return jax.jit(run).lower(0, mask).compile(UNTUNED)

    def __call__(self) -> dict:
        rng, program = np.random.default_rng(1), self.compiled.result()
        masks = (random_masks(rng, self.shape)[self.mask] for _ in range(self.runs))
        errors = [float(program(seed, mask)) for seed, mask in enumerate(masks)]
        bad = [error for error in errors if not error <= LARGEST_ERROR]
        wrong = [f"{len(bad)} of {self.runs} calls differ, one by {bad[0]:.1e}"] if bad else []
        return {"runs": self.runs, "largest_error": max(errors), "wrong": wrong}


def random_masks(rng, shape) -> dict[str, Mask]:
    B, T, S, *_ = shape
    lengths = Mask.lengths(jnp.asarray(rng.integers(0, S + 1, B)))
    segments = (jnp.asarray(np.sort(rng.integers(0, 3, (B, n)))) for n in (T, S))
    return {
        "none": Mask(),
        "causal": Mask.causal(),
        "lengths": lengths,
        "padding": Mask.padding(jnp.asarray(rng.random((B, S)) < 0.7)),
        "segments and offset": Mask.causal(S - T) & Mask.segments(*segments),
        "window and lengths": Mask.local(S // 3, 5) & lengths,
    }


def random(smoke: bool) -> Cases:
    rng, cases = np.random.default_rng(0), {}
    longest, widths, most, count, runs = (
        (40, [16], 3, 2, 2) if smoke else (2000, [32, 64, 128], 12, 24, 42)
    )
    for i in range(count):
        (B, H), (T, S), (D, E) = (
            rng.integers(1, most + 1, 2), rng.integers(2, longest, 2), rng.choice(widths, 2)
        )  # fmt: skip
        G, rate, cluster = 1 + i % 2, RATE if i % 4 == 0 else 0.0, 1 + i // 2 % 2
        shape = tuple(int(n) for n in (B, T, S, G, H * G, D, E))
        mask = [*random_masks(rng, shape)][i % 6]
        cases[f"{mask}, {shape}, dropout {rate}"] = Calls(mask, shape, rate, cluster, runs)
    return cases


# Models, and the machine.


TINY = ("--layers", 1, "--features", 48, "--heads", 3, "--mlp_features", 8, "--vocabulary", 300)


def decode(smoke: bool) -> Cases:
    how = "--dtype", "bfloat16", "--beams", 1, "--rounds", 2 if smoke else 10
    how += (*TINY, "--length", 6) if smoke else ("--length", 64)
    how += "--kinds", "mha", "mva", *["mhe_add"] * (not smoke)
    rows = (2,) if smoke else (1024, 64)
    return {f"{n} rows": functools.partial(decoded, *how, "--batch", n) for n in rows}


def decoded(*given) -> dict:
    """What decode.py measures; what it prints goes to standard error."""
    given = [str(x) for x in given]
    about = reports.header(decoding.__file__, "bfloat16", given)
    with contextlib.redirect_stdout(sys.stderr):
        results, left_out = decoding.measured(*decoding.parse(given))
    content = {"header": about, "results": results, "left_out": left_out.reasons}
    return {"content": content}


def bert(smoke: bool) -> Cases:
    rates = (RATE,) if smoke else (RATE, 0.0)
    return {f"dropout {rate}": functools.partial(bert_steps, smoke, rate) for rate in rates}


def bert_steps(smoke: bool, rate: float) -> dict:
    how = "--tasks", "mlm", "--dtype", "bfloat16", "--attention_dropout", rate
    how += ("--length", 6, "--batch", 2, *TINY) if smoke else ("--length", 512, "--batch", 32)
    args, configs = train_step.parse([str(x) for x in how])
    shared = {"kind": "mhe_add", "form": "shared"}
    fields = {"mosaic": shared | {"engine": "mosaic"}, "mha": {"kind": "mha"}}
    if not smoke:
        fields |= {"xla": shared | {"engine": "xla"}, "folded": shared | {"form": "folded"}}
    makes = {}
    for name, of_kind in fields.items():
        config = models.with_attention(configs["mlm"], of_kind)
        makes[name] = functools.partial(steps.our_step, name, config, args.batch)
    left_out = timing.LeftOut()
    return timed(timing.made(makes, left_out), 2 if smoke else 20, left_out)


def device(smoke: bool) -> Cases:
    def rates():
        x = jax.random.normal(jax.random.key(0), (2**20 if smoke else 2**30,), jnp.bfloat16)
        copy = functools.partial(jax.jit(jnp.negative).lower(x).compile(), x)
        cases = [] if smoke else timing.peak_cases("bfloat16")
        cases.append(timing.Case({"case": "copy, byte for FLOP"}, copy, 2.0 * x.nbytes))
        return timed(cases, 2 if smoke else 10, timing.LeftOut())

    return {"rates": rates}


def ncu(smoke: bool) -> Cases:
    def profile():
        if smoke or shutil.which("ncu") is None:
            return {"left_out": {"no ncu, or a smoke run": ["both kernels"]}}
        which = "--kernel-name", "regex:mosaic", "--launch-count", "2", "--set", "detailed"
        program = "from experiments.kernels_gpu import gpu_cases; gpu_cases.profiled()"
        command = "ncu", "--clock-control", "none", *which, sys.executable, "-c", program
        found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        return {"lines": (found.stdout + found.stderr).splitlines()}

    return {"both kernels": profile}


def profiled() -> None:
    program = attention(False, cores(False)[1], GRADIENTS, forward={}).programs[0]
    shapes = [*program.shapes, jax.eval_shape(program.function, *program.shapes)]
    jax.block_until_ready(jax.jit(with_gradients(program.function))(*drawn(shapes, 0)))
