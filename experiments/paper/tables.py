"""The tables of this page that `eval.py compare` does not make, from the runs themselves.

    python experiments/paper/tables.py runs
    python experiments/paper/tables.py experiments/paper/records

Encoders: pre-training, and each task from it (mean over seeds) and from nothing. Hashed words:
pre-training, with the same model without context beside it, and tasks, also with a tenth and a
fifth of the words misspelt. Small matrices: a trained model factorized, before and after a little
more training. What is not there is "-".
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax

from experiments import command_line
from experiments.paper import paper
from experiments.reports import grid, shown
from experiments.runs import mean_and_deviation, read
from mhe_jax.config.fields import load_json
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS

EMBEDDINGS = (*paper.HASHES, "pieces")


def score_of(run: Path, file: str = "eval_validation.json") -> float | None:
    return read(run / file).get("score")


def embedding_parameters(run: Path) -> int | None:
    """Numbers of what makes a vector of a token, without positions."""
    if not (run / "config.json").exists():
        return None
    config = load_json(run / "config.json")
    initialize = TASKS[config.task].initializer(TASKS[config.task].model(config.model), 2)
    params = jax.eval_shape(initialize, jax.random.key(0))
    return count_parameters(params["embeddings"]["token"])["total"]


def encoders(runs: Path) -> str:
    head = ["attention", "its parameters", "MLM perplexity"]
    for task in paper.TASKS:
        head += [task, f"± of {task}", f"{task} from nothing"]
    rows = []
    for name in paper.ENCODERS:
        found = read(runs / "mlm" / name / "eval_test.json")
        count = found.get("parameters", {}).get("attention")
        row = [name, shown(count), shown(found.get("perplexity"), 1)]
        for task in paper.TASKS:
            scores = [score_of(runs / task / f"{name},seed={seed}") for seed in paper.SEEDS]
            scores = [score for score in scores if score is not None]
            row += [shown(x, 2) for x in (mean_and_deviation(scores) if scores else (None, None))]
            row.append(shown(score_of(runs / task / f"{name},nothing,seed=0"), 2))
        rows.append(row)
    return grid(head, rows)


def pretraining(runs: Path) -> str:
    head = ["embedding", "its parameters", "AUC", "nats", "accuracy"]
    head += ["nats without context", "accuracy without context"]
    rows = []
    for name in EMBEDDINGS:
        run = runs / "hashes" / name
        found, alone = (
            read(one / "eval_test.json") for one in (run, run.with_name(f"{name},alone"))
        )
        row = [name, shown(embedding_parameters(run)), shown(found.get("auc"), 3)]
        for scores in (found, alone):
            accuracy = scores.get("accuracy")
            row += [shown(scores.get("loss"), 4), shown(accuracy and 100 * accuracy, 2)]
        rows.append(row)
    return grid(head, rows)


def tasks(runs: Path) -> Iterator[str]:
    noises = [f"eval_{paper.misspelt(rate)}.json" for rate in paper.NOISE]
    for task in paper.TASKS:
        # Of CoLA no share is told: its standard error is a third of the score.
        shares = task != "cola"
        head = ["embedding", "score", *["% of pieces"] * shares]
        head += [f"{float(rate):.0%} of words misspelt" for rate in paper.NOISE]
        where = runs / f"{task}-hashes"
        pieces = score_of(where / "pieces")
        rows = []
        for name in EMBEDDINGS:
            score = score_of(where / name)
            share = 100 * score / pieces if score and pieces else None
            noisy = (score_of(where / name, file) for file in noises)
            share = [shown(share, 1)] * shares
            rows.append([name, shown(score, 2), *share, *(shown(x, 2) for x in noisy)])
        yield grid(head, rows)


def warm(runs: Path) -> str:
    rows = []
    for rank in paper.WARM_RANKS:
        before, after = (
            read(runs / "warm" / rank / file) for file in ("before.json", "eval_test.json")
        )
        total = before.get("parameters", {}).get("total")
        scores = (shown(found.get("bleu"), 2) for found in (before, after))
        rows.append([shown(int(rank)), shown(total), *scores])
    return grid(["terms", "parameters", "BLEU at once", "after 300 steps"], rows)


def main() -> None:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("runs", type=Path, help="--workdir of paper.py")
    runs = parser.parse_args().runs
    if not runs.is_dir():
        parser.error(f"there is no {runs}")
    print(*(encoders(runs), pretraining(runs), *tasks(runs), warm(runs)), sep="\n\n")


if __name__ == "__main__":
    main()
