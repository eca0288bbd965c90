"""Rows of 131,072 tokens, split over the 16 chips of a v5e slice: memory, and bytes sent in a step.

    python experiments/memory/long_rows.py --out experiments/memory/records/long_rows.json

A language model of Llama's shape (`SHAPE`) on one row, in bfloat16, layers computed again in the
backward pass. Compiled ahead of time by libtpu, without the chips; nothing is run. `everywhere`
splits rows along their length in attention too, `tensor` between sublayers alone, with the heads
split inside them (docs/pods.md). Bytes sent are as of `mhe_jax/analysis/hlo.py`; cycles are the
compiler's estimate, without kernels and collectives.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import command_line, reports
from experiments.runs import ROOT
from mhe_jax.analysis.ahead import GIB, compile_ahead
from mhe_jax.config import Config, Target
from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import load_config

SHAPE = {
    "model.features": 2048,
    "model.mlp_features": 5632,
    "model.num_layers": 16,
    "model.vocabulary_size": 32000,
    "model.attention.num_heads": 16,
    "model.attention.num_kv_heads": None,
    "model.dtype": "bfloat16",
    "model.scan_layers": True,
    "model.remat": True,
    "data.batch_size": 1,
    "mesh.tensor": 16,
}
KINDS = {
    "mva": {"model.attention.kind": "mva", "model.attention.score_features": 1024},
    "gqa": {"model.attention.kind": "gqa", "model.attention.num_kv_heads": 4},
    "mha": {"model.attention.kind": "mha"},
    "mqa": {"model.attention.kind": "mqa"},
}
CASES = [*((kind, "everywhere") for kind in KINDS), ("mha", "tensor"), ("gqa", "tensor")]
SENT = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--topology", default="v5e:4x4", help="of as many chips as mesh.tensor")
    parser.add_argument("--length", type=command_line.positive, default=131_072)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(arguments)
    device = reports.ahead_of_time(parser, args.topology)
    shape = f"one row of {args.length:,} tokens over {args.topology}"
    libtpu = reports.version_of("libtpu")
    about = reports.header_ahead(__file__, arguments, device, shape, libtpu=libtpu)
    results = [measure(args, kind, split) for kind, split in CASES]
    print("", reports.table(COLUMNS, results), sep="\n")
    reports.save(args.out, {"header": about, "results": results})
    return 0


def config_of(kind: str, split: str, length: int) -> Config:
    config = load_config(str(ROOT / "configs/llama_lm.py"))
    lengths = {"data.sequence_length": length, "model.max_length": length}
    for field, value in {**SHAPE, **lengths, **KINDS[kind], "mesh.length": split}.items():
        config = set_field(config, field, value)
    return config


def measure(args, kind: str, split: str) -> dict[str, Any]:
    found = compile_ahead(config_of(kind, split, args.length), Target(topology=args.topology))
    sent = {name: made["bytes"] for name, made in (found["collectives"] or {}).items()}
    own = found["bytes_per_chip"]
    return {
        "case": found["kind"],
        "split": split,
        "runs_as": found["attention"][found["kind"]],
        "fits": found["fits"],
        "memory_bytes": own["total"],
        "temporaries": own.get("temporaries"),
        "cycles": found["estimated_cycles"],
        "sent": sent,
    }


COLUMNS = {
    "attention": lambda r: f"{r['case']} ({r['runs_as']})",
    "`mesh.length`": lambda r: r["split"],
    "GiB a chip": lambda r: f"{r['memory_bytes'] / GIB:.1f}{'' if r['fits'] else ', too many'}",
    "10⁹ cycles beside kernels": lambda r: reports.shown((r["cycles"] or 0) / 1e9, 1),
    **{
        f"{name}, GiB": lambda r, name=name: reports.shown(r["sent"].get(name, 0) / GIB, 1)
        for name in SENT
    },
}


if __name__ == "__main__":
    sys.exit(main())
