"""Cycles of attention cores on a TPU that need not be there, with gradients, by their schedules.

    python benchmarks/cycles.py
    python benchmarks/cycles.py --topology v6e:2x2 --lengths 4096 --heads 8 --head_features 128
    python benchmarks/cycles.py --tune --head_features 128

`mhe_add`, with one score matrix for all heads (form `shared`), against MHA by splash attention, the
kernels that JAX has for it, with the blocks of our engine `splash`, and against `sha`, the control,
by the same. One device, bfloat16, no mask, no dropout; queries, keys, values and output lie as
attention modules have them, [B, T, H, D]. Kernels count by their final schedule, where a bundle of
instructions is a cycle if no memory is late: what each block takes, and what starts and ends a row
of blocks as often as it runs. All else counts with all of its bundles. `--tune` compares sizes of
blocks of splash attention. Needs libtpu: `pip install -e '.[tpu]' -c constraints.txt`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import command_line, reports, schedule
from mhe_jax.analysis.topology import describe_devices
from mhe_jax.attention import Mask
from mhe_jax.attention.engines import Options, splash
from mhe_jax.attention.engines.shared import tpu
from mhe_jax.config import InputError

CASES = ("mha splash", "sha splash", "mhe_add shared")
# Queries and keys of a block, and keys of a product.
SIZES = ((256, 512, 256), (512, 512, 512), (512, 1024, 512), (1024, 1024, 512), (1024, 1024, 1024))


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--batch", type=command_line.positive, default=2)
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", default=[2048, 4096])
    parser.add_argument("--heads", type=command_line.positive, default=12)
    parser.add_argument("--head_features", type=command_line.positive, default=64)
    parser.add_argument("--tune", action="store_true", help="sizes of blocks of splash attention")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    # One program in a process of its own: libtpu is told once where its schedules go.
    parser.add_argument("--compile", nargs="+", metavar="CASE", help="for its own use")
    args = parser.parse_args(arguments)
    try:
        device = describe_devices(args.topology)[0]
    except InputError as error:
        parser.error(str(error))
    if args.compile:
        compile_case(args, device, args.compile[0], tuple(map(int, args.compile[1:])))
        return 0
    results = []
    for length in args.lengths:
        cases = [("mha splash", size) for size in SIZES] if args.tune else [(c, ()) for c in CASES]
        for case, blocks in cases:
            print(f"{case}, T = {length} {blocks or ''}", file=sys.stderr, flush=True)
            results.append(measure(args, case, length, blocks))
    for r in results:
        of_length = (x["cycles"] for x in results if x["length"] == r["length"])
        first = next(filter(None, of_length), None)  # of the first case that compiles
        r["fewer"] = first and r["cycles"] and first / r["cycles"]
    about = {
        "device": device.device_kind,
        "shape": f"B = {args.batch}, H = {args.heads}, D = {args.head_features}, bfloat16",
        "jax": jax.__version__,
        "libtpu": reports.version_of("libtpu"),
        **reports.made_by(__file__, arguments),
    }
    print(f"{about['device']}, ahead of time; jax {about['jax']}, libtpu {about['libtpu']}")
    print(f"`{about['command']}`, {about['date']}; {about['shape']}\n")
    for length in args.lengths:
        print(reports.table(COLUMNS, [r for r in results if r["length"] == length]), end="\n\n")
    reports.save(args.out, {"header": about, "results": results})
    return 0


def _million(cycles: int | None) -> str:
    return "-" if cycles is None else f"{cycles / 1e6:.3f}"


COLUMNS = {
    "core, with gradients": lambda r: r["case"],
    "T": lambda r: f"{r['length']:,}",
    "blocks": lambda r: " × ".join(map(str, r["blocks"])),
    "forward kernel, 10⁶ cycles": lambda r: _million(r["forward"]),
    "backward kernel": lambda r: _million(r["backward"]),
    "the rest": lambda r: _million(r["rest"]),
    "all": lambda r: _million(r["cycles"]),
    "times fewer": lambda r: f"{r['fewer']:.2f}" if r["fewer"] else "does not compile",
    "matrix units": lambda r: " and ".join(f"{100 * x:.0f} %" for x in r["matrix_units"]),
}


def measure(args, case: str, length: int, blocks: tuple[int, ...]) -> dict:
    """The row of one case; without numbers where it does not compile."""
    row = {"case": case, "length": length, "blocks": blocks or blocks_of(args, case, length)}
    keys = ("forward", "backward", "rest", "cycles")
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--compile", case, *map(str, blocks)]
        for name in ("topology", "batch", "heads", "head_features"):
            command += [f"--{name}", str(getattr(args, name))]
        done = subprocess.run(
            [*command, "--lengths", str(length)],
            env=os.environ | schedule.dump_flags(Path(directory)),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            print(*reason, file=sys.stderr)
            return row | dict.fromkeys(keys) | {"matrix_units": []}
        (forward, backward), rest = schedule.read(Path(directory))
    of_queries, of_keys = (-(-length // size) for size in row["blocks"][:2])
    numbers = forward.cycles(of_keys), backward.cycles(of_queries), rest
    row |= dict(zip(keys, (*numbers, sum(numbers)), strict=True))
    return row | {"matrix_units": [forward.matrix_units, backward.matrix_units]}


def blocks_of(args, case: str, length: int) -> tuple[int, ...]:
    """The blocks that the engine of a case takes."""
    H, D = args.heads, args.head_features
    if case == "mhe_add shared":
        value = jax.ShapeDtypeStruct((args.batch, length, 1, D), jnp.bfloat16)
        static = tpu.Static(1.0, 1.0, None)
        sizes = tpu._sizes(static, length, length, D, H, value, Mask(), None, False)
        return sizes.block_queries, sizes.block_keys
    return splash._blocks(length, length, D)


def compile_case(args, device, case: str, blocks: tuple[int, ...]) -> None:
    """Compiles output and gradients of a core for one device."""
    (T,), B, H, D = args.lengths, args.batch, args.heads, args.head_features
    heads, one = (B, T, H, D), (B, T, 1, D)

    def by_splash(q, k, v):
        return splash.attend(
            q, k, v, None, Mask(), Options(), scale=D**-0.5, blocks=blocks or None
        )[0]

    def shared(q, k, v, bias):
        return tpu.attend(q, k, v, bias, Mask(), Options(), scale=D**-0.5)[0]

    core, output, inputs = {
        "mha splash": (by_splash, heads, [heads] * 3),
        "sha splash": (by_splash, one, [one] * 3),
        "mhe_add shared": (shared, heads, [one, one, one, (B, T, H)]),
    }[case]
    whole = NamedSharding(Mesh(np.array([device]), "all"), PartitionSpec())

    def run(cotangent, *args):
        result, pull = jax.vjp(core, *args)
        return result, pull(cotangent)

    types = [jnp.bfloat16 if len(shape) == 4 else jnp.float32 for shape in (output, *inputs)]
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip((output, *inputs), types, strict=True)
    ]
    # Arrays lie as is best for each program: what comes before and after a core can be laid out so.
    free = Format(Layout.AUTO, whole)
    jax.jit(run, in_shardings=free, out_shardings=free).lower(*args).compile()


if __name__ == "__main__":
    sys.exit(main())
