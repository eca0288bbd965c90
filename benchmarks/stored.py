"""Scores that are stored, or computed again in blocks: train steps of `mha`, compiled for a TPU.

    python benchmarks/stored.py --out stored.json

With attention dropout 0.1, so that no kernel takes them, by the engines `xla` and `blocked`. Bytes
are those of a chip; cycles are the compiler's estimate, without collectives. One program after the
other, and nothing runs. Needs libtpu: `pip install -e '.[tpu]' -c constraints.txt`.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from benchmarks import command_line, experiment, fit, reports
from mhe_jax.analysis import ahead
from mhe_jax.analysis.topology import describe_devices
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import set_field
from mhe_jax.tasks import TASKS

ENGINES = ("xla", "blocked")
# A model of `fit`, rows a chip, and tokens of a row.
CASES = (
    ("bert-base", 1, 512),
    ("bert-base", 8, 512),
    ("bert-base", 32, 512),
    ("bert-base", 16, 256),
    ("bert-large", 8, 512),
    ("transformer-big", 64, 128),
)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(arguments)
    try:
        devices = describe_devices(args.topology)
    except InputError as error:
        parser.error(str(error))
    results = [measure(args.topology, devices, *case) for case in CASES]
    about = {
        "device": devices[0].device_kind,
        "jax": jax.__version__,
        "libtpu": reports.version_of("libtpu"),
        **reports.made_by(__file__, arguments),
    }
    print(f"{about['device']}, ahead of time; jax {about['jax']}, libtpu {about['libtpu']}")
    print(f"`{about['command']}`, {about['date']}\n")
    print(reports.table(COLUMNS, results))
    reports.save(args.out, {"header": about, "results": results})
    return 0


def measure(topology: str, devices: list, model: str, rows: int, tokens: int) -> dict[str, Any]:
    """The row of one case."""
    row: dict[str, Any] = {"model": model, "rows": rows, "tokens": tokens}
    for engine in ENGINES:
        print(f"{model}, {rows} × {tokens}, {engine}", file=sys.stderr, flush=True)
        found = ahead.compile_step(
            config_of(topology, len(devices), model, rows, tokens, engine), devices
        )
        row[engine] = {
            "runs_as": found["attention"]["mha"],
            "bytes": found["bytes_per_chip"]["total"],
            "cycles": found["estimated_cycles"],
        }
    return row


def config_of(topology, chips: int, model: str, rows: int, tokens: int, engine: str) -> Config:
    config = fit.config_of(fit.Cell("", topology, 1, model, "mha", 0.1), chips)
    config = experiment.with_attention(config, {"engine": engine})
    config = set_field(config, "data.sequence_length", tokens)
    return TASKS[config.task].with_rows(config, chips * rows)


def _million(cycles: int | None) -> str:
    return "-" if cycles is None else f"{cycles / 1e6:.1f}"


COLUMNS = {
    "model": lambda row: row["model"],
    "rows a chip": lambda row: f"{row['rows']} × {row['tokens']}",
    **{f"`{e}`, GiB": lambda row, e=e: f"{row[e]['bytes'] / 2**30:.2f}" for e in ENGINES},
    **{f"`{e}`, cycles / 10⁶": lambda row, e=e: _million(row[e]["cycles"]) for e in ENGINES},
}


if __name__ == "__main__":
    sys.exit(main())
