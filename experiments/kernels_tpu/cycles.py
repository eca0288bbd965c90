"""Cycles of attention cores on a TPU that need not be there, with gradients, by their schedules.

    python experiments/kernels_tpu/cycles.py
    python experiments/kernels_tpu/cycles.py --causal

`mhe_add`, with one score matrix for all heads (form `shared`), against MHA by the better of two
splash attentions: JAX's, as our engine `splash` calls it, and tokamax's, which has exponentials to
base 2 and leaves out what a causal mask hides of a block on the diagonal. `sha`, the control, is by
JAX's. One device, bfloat16, no dropout; queries, keys, values and output lie as attention
modules have them, [B, T, H, D]. Kernels count by their final schedule, where a bundle of
instructions is a cycle if no memory is late: what each block takes, and what starts and ends a row
of blocks as often as it runs. All else counts with all of its bundles. Both splash attentions have
the best of some sizes of blocks.

Needs libtpu: `pip install -e '.[tpu]' -c constraints.txt`; for the rows of tokamax also Python 3.12
and `pip install tokamax -c constraints.txt`.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from experiments import command_line, reports
from experiments.kernels_tpu import schedule
from mhe_jax.attention import Mask
from mhe_jax.attention.engines import Options, splash
from mhe_jax.attention.engines.shared import tpu

PEERS = ("mha splash", "mha tokamax")
CASES = (*PEERS, "sha splash", "mhe_add shared")
TOKAMAX = importlib.util.find_spec("tokamax") is not None
NOT_INSTALLED = "not installed: needs Python 3.12 and tokamax"
# Queries and keys of a block, and keys of a product: those that took the peers the fewest cycles of
# eleven, by topology and length; a row has the best. Tokamax leaves out what a causal mask hides of
# a block on the diagonal where blocks are squares.
BEST = ((1024, 2048, 1024), (512, 4096, 1024), (1024, 4096, 1024))
CAUSAL = ((512, 512, 512), (1024, 1024, 1024))


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--batch", type=command_line.positive, default=2)
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", default=[2048, 4096])
    parser.add_argument("--heads", type=command_line.positive, default=12)
    parser.add_argument("--head_features", type=command_line.positive, default=64)
    parser.add_argument("--causal", action="store_true", help="all cases with a causal mask")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    # One program in a process of its own: libtpu is told once where its schedules go.
    parser.add_argument("--compile", nargs="+", metavar="CASE", help="for its own use")
    args = parser.parse_args(arguments)
    device = reports.ahead_of_time(parser, args.topology)
    if args.compile:
        compile_case(args, device, args.compile[0], tuple(map(int, args.compile[1:])))
        return 0
    results = []
    for length in args.lengths:
        fit = [size for size in (CAUSAL if args.causal else BEST) if size[1] <= length]
        for case in CASES:
            sizes = [()] if case == "mhe_add shared" else fit or [(length,) * 3]
            rows = [measure(args, case, length, size) for size in sizes]
            results.append(min(rows, key=lambda row: row["cycles"] or np.inf))
    for r in results:
        own = [x for x in results if x["length"] == r["length"] and x["cycles"]]
        best = min((x["cycles"] for x in own if x["case"] in PEERS), default=None)
        r["fewer"] = best and r["cycles"] and best / r["cycles"]
    mask = ", causal" if args.causal else ""
    shape = f"B = {args.batch}, H = {args.heads}, D = {args.head_features}, bfloat16{mask}"
    versions = {"libtpu": reports.version_of("libtpu")}
    versions["tokamax"] = reports.version_of("tokamax") if TOKAMAX else NOT_INSTALLED
    about = reports.header_ahead(__file__, arguments, device, shape, **versions)
    print()
    for length in args.lengths:
        print(reports.table(COLUMNS, [r for r in results if r["length"] == length]), end="\n\n")
    reports.save(args.out, {"header": about, "results": results})
    return 0


def _million(cycles: int | None) -> str:
    return "-" if cycles is None else f"{cycles / 1e6:.3f}"


COLUMNS = {
    "core, with gradients": lambda r: r["case"],
    "T": lambda r: f"{r['length']:,}",
    "forward kernel, 10⁶ cycles": lambda r: _million(r["forward"]),
    "backward kernel": lambda r: _million(r["backward"]),
    "the rest": lambda r: _million(r["rest"]),
    "all": lambda r: _million(r["cycles"]),
    "times fewer": lambda r: (
        f"{r['fewer']:.2f}" if r["fewer"] else r.get("reason", "does not compile")
    ),
    "matrix units": lambda r: " and ".join(f"{100 * x:.0f} %" for x in r["matrix_units"]),
}


def measure(args, case: str, length: int, blocks: tuple[int, ...]) -> dict:
    """The row of one case; without numbers where it does not compile."""
    print(f"{case}, T = {length} {blocks or ''}", file=sys.stderr, flush=True)
    blocks, arrays = blocks_of(args, case, length, blocks)
    row = {"case": case, "length": length, "blocks": blocks, "matrix_units": []}
    keys = ("forward", "backward", "rest", "cycles")
    if case == "mha tokamax" and not TOKAMAX:
        return row | dict.fromkeys(keys) | {"reason": NOT_INSTALLED}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--compile", case, *map(str, blocks)]
        for name in ("topology", "batch", "heads", "head_features"):
            command += [f"--{name}", str(getattr(args, name))]
        done = subprocess.run(
            [*command, "--lengths", str(length), *["--causal"] * args.causal],
            env=os.environ | schedule.dump_flags(Path(directory)),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            print(*reason, file=sys.stderr)
            return row | dict.fromkeys(keys)
        kernels, rest = schedule.read(Path(directory))
    forward = blocks[::2] if case == "mhe_add shared" else blocks[:2]
    numbers = [
        kernel.cycles(schedule.blocks_of(arrays, length, sizes, args.causal, by_keys=by_keys))
        for kernel, sizes, by_keys in zip(
            kernels, (forward, blocks[:2]), (False, True), strict=True
        )
    ]
    row |= dict(zip(keys, (*numbers, rest, sum(numbers) + rest), strict=True))
    return row | {"matrix_units": [kernel.matrix_units for kernel in kernels]}


def blocks_of(args, case: str, length: int, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The blocks of a case, of our engine where none are given, and the arrays of a kernel."""
    H, D = args.heads, args.head_features
    if case == "mhe_add shared":
        value = jax.ShapeDtypeStruct((args.batch, length, 1, D), jnp.bfloat16)
        key, bias = (jax.ShapeDtypeStruct((args.batch, length, n), jnp.bfloat16) for n in (D, H))
        static, mask = tpu.Static(1.0, 1.0, None), Mask.causal() if args.causal else Mask()
        sizes = tpu.sizes_of(blocks or None, False, static, key, key, value, bias, mask)
        blocks = sizes.block_queries, sizes.block_keys, sizes.forward_keys
        return blocks, args.batch * sizes.groups
    return blocks, args.batch * (1 if case == "sha splash" else H)


