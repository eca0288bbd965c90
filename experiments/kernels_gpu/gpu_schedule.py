"""What a GPU would do for the cores with shared scores, without a GPU: bytes and machine code.

    python experiments/kernels_gpu/gpu_schedule.py --out gpu_schedule.json # needs the extra `cuda`

The programs are compiled ahead of time. Bytes are those that kernels read and write, each of its
operands once, sums in place among them (`traffic.py`); of the two ways of a call they
are those of the factored softmax. Without a device XLA does not tune its products: they are calls
of cuBLAS here.

Of the kernels of `mosaic` the machine code of the loop with most products is counted, in cycles of
one turn of one warpgroup, as lower bounds: the tensor core takes N/2 for a product of 64 x N x 16,
exponentials 8 a warp's instruction, comparisons, conversions and integers 2, arithmetic of float32
1, and whatever there is 1 to issue. `overlapped` is the share of the tensor core's peak where all
of them go on at once, `in turns` where nothing goes on beside the tensor core. nvdisasm comes with
nvidia-cuda-nvdisasm, ptxas with the extra.
"""

import collections
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments import command_line, reports
from experiments.kernels_gpu.traffic import traffic
from mhe_jax.analysis.hlo import Program
from mhe_jax.attention import Mask
from mhe_jax.attention.engines import SHARED, Options

CASES = ("xla forward", "xla backward", "mosaic forward", "mosaic backward")
# Instructions by the unit that they keep.
UNITS = {
    "exponentials": re.compile("MUFU"),
    "float32": re.compile("FFMA|FADD|FMUL|HFMA2|HADD2|HMUL2|IMAD"),
    "others": re.compile(
        "FMNMX|F2FP|IADD3?|LOP3|F?SEL|ISETP|FSETP|LEA|SHF|PRMT|VIADD|VIMNMX|PLOP3|MOV|CS2R"
    ),
}
CYCLES = {"exponentials": 8, "float32": 1, "others": 2}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--topology", default="h200:1x1")
    parser.add_argument("--batch", type=command_line.positive, default=4)
    parser.add_argument("--length", type=command_line.positive, default=4096)
    parser.add_argument("--heads", type=command_line.positive, default=12)
    parser.add_argument("--head_features", type=command_line.positive, default=64)
    parser.add_argument("--score_features", type=command_line.positive, help="if not as the heads")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dropout_rate", type=float, default=0.0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    # One program in a process of its own: the compilers are told once where their files go.
    parser.add_argument("--compile", nargs=2, metavar=("CASE", "FILE"), help="for its own use")
    args = parser.parse_args(arguments)
    device = reports.ahead_of_time(parser, args.topology)
    if args.compile:
        case, file = args.compile
        text = compiled(args, device, case).as_text() or ""
        Path(file).write_text(text, encoding="utf-8")
        return 0
    given = sys.argv[1:] if arguments is None else arguments
    results = [measure(args, case, given) for case in CASES]
    shape = (
        f"B = {args.batch}, T = {args.length}, H = {args.heads}, D = {args.head_features}, scores "
        f"{args.score_features or args.head_features} wide, bfloat16, "
        f"{'causal' if args.causal else 'no mask'}, dropout {args.dropout_rate}"
    )
    cuda = reports.version_of("nvidia-cuda-nvcc")
    about = reports.header_ahead(__file__, arguments, device, shape, cuda=cuda)
    print(reports.table(COLUMNS, results))
    print(*(why for row in results if row["kernel"] for why in row["kernel"]["warnings"]), sep="\n")
    reports.save(args.out, {"header": about, "results": results})
    return 0


def _of_kernel(show: Callable[[dict], str], row: dict) -> str:
    return "-" if row["kernel"] is None else show(row["kernel"])


COLUMNS = {
    "core": lambda row: row["case"],
    "MB moved": lambda row: f"{row['bytes'] / 1e6:,.0f}",
} | {
    name: functools.partial(_of_kernel, show)
    for name, show in {
        "spilled bytes": lambda kernel: str(kernel["spilled"]),
        "tensor core, cycles": lambda kernel: f"{kernel['cycles']['tensor']:,}",
        "exponentials": lambda kernel: f"{kernel['cycles']['exponentials']:,}",
        "to issue": lambda kernel: f"{kernel['cycles']['issue']:,}",
        "overlapped": lambda kernel: f"{100 * kernel['overlapped']:.0f} %",
        "in turns": lambda kernel: f"{100 * kernel['in_turns']:.0f} %",
    }.items()
}


