"""Language models as they were trained, and with int8 matrices: size, speed and perplexity.

    python experiments/serving/int8.py runs/mha runs/mva runs/mhe_add --out int8.json

Runs of task lm, each loaded as it is and with `quantize="int8"`, on a CPU or any other device. All
cases take turns, once a round.

    MB            bytes of all parameters
    matrices      bytes of those that became int8, with their scales, over the same in float32
    step ms       one more token of --rows texts, over a cache of model.max_length positions
    pass ms       log-probabilities of --rows texts of data.sequence_length tokens
    perplexity    of a token of the whole test split
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

import mhe_jax
from experiments import command_line, reports, timing
from mhe_jax import tasks
from mhe_jax.cli.process import ask_for_huge_pages
from mhe_jax.config import InputError
from mhe_jax.data import NUM_SPECIAL
from mhe_jax.evaluation.quantization import is_int8

COLUMNS: dict[str, Callable[[dict], str]] = {
    "case": lambda row: row["case"],
    "MB": lambda row: f"{row['bytes'] / 1e6:.2f}",
    "matrices": lambda row: reports.shown(row["share"], 3),
    "step ms": lambda row: reports.milliseconds(row["step"]),
    "quartiles": lambda row: reports.quartiles(row["step"]),
    "pass ms": lambda row: reports.milliseconds(row["pass"]),
    "quartiles ": lambda row: reports.quartiles(row["pass"]),
    "perplexity": lambda row: reports.shown(row["perplexity"], 2),
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="of task lm")
    parser.add_argument("--rows", type=command_line.positive, default=1)
    parser.add_argument("--rounds", type=command_line.positive, default=30)
    parser.add_argument("--unscored", action="store_true", help="no perplexity, for speed alone")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args(arguments)
    try:
        rows, left_out = measured(args)
    except InputError as error:
        parser.error(str(error))
    about = reports.header(__file__, "float32", arguments)
    about["versions"]["qwix"] = reports.version_of("qwix")
    return reports.finish(args.out, about, COLUMNS, rows, left_out, f"{args.rows} rows")


def measured(args) -> tuple[list[dict[str, Any]], timing.LeftOut]:
    """A row for each run as it is and in int8, and what was left out."""
    rows, cases, left_out = [], [], timing.LeftOut()
    for path in args.runs:
        for numbers in (None, "int8"):
            run = mhe_jax.load(path, quantize=numbers, devices=jax.devices()[:1])
            if run.config.task != "lm":
                raise InputError(f"{path} is a run of task {run.config.task}: takes lm")
            row = {"case": f"{path.name} {numbers or run.config.model.dtype}"} | size(run.params)
            rows.append(row | {"perplexity": None if args.unscored else perplexity(run)})
            cases += [step(run, row["case"], args.rows), scoring(run, row["case"], args.rows)]
    found = {}
    for told in timing.measure(cases, args.rounds, left_out):
        found[told["case"]] = told
    for row in rows:
        row |= {part: found[f"{row['case']}, {part}"] for part in ("step", "pass")}
    return rows, left_out


def size(params: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves(params, is_leaf=is_int8)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    int8 = [leaf for leaf in leaves if is_int8(leaf)]
    small = sum(leaf.nbytes for leaf in jax.tree.leaves(int8))
    large = 4 * sum(leaf.array.qvalue.size for leaf in int8)
    return {"bytes": held, "share": small / large if int8 else None}


def perplexity(run: Any) -> float:
    """As `eval.py` finds it, without its files."""
    found, batches, _ = run.outputs()
    return tasks.of(run.config).result(run.config, found, batches)["perplexity_per_token"]


def step(run: Any, name: str, rows: int) -> timing.Case:
    model, length = run.model, run.config.model.max_length
    start = {"method": "start_cache", "mutable": ["cache"]}
    _, cache = model.apply({"params": run.params}, rows, length, **start)
    # As many tokens before it as there are after it.
    read = tokens(run, rows, length // 2)
    append = {"method": "decode_step", "mutable": ["cache"]}

    @jax.jit
    def more(params, cache, tokens, positions):
        return model.apply({"params": params, **cache}, tokens, positions, **append)

    _, cache = more(run.params, cache, read, np.tile(np.arange(length // 2), (rows, 1)))
    given = run.params, cache, read[:, :1], np.full((rows, 1), length // 2)
    compiled = more.lower(*given).compile()
    return timing.Case({"case": f"{name}, step"}, lambda: compiled(*given))


def scoring(run: Any, name: str, rows: int) -> timing.Case:
    read = tokens(run, rows, run.config.data.sequence_length)
    forward = jax.jit(lambda params, x: jax.nn.log_softmax(run.model.apply({"params": params}, x)))
    compiled = forward.lower(run.params, read).compile()
    return timing.Case({"case": f"{name}, pass"}, lambda: compiled(run.params, read))


def tokens(run: Any, rows: int, length: int) -> np.ndarray:
    draw, most = np.random.default_rng(0), run.config.model.vocabulary_size
    return draw.integers(NUM_SPECIAL, most, (rows, length), np.int32)


if __name__ == "__main__":
    ask_for_huge_pages()  # as `train.py` does
    sys.exit(main())
