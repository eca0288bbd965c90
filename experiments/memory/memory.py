"""Memory of one attention layer: every kind and form, forward and with gradients, against T.

    python experiments/memory/memory.py                                       # the device at hand
    python experiments/memory/memory.py --topology v5e:2x2 --dtype bfloat16   # a chip
    python experiments/memory/memory.py --lengths 512 2048 --causal --out memory.json

Bytes of temporaries and outputs as the compiler lays them out, without inputs and parameters, of
one example; nothing is run. `of mha` is the share of what `mha` needs at the same T, in per cent.

--topology NAME compiles for one chip of that TPU topology (needs libtpu, not a TPU).
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np
from jax.sharding import Mesh

from experiments import command_line, reports, timing
from mhe_jax.analysis.memory import layer_memory
from mhe_jax.analysis.topology import describe_devices
from mhe_jax.attention import make_attention, recording
from mhe_jax.config import InputError

LENGTHS = [128, 256, 512, 1024, 2048, 4096]
RUNS = {"forward": False, "with gradients": True}


def parse(arguments: list[str] | None):
    parser = command_line.Parser(__doc__, forms=("auto", *command_line.FORMS), timed=False)
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", default=LENGTHS)
    parser.add_argument("--heads", type=command_line.positive, default=12)
    parser.add_argument("--head_features", type=command_line.positive, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--topology", metavar="NAME", help="a TPU topology, such as v5e:2x2")
    args = parser.parse_args(arguments)
    args.chip = None
    if args.topology:
        try:
            args.chip = describe_devices(args.topology)[0]
        except InputError as error:
            parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    about = reports.header(__file__, args.dtype, arguments)
    mesh = None
    if args.chip is not None:
        mesh = Mesh(np.array([args.chip]), "data")
        about |= {"device": f"one chip of {args.topology}, ahead of time", "backend": "tpu"}
    left_out = timing.LeftOut()
    results = measure(args, mesh, left_out)

    print(*reports.header_lines(about), sep="\n\n", end="\n\n")
    print(
        f"One layer, one example, {args.heads} heads of {args.head_features}"
        f"{', causal' if args.causal else ''}: MB, and per cent of mha"
    )
    for run in RUNS:
        print(f"\n### {run}\n")
        print(table(results, run, args.lengths))
    notes = reports.mha_note(args.kinds, args.heads * args.head_features, args.heads)
    notes = [note.replace("speed", "memory") for note in notes]
    print("", *notes, *left_out.lines(), sep="\n")
    content = {
        "header": about,
        "results": results,
        "left_out": left_out.reasons,
        "notes": notes,
    }
    reports.save(args.out, content)
    return 0


def measure(args, mesh: Mesh | None, left_out: timing.LeftOut) -> list[dict[str, Any]]:
    """One row for each kind, form, T and run, with the form that `auto` took."""
    features = args.heads * args.head_features
    # Engines ask the mesh that is set what they are compiled for.
    context = contextlib.nullcontext()
    if mesh is not None:
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    results = []
    with context:
        for name, fields in command_line.variants(args.kinds, args.forms, args.heads).items():
            module = make_attention(
                **fields,
                num_heads=args.heads,
                use_bias=False,
                dtype=args.dtype,
                force_fp32_for_softmax=True,
            )
            for length in args.lengths:
                for run, gradients in RUNS.items():
                    what = f"{name}, T = {length}, {run}"
                    print(what, file=sys.stderr, flush=True)
                    try:
                        with recording() as made:
                            size = layer_memory(
                                module,
                                (1, length, features),
                                args.dtype,
                                causal=args.causal,
                                gradients=gradients,
                                mesh=mesh,
                            )
                    except Exception as error:  # a compiler may fail in its own way
                        left_out.add(what, error)
                        continue
                    results.append(
                        {
                            "case": name,
                            "kind": fields["kind"],
                            "runs_as": made[fields["kind"]][-1],  # initialized before
                            "length": length,
                            "run": run,
                            "memory_bytes": size,
                        }
                    )
    mha = {(r["length"], r["run"]): r["memory_bytes"] for r in results if r["case"] == "mha"}
    for row in results:
        base = mha.get((row["length"], row["run"]))
        row["of_mha"] = base and row["memory_bytes"] / base
    return results


def table(results: list[dict], run: str, lengths: list[int]) -> str:
    """A line for each case, a column for each T."""
    found = {(r["case"], r["length"]): r for r in results if r["run"] == run}
    # What `auto` takes can depend on T.
    cases: dict[str, set[str]] = {}
    for row in results:
        cases.setdefault(row["case"], set()).add(row["runs_as"])

    def cell(case: str, length: int) -> str:
        row = found.get((case, length))
        if row is None:
            return "-"
        share = "" if row["of_mha"] is None else f" ({100 * row['of_mha']:.0f} %)"
        return reports.megabytes(row) + share

    columns = {"case": lambda case: f"{case} ({' or '.join(sorted(cases[case]))})"}
    columns |= {f"T = {n}": lambda case, n=n: cell(case, n) for n in lengths}
    return reports.table(columns, list(cases))  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    sys.exit(main())