def compiled(args, device, case: str):
    """The program of a case."""
    B, T, H, E = args.batch, args.length, args.heads, args.head_features
    D = args.score_features or E
    engine, part = case.split()
    mesh = Mesh(np.array([device]), "all")
    placed = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    query, value = placed((B, T, 1, D), jnp.bfloat16), placed((B, T, 1, E), jnp.bfloat16)
    inputs = [query, query, value, placed((B, T, H), jnp.float32)]
    cotangent = placed((B, T, H, E), jnp.bfloat16)
    mask = Mask.causal() if args.causal else Mask()

    def core(*inputs):
        options = Options(args.dropout_rate, jax.random.key(0))
        return SHARED[engine].attend(*inputs, mask, options, scale=D**-0.5)[0]

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if part == "forward":
            return jax.jit(core).lower(*inputs).compile()
        pull = jax.eval_shape(lambda *inputs: jax.vjp(core, *inputs)[1], *inputs)
        pull = jax.tree.map(lambda x: placed(x.shape, x.dtype), pull)
        return jax.jit(lambda pull, x: pull(x)).lower(pull, cotangent).compile()


def measure(args, case: str, given: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "program.txt"
        subprocess.run(
            [sys.executable, __file__, *given, "--compile", case, str(text)],
            env=os.environ
            | {
                "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
                "MOSAIC_GPU_DUMP_TO": directory,
            },
            check=True,
        )
        found = {"case": case, "bytes": traffic(Program(text.read_text())), "kernel": None}
        for ptx in Path(directory).glob("*.ptx"):
            found["kernel"] = machine_code(ptx)
    return found


def machine_code(ptx: Path) -> dict:
    """Registers, spills, warnings, and the cycles of the loop with most work of the tensor core."""
    cubin = ptx.with_suffix(".cubin")
    command = [tool("ptxas"), "-v", "-arch", "sm_90a", str(ptx), "-o", str(cubin)]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    text = subprocess.run(
        [tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    spills = re.findall(r"(\d+) bytes spill", log)
    cycles = max(map(cycles_of, loops(text)), key=lambda cycles: cycles["tensor"])
    tensor, rest = cycles["tensor"], max(n for unit, n in cycles.items() if unit != "tensor")
    return {
        "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
        "spilled": sum(map(int, spills)),
        "warnings": re.findall(r"\(C\d+\)[^\n]*", log),
        "cycles": cycles,
        "overlapped": tensor / max(tensor, rest),
        "in_turns": tensor / (tensor + rest),
    }


def tool(name: str) -> str:
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia and nvidia.submodule_search_locations) or ():
        for found in Path(root).glob(f"*/bin/{name}"):
            return str(found)
    return name


def loops(text: str) -> list[list[str]]:
    """Instructions from the target of each branch backwards to the branch; innermost loops."""
    code, labels, found = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*\.?(L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            code.append(instruction[1])
            branch = re.search(r"^BRA.*?(L_x_\d+)", instruction[1])
            if branch and labels.get(branch[1], len(code)) < len(code) - 1:
                found.append((labels[branch[1]], len(code)))
    # Waits that the compiler moved behind the program lead back into it, over its end.
    ranges = [(a, b) for a, b in found if "EXIT" not in code[a : b - 1]]
    inner = [
        (a, b)
        for a, b in ranges
        if not any(
            (a, b) != (c, d) and a <= c and d <= b and "HGMMA" in " ".join(code[c:d])
            for c, d in ranges
        )
    ]
    return [code[a:b] for a, b in inner]


def cycles_of(code: list[str]) -> dict[str, int]:
    """Cycles by unit, of one warpgroup: a warp on each of the four parts of a multiprocessor."""
    cycles = collections.Counter(tensor=0, issue=len(code), exponentials=0)
    for instruction in code:
        if product := re.match(r"HGMMA\.64x(\d+)x16", instruction):
            cycles["tensor"] += int(product[1]) // 2
        for unit, names in UNITS.items():
            if re.fullmatch(names, instruction.split()[0].split(".")[0]):
                cycles[unit] += CYCLES[unit]
    return dict(cycles)


if __name__ == "__main__":
    sys.exit(main())
