"""Memory of one attention layer: every kind and form, forward and with gradients, against T.

    python experiments/memory/memory.py                                       # the device at hand
    python experiments/memory/memory.py --topology v5e:2x2 --dtype bfloat16   # a chip

Bytes of temporaries and outputs as the compiler lays them out, without inputs and parameters, of
one example; nothing is run. `of mha` is the share of what `mha` needs at the same T, in per cent.

--topology NAME compiles for one chip of that TPU topology (needs libtpu, not a TPU).
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments import command_line, reports, timing
from mhe_jax.attention import Mask, make_attention, recording

LENGTHS = [128, 256, 512, 1024, 2048, 4096]
RUNS = {"forward": False, "with gradients": True}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.Parser(__doc__, forms=("auto", *command_line.FORMS), timed=False)
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", default=LENGTHS)
    parser.add_argument("--heads", type=command_line.positive, default=12)
    parser.add_argument("--head_features", type=command_line.positive, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--topology", metavar="NAME", help="a TPU topology, such as v5e:2x2")
    args = parser.parse_args(arguments)
    about = reports.header(__file__, args.dtype, arguments)
    left_out, mesh, context = timing.LeftOut(), None, contextlib.nullcontext()
    if args.topology:
        mesh = Mesh(np.array([reports.ahead_of_time(parser, args.topology)]), "data")
        # Engines ask the mesh that is set what they are compiled for.
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        about |= {"device": f"one chip of {args.topology}, ahead of time", "backend": "tpu"}
    with context:
        results = measure(args, mesh, left_out)

    print(*reports.header_lines(about), sep="\n\n", end="\n\n")
    print(
        f"One layer, one example, {args.heads} heads of {args.head_features}"
        f"{', causal' if args.causal else ''}: MB, and per cent of mha"
    )
    for run in RUNS:
        print(f"\n### {run}\n")
        print(table(results, run, args.lengths))
    print("", *left_out.lines(), sep="\n")
    reports.save(args.out, {"header": about, "results": results, "left_out": left_out.reasons})
    return 0


def measure(args, mesh: Mesh | None, left_out: timing.LeftOut) -> list[dict[str, Any]]:
    """One row for each kind, form, T and run, with the form that `auto` took."""
    shared: dict[str, Any] = {"num_heads": args.heads, "use_bias": False, "dtype": args.dtype}
    shared["force_fp32_for_softmax"] = True
    results = []
    cases = [
        (name, fields, length, run)
        for name, fields in command_line.variants(args.kinds, args.forms, args.heads).items()
        for length in args.lengths
        for run in RUNS
    ]
    for name, fields, length, run in cases:
        what = f"{name}, T = {length}, {run}"
        shape = 1, length, args.heads * args.head_features
        print(what, file=sys.stderr, flush=True)
        how = {"causal": args.causal, "gradients": RUNS[run], "mesh": mesh}
        try:
            with recording() as made:
                module = make_attention(**fields, **shared)
                size = layer_memory(module, shape, args.dtype, **how)
        except Exception as error:  # a compiler may fail in its own way
            left_out.add(what, error)
            continue
        row = {"case": name, "kind": fields["kind"], "runs_as": made[fields["kind"]][-1]}
        results.append({**row, "length": length, "run": run, "memory_bytes": size})
    mha = {(r["length"], r["run"]): r["memory_bytes"] for r in results if r["case"] == "mha"}
    for row in results:
        base = mha.get((row["length"], row["run"]))
        row["of_mha"] = base and row["memory_bytes"] / base
    return results


def layer_memory(module, shape, dtype: str, *, causal: bool, gradients: bool, mesh: Mesh | None):
    """Bytes that self-attention needs on x of `shape` [B, T, M], beside x and the parameters.

    Of `module(x)`, or with `gradients` of its output and the gradients of x and all parameters.
    `mesh` is of one device, such as a TPU that is not here; without one it is the first there is.
    """
    x = jax.ShapeDtypeStruct(shape, dtype)
    params = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
    if mesh is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        params, x = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), (params, x)
        )
    mask = Mask.causal() if causal else Mask()

    def apply(params, x) -> Any:
        return module.apply(params, x, mask=mask)

    def with_gradients(params, x):
        output, pull = jax.vjp(apply, params, x)
        return output, pull(jnp.ones_like(output))

    compiled = jax.jit(with_gradients if gradients else apply).lower(params, x).compile()
    return timing.memory_of(compiled)


def table(results: list[dict], run: str, lengths: list[int]) -> str:
    """A line for each case, a column for each T."""
    found = {(r["case"], r["length"]): r for r in results if r["run"] == run}
    # What `auto` takes can depend on T.
    cases: dict[str, set[str]] = {}
    for row in results:
        cases.setdefault(row["case"], set()).add(row["runs_as"])
    # A form that is what `auto` takes is in its row.
    kinds = {row["case"]: row["kind"] for row in results}
    shown = [c for c, kind in kinds.items() if c == kind or cases[c] != cases.get(kind)]

    def cell(case: str, length: int) -> str:
        row = found.get((case, length))
        if row is None:
            return "-"
        share = "" if row["of_mha"] is None else f" ({100 * row['of_mha']:.0f} %)"
        return reports.megabytes(row) + share

    columns = {"case": lambda case: f"{case} ({' or '.join(sorted(cases[case]))})"}
    columns |= {f"T = {n}": lambda case, n=n: cell(case, n) for n in lengths}
    return reports.table(columns, shown)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    sys.exit(main())