def compile_case(args, device, case: str, blocks: tuple[int, ...]) -> None:
    """Compiles output and gradients of a core for one device."""
    (T,), B, H, D = args.lengths, args.batch, args.heads, args.head_features
    heads, one = (B, T, H, D), (B, T, 1, D)
    mask = Mask.causal() if args.causal else Mask()

    def by_splash(q, k, v):
        return splash.attend(q, k, v, None, mask, Options(), scale=D**-0.5, blocks=blocks)[0]

    def by_tokamax(q, k, v):
        heads = (x.swapaxes(1, 2) for x in (q * D**-0.5, k, v))
        return jax.vmap(tokamax_kernel(T, blocks, args.causal))(*heads).swapaxes(1, 2)

    def shared(q, k, v, bias):
        return tpu.attend(q, k, v, bias, mask, Options(), scale=D**-0.5, blocks=blocks)[0]

    core, output, inputs = {
        "mha splash": (by_splash, heads, [heads] * 3),
        "mha tokamax": (by_tokamax, heads, [heads] * 3),
        "sha splash": (by_splash, one, [one] * 3),
        "mhe_add shared": (shared, heads, [one, one, one, (B, T, H)]),
    }[case]
    whole = NamedSharding(Mesh(np.array([device]), "all"), PartitionSpec())

    def run(cotangent, *given):
        result, pull = jax.vjp(core, *given)
        return result, pull(cotangent)

    types = [jnp.bfloat16 if len(shape) == 4 else jnp.float32 for shape in (output, *inputs)]
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip((output, *inputs), types, strict=True)
    ]
    # The way out for heads that differ too much for the kernels compiles for minutes, and does not
    # count.
    way_out = tpu.shared
    way_out.head_by_head = lambda _, q, k, v, b, seen: jnp.zeros((*q.shape[:2], b.shape[2], D))
    way_out.head_by_head_gradient = lambda _, *given: tuple(map(jnp.zeros_like, given[:4]))
    # Arrays lie as is best for each program: what comes before and after a core can be laid out so.
    free = Format(Layout.AUTO, whole)
    # Kernels of tokamax ask the mesh for which device they are.
    kind = AbstractDevice(device.device_kind, 1, "tpu")
    mesh = AbstractMesh((1,), ("all",), axis_types=(AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.jit(run, in_shardings=free, out_shardings=free).lower(*arrays).compile()


def tokamax_kernel(length: int, blocks: tuple[int, ...], causal: bool):
    """Attention [H, T, D] of one example."""
    from tokamax._src.ops.experimental.tpu import (  # pyright: ignore[reportMissingImports]
        splash_attention,
    )

    kernels = splash_attention.splash_attention_kernel
    masks = splash_attention.splash_attention_mask
    names = ("block_q", "block_kv", "block_kv_compute")
    backward = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = dict(zip((*names, *backward), blocks * 2, strict=True))
    if causal:
        sizes |= {"qk_diag_skip": True, "sv_diag_skip": True, "qk_diag_grid": 4}
    mask = (masks.CausalMask if causal else masks.FullMask)((length, length))
    return kernels.make_splash_mha(mask, config=kernels.SplashConfig(**sizes), q_seq_shards=1)


if __name__ == "__main__":
    sys.exit(main())
