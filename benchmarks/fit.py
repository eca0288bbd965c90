"""Which batches of which models fit which TPUs, compiled without one.

    python benchmarks/fit.py --out fit
    python benchmarks/fit.py --out fit --shapes bert-base --kinds mha mhe_add --parts search
    python benchmarks/fit.py --out fit --shapes bert-base --kinds mha --attention_dropout 0

    search   every kind on v5e:16x16, the largest batch that fits
    fixed    mha, mqa, mhe_add and mhe_mul at one batch on v5p:8x8x8, v6e:16x16 and two slices of
             v5e:16x16

Shapes are those of configs/bert_base.py and configs/wmt14_big.py, and BERT-large; all parallel in
the data, each with attention dropout 0.1 and without, else with the configs' own dropout. Each cell
is a file in the directory, and a cell that is there is not compiled again: the same command goes on
where it stopped. Needs libtpu: `pip install -e '.[tpu]' -c constraints.txt`.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks import command_line, experiment, reports
from mhe_jax.analysis import ahead
from mhe_jax.analysis.topology import describe_devices
from mhe_jax.attention import KINDS
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import load_config
from mhe_jax.tasks import TASKS

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("bert_base.py", {}),
    "bert-large": (
        "bert_base.py",
        {
            "model.features": 1024,
            "model.mlp_features": 4096,
            "model.num_layers": 24,
            "model.attention.num_heads": 16,
        },
    ),
    "transformer-big": ("wmt14_big.py", {}),
}
SEARCHED = "v5e:16x16"
FIXED = {"v5p:8x8x8": 1, "v6e:16x16": 1, "v5e:16x16": 2}
FIXED_KINDS = ("mha", "mqa", "mhe_add", "mhe_mul")
RATES = (0.1, 0.0)
# Tokens that a chip has of each side at the fixed batch.
FIXED_TOKENS = 4096


class Cell(NamedTuple):
    part: str
    topology: str
    slices: int
    shape: str
    kind: str
    attention_dropout: float

    @property
    def file(self) -> str:
        slices = f"-{self.slices}-slices" if self.slices > 1 else ""
        where = self.topology.replace(":", "-")
        how = f"{self.kind}-{self.attention_dropout:g}"
        return f"{self.part}-{where}{slices}-{self.shape}-{how}.json"


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--attention_dropout", nargs="+", type=float, default=RATES, metavar="RATE")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else arguments
    for cell in cells(args):
        file = args.out / cell.file
        if not file.exists():
            found = {**cell._asdict(), **measured(cell, given)}
            draft = file.with_suffix(".draft")
            draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            draft.replace(file)
    found = [json.loads(file.read_text()) for file in sorted(args.out.glob("*.json"))]
    print(*tables(found), sep="\n\n")
    return 0


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    for part in args.parts:
        for topology, slices in PARTS[part].items():
            for shape in args.shapes:
                kinds = [k for k in args.kinds if part == "search" or k in FIXED_KINDS]
                for kind in kinds:
                    for rate in args.attention_dropout:
                        yield Cell(part, topology, slices, shape, kind, rate)


PARTS = {"search": {SEARCHED: 1}, "fixed": FIXED}


def measured(cell: Cell, given: list[str]) -> dict[str, Any]:
    about = {
        "command": " ".join(["python", "benchmarks/fit.py", *given]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "libtpu": reports.version_of("libtpu"),
    }
    print(f"{cell.file.removesuffix('.json')} ...", file=sys.stderr)
    try:
        devices = describe_devices(cell.topology, cell.slices)
        config = config_of(cell, len(devices))
        compiled = ahead.search_batch if cell.part == "search" else ahead.compile_step
        return {**about, **compiled(config, devices)}
    except InputError as error:
        return {**about, "refused": str(error)}


def config_of(cell: Cell, num_devices: int) -> Config:
    file, changes = SHAPES[cell.shape]
    config = load_config(str(Path(__file__).parents[1] / "configs" / file))
    for field, value in {**changes, "data.row_multiple": num_devices}.items():
        config = set_field(config, field, value)
    heads = config.model.attention.num_heads
    (fields,) = command_line.variants([cell.kind], ["auto"], heads).values()
    fields = {**fields, "dropout_rate": cell.attention_dropout}
    config = experiment.with_attention(config, fields)
    rows = FIXED_TOKENS // config.data.sequence_length
    return TASKS[config.task].with_rows(config, num_devices * rows)


def tables(found: list[dict]) -> Iterator[str]:
    versions = sorted({(f["jax"], f["libtpu"], f["date"]) for f in found if "jax" in f})
    for jax, libtpu, date in versions:
        yield f"Ahead of time, jax {jax}, libtpu {libtpu}, {date}; `python benchmarks/fit.py`."
    for part, where in PARTS.items():
        for topology, slices in where.items():
            own = [
                f
                for f in found
                if (f["part"], f["topology"], f["slices"]) == (part, topology, slices)
            ]
            own = [f for f in own if "fits" in f]
            if own:
                title = f"{f'{slices} slices of ' if slices > 1 else ''}{topology}"
                what = "largest batch that fits" if part == "search" else "one batch"
                yield f"{title}, {what}:"
                yield reports.table(COLUMNS, sorted(own, key=in_order))
    for f in found:
        if "refused" in f:
            yield f"not compiled: {f['shape']} {f['kind']} on {f['topology']}: {f['refused']}"


def in_order(found: dict) -> tuple[int, int, float]:
    shape, kind = list(SHAPES).index(found["shape"]), list(KINDS).index(found["kind"])
    return shape, kind, -found["attention_dropout"]


def gib(name: str):
    return lambda f: f"{f['bytes_per_chip'].get(name, 0) / 2**30:.2f}"


COLUMNS = {
    "model": lambda f: f"{f['shape']} `{f['kind']}`",
    "attention dropout": lambda f: f"{f['attention_dropout']:g}",
    "runs as": lambda f: ", ".join(f["attention"].values()),
    "parameters": lambda f: f"{f['parameters']['total'] / 1e6:.1f}M",
    "rows a chip": lambda f: f"{f['batch']['rows_per_chip']} × {f['batch']['length']}",
    "fits": lambda f: "yes" if f["fits"] else "no",
    "state GiB": lambda f: f"{sum(f['bytes_per_chip'][n] for n in STATE) / 2**30:.2f}",
    "temporaries GiB": gib("temporaries"),
    "total GiB": gib("total"),
    "sent MB": lambda f: f"{sum(c['bytes'] for c in (f['collectives'] or {}).values()) / 1e6:.0f}",
    "cycles / 10⁶": lambda f: f"{(f['estimated_cycles'] or 0) / 1e6:.0f}",
}
STATE = ("parameters", "optimizer", "averaged_parameters")


if __name__ == "__main__":
    sys.exit(main())
