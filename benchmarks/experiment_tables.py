"""Tables of docs/experiments.md that `eval.py compare` does not make, from the runs themselves.

    python benchmarks/experiment_tables.py runs
    python benchmarks/experiment_tables.py docs/records

Encoders: pre-training, and each task from it (mean over seeds) and from nothing. Hashed words:
pre-training, with the same model without context beside it, and tasks, also with a tenth and a
fifth of the words misspelt. Small matrices: a trained model factorized, before and after a little
more training. What is not there is "-".
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import command_line, experiments
from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json
from mhe_jax.model import count_parameters
from mhe_jax.report.tables import Column, Table, mean_and_deviation
from mhe_jax.tasks import TASKS

EMBEDDINGS = (*experiments.HASHES, "pieces")


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def score_of(run: Path, file: str = "eval_validation.json") -> float | None:
    return read(run / file).get("score")


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def embedding_parameters(run: Path) -> int | None:
    """Numbers of what makes a vector of a token, without positions."""
    if not (run / "config.json").exists():
        return None
    config = load_json(run / "config.json")
    initialize = TASKS[config.task].initializer(TASKS[config.task].model(config.model), 2)
    params = jax.eval_shape(initialize, jax.random.key(0))
    return count_parameters(params["embeddings"]["token"])["total"]


def encoders(runs: Path) -> Table:
    columns = [Column("attention"), Column("its parameters", 0), Column("MLM perplexity", 1)]
    for task in experiments.TASKS:
        columns += [Column(task, 2), Column(f"± of {task}", 2), Column(f"{task} from nothing", 2)]
    rows = []
    for name in experiments.ENCODERS:
        found = read(runs / "mlm" / name / "eval_test.json")
        row = [name, found.get("parameters", {}).get("attention"), found.get("perplexity")]
        for task in experiments.TASKS:
            scores = [
                score
                for seed in experiments.SEEDS
                if (score := score_of(runs / task / f"{name},seed={seed}")) is not None
            ]
            row += mean_and_deviation(scores) if scores else (None, None)
            row.append(score_of(runs / task / f"{name},nothing,seed=0"))
        rows.append(row)
    return Table("encoders", "Encoders", columns, rows)


def pretraining(runs: Path) -> Table:
    columns = [Column("embedding"), Column("its parameters", 0), Column("AUC", 3)]
    columns += [Column("nats", 4), Column("accuracy", 2)]
    columns += [Column("nats without context", 4), Column("accuracy without context", 2)]
    rows = []
    for name in EMBEDDINGS:
        run = runs / "hashes" / name
        found, alone = (
            read(one / "eval_test.json") for one in (run, run.with_name(f"{name},alone"))
        )
        row = [name, embedding_parameters(run), found.get("auc")]
        for scores in (found, alone):
            row += [scores.get("loss"), percent(scores.get("accuracy"))]
        rows.append(row)
    return Table("hashes", "Hashed words: original, moved or random", columns, rows)


def tasks(runs: Path) -> Iterator[Table]:
    noises = [f"eval_{experiments.misspelt(rate)}.json" for rate in experiments.NOISE]
    for task in experiments.TASKS:
        # Of CoLA no share is told: its standard error is a third of the score.
        shares = task != "cola"
        columns = [Column("embedding"), Column("score", 2)]
        columns += [Column("% of pieces", 1)] * shares
        columns += [Column(f"{float(rate):.0%} of words misspelt", 2) for rate in experiments.NOISE]
        where = runs / f"{task}-hashes"
        found = {
            name: [score_of(where / name, file) for file in ("eval_validation.json", *noises)]
            for name in EMBEDDINGS
        }
        pieces = found["pieces"][0]
        rows = [
            [name, score, *[100 * score / pieces if score and pieces else None] * shares, *noisy]
            for name, (score, *noisy) in found.items()
        ]
        yield Table(task, f"Hashed words: {task}", columns, rows)


def warm(runs: Path) -> Table:
    columns = [Column("terms", 0), Column("parameters", 0), Column("BLEU at once", 2)]
    columns += [Column("after 300 steps", 2)]
    rows = []
    for rank in experiments.WARM_RANKS:
        before, after = (
            read(runs / "warm" / rank / file) for file in ("before.json", "eval_test.json")
        )
        total = before.get("parameters", {}).get("total")
        rows.append([int(rank), total, before.get("bleu"), after.get("bleu")])
    return Table("warm", "A trained model factorized", columns, rows)


def main() -> None:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("runs", type=Path, help="--workdir of benchmarks/experiments.py")
    runs = parser.parse_args().runs
    if not runs.is_dir():
        parser.error(f"there is no {runs}")
    try:
        for table in (encoders(runs), pretraining(runs), *tasks(runs), warm(runs)):
            print(table.markdown(), end="\n\n")
    except (InputError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
