"""Estimated cycles of an attention core on a TPU that need not be there: plain XLA, with gradients.

    python benchmarks/cycles.py
    python benchmarks/cycles.py --topology v6e:2x2 --length 4096 --out cycles.json

MHA, with a score matrix for each head, against `mhe_add`, with one for all (form `shared`), and
`sha`, the control, which is one head; one device, no mask, no dropout. Cycles are the compiler's
own estimates, added up over the program, loops as often as they run. Of a choice that the device
makes, as `shared` has one, the branch that is meant to run counts, and beside it the program with
the slower one. They rank programs of plain XLA and promise no seconds. Needs libtpu: `pip install
-e '.[tpu]' -c constraints.txt`.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import timing
from mhe_jax.analysis.hlo import Program
from mhe_jax.analysis.topology import describe_devices
from mhe_jax.attention import Mask, engines
from mhe_jax.config import InputError


def main(arguments: list[str] | None = None) -> int:
    parser = timing.PlainParser(__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--batch", type=timing.positive, default=2)
    parser.add_argument("--length", type=timing.positive, default=2048)
    parser.add_argument("--heads", type=timing.positive, default=12)
    parser.add_argument("--head_features", type=timing.positive, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(arguments)
    try:
        device = describe_devices(args.topology)[0]
    except InputError as error:
        parser.error(str(error))
    B, T, H, D = args.batch, args.length, args.heads, args.head_features
    heads, one = (B, T, H, D), (B, T, 1, D)
    options = engines.Options(float32_softmax=True)

    def mha(q, k, v):
        return engines.attend(q, k, v, None, Mask(), options, "xla")[0]

    def mhe_add(q, k, v, bias):
        return engines.attend_shared(q, k, v, bias, Mask(), options, "xla")[0]

    # `sha` is MHA of one head.
    cases = {
        "mha": (mha, [(heads, args.dtype)] * 3),
        "sha": (mha, [(one, args.dtype)] * 3),
        "mhe_add shared": (mhe_add, [*[(one, args.dtype)] * 3, ((B, T, H), "float32")]),
    }
    results = []
    for case, (core, inputs) in cases.items():
        output = one if case == "sha" else heads
        program = compile_core(core, inputs, (output, args.dtype), device)
        likely, most = program.cycles(min), program.cycles(max)
        results.append({"case": case, "cycles": likely, "cycles_at_most": most})
    for r in results:
        r["fewer"] = results[0]["cycles"] / r["cycles"]
    given = sys.argv[1:] if arguments is None else arguments
    about = {
        "device": device.device_kind,
        "shape": f"B = {B}, T = {T}, H = {H}, D = {D}, {args.dtype}",
        "jax": jax.__version__,
        "libtpu": timing.version_of("libtpu"),
        "command": " ".join(["python", "benchmarks/cycles.py", *given]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    print(f"{about['device']}, ahead of time; jax {about['jax']}, libtpu {about['libtpu']}")
    print(f"`{about['command']}`, {about['date']}; {about['shape']}\n")
    print(timing.table(COLUMNS, results))
    timing.save(args.out, {"header": about, "results": results})
    return 0


COLUMNS = {
    "core, with gradients": lambda r: r["case"],
    "estimated cycles": lambda r: f"{r['cycles']:,}",
    "times fewer than mha": lambda r: f"{r['fewer']:.2f}",
    "with the slower branch": lambda r: f"{r['cycles_at_most']:,}",
}


def compile_core(core, inputs, output, device) -> Program:
    """The program of a core's output and of its gradients by all inputs, on one device."""
    whole = NamedSharding(Mesh(np.array([device]), "all"), PartitionSpec())

    def run(cotangent, *args):
        result, pull = jax.vjp(core, *args)
        return result, pull(cotangent)

    args = [jax.ShapeDtypeStruct(s, jnp.dtype(t), sharding=whole) for s, t in (output, *inputs)]
    return Program(jax.jit(run).lower(*args).compile().as_text())


if __name__ == "__main__":
    sys.exit(main())
