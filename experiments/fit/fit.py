"""Which batches of which models fit which TPUs, compiled without one.

    python experiments/fit/fit.py --out fit
    python experiments/fit/fit.py --out fit --topology v6e:16x16 --kinds mha mhe_add
    python experiments/fit/fit.py --out fit --shapes bert-base --kinds mha --attention_dropout 0

The largest batch that fits, of every kind. Shapes are those of configs/bert_base.py and
configs/wmt14.py:big, and BERT-large; all parallel in the data, each with attention dropout 0.1 and
without, else with the configs' own dropout. Each cell is a file in the directory, and a cell that
is there is not compiled again: the same command goes on where it stopped. Needs libtpu: `pip
install -e '.[tpu]' -c constraints.txt`.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["JAX_PLATFORMS"] = "cpu"

from experiments import command_line, models, reports
from mhe_jax.analysis import ahead
from mhe_jax.analysis.topology import describe_devices
from mhe_jax.attention import KINDS
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import load_config
from mhe_jax.tasks import TASKS

ROOT = Path(__file__).parents[2]
PROGRAM = "python experiments/fit/fit.py"
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
    "transformer-big": ("wmt14.py:big", {}),
}
RATES = (0.1, 0.0)
# Tokens of each side that a chip has at first.
TOKENS = 4096


class Cell(NamedTuple):
    topology: str
    slices: int
    shape: str
    kind: str
    attention_dropout: float

    def __str__(self):
        slices = f"-{self.slices}-slices" if self.slices > 1 else ""
        how = f"{self.kind}-{self.attention_dropout:g}"
        return f"search-{self.topology.replace(':', '-')}{slices}-{self.shape}-{how}"


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--slices", type=command_line.positive, default=1)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--attention_dropout", nargs="+", type=float, default=RATES, metavar="RATE")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    for case in itertools.product(args.shapes, args.kinds, args.attention_dropout):
        cell = Cell(args.topology, args.slices, *case)
        file = args.out / f"{cell}.json"
        if not file.exists():
            found = {"part": "search", **cell._asdict(), **measured(cell, arguments)}
            draft = file.with_suffix(".draft")
            draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            draft.replace(file)
    files = sorted(args.out.glob("search-*.json"))
    print(*tables([json.loads(file.read_text()) for file in files]), sep="\n\n")
    return 0


def measured(cell: Cell, arguments: list[str] | None) -> dict[str, Any]:
    about = reports.made_by(__file__, arguments) | {"libtpu": reports.version_of("libtpu")}
    print(f"{cell} ...", file=sys.stderr)
    try:
        devices = describe_devices(cell.topology, cell.slices)
        return {**about, **ahead.search_batch(config_of(cell, len(devices)), devices)}
    except InputError as error:
        return {**about, "refused": str(error)}


def config_of(cell: Cell, num_devices: int) -> Config:
    file, changes = SHAPES[cell.shape]
    config = load_config(str(ROOT / "configs" / file))
    for field, value in {**changes, "data.row_multiple": num_devices}.items():
        config = set_field(config, field, value)
    heads = config.model.attention.num_heads
    (fields,) = command_line.variants([cell.kind], ["auto"], heads).values()
    fields = {**fields, "dropout_rate": cell.attention_dropout}
    config = models.with_attention(config, fields)
    rows = TOKENS // config.data.sequence_length
    return TASKS[config.task].with_rows(config, num_devices * rows)


def tables(found: list[dict]) -> Iterator[str]:
    measured = [f for f in found if "fits" in f]
    for jax, libtpu, date in sorted({(f["jax"], f["libtpu"], f["date"][:10]) for f in measured}):
        yield f"Ahead of time, jax {jax}, libtpu {libtpu}, {date}; `{PROGRAM}`."
    for topology, slices in dict.fromkeys((f["topology"], f["slices"]) for f in measured):
        own = [f for f in measured if (f["topology"], f["slices"]) == (topology, slices)]
        yield f"{f'{slices} slices of ' if slices > 1 else ''}{topology}, largest batch that fits:"
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
