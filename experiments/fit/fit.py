"""Which batches of which models fit which TPUs, compiled without one.

    python experiments/fit/fit.py --out fit
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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["JAX_PLATFORMS"] = "cpu"

from experiments import command_line, models, reports
from mhe_jax.analysis import ahead
from mhe_jax.analysis.ahead import describe_devices
from mhe_jax.attention import KINDS
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import load_config
from mhe_jax.tasks import TASKS

ROOT = Path(__file__).parents[2]
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


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--attention_dropout", nargs="+", type=float, default=RATES, metavar="RATE")
    args = parser.parse_args(arguments)
    for shape, kind, rate in itertools.product(args.shapes, args.kinds, args.attention_dropout):
        name = f"search-{args.topology.replace(':', '-')}-{shape}-{kind}-{rate:g}"
        file = args.out / f"{name}.json"
        if file.exists():
            continue
        print(f"{name} ...", file=sys.stderr)
        about = {"topology": args.topology, "shape": shape, "kind": kind, "attention_dropout": rate}
        about |= reports.made_by(__file__, arguments) | {"libtpu": reports.version_of("libtpu")}
        try:
            devices = describe_devices(args.topology)
            found = ahead.search_batch(config_of(shape, kind, rate, len(devices)), devices)
        except InputError as error:
            print(f"not compiled: {name}: {error}")
            continue
        reports.save(file, about | found)
    for table in tables([json.loads(file.read_text()) for file in args.out.glob("search-*.json")]):
        print(table, end="\n\n")
    return 0


def config_of(shape: str, kind: str, attention_dropout: float, num_devices: int) -> Config:
    file, changes = SHAPES[shape]
    config = load_config(str(ROOT / "configs" / file))
    for field, value in {**changes, "data.row_multiple": num_devices}.items():
        config = set_field(config, field, value)
    heads = config.model.attention.num_heads
    (fields,) = command_line.variants([kind], ["auto"], heads).values()
    config = models.with_attention(config, {**fields, "dropout_rate": attention_dropout})
    rows = TOKENS // config.data.sequence_length
    return TASKS[config.task].with_rows(config, num_devices * rows)


def tables(found: list[dict]) -> Iterator[str]:
    """One for each topology and compiler."""
    apart: dict[str, list[dict]] = {}
    for f in sorted(found, key=in_order):
        by = f"{f['topology']}, largest batch that fits, by jax {f['jax']} and libtpu {f['libtpu']}"
        apart.setdefault(by, []).append(f)
    for by, own in sorted(apart.items()):
        yield f"{by}:\n\n{reports.table(COLUMNS, own)}"


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
    "rows a chip": lambda f: f"{f['batch']['rows_per_chip']:g} × {f['batch']['length']}",
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
