"""The kinds of attention at equal size, by protocol.md here.

    python experiments/atlas/atlas.py lm
    python experiments/atlas/atlas.py translation
    python experiments/atlas/atlas.py lm_muon
    python experiments/atlas/atlas.py lm_large --jobs 12   # on a GPU: README.md has its flags
    python experiments/atlas/atlas.py lm_controls --stages 1    # "Controls" there
    python experiments/atlas/atlas.py lm_pass --jobs 1 --minutes 9  # on a GPU: "One pass" there
    python experiments/atlas/atlas.py lm --steps 20 --workdir runs/trial    # a trial
    python experiments/atlas/tables.py runs/atlas    # the tables of the page

Runs go in the order of `cases.stages`, two at a time with one core each. In each stage the learning
rate of every case is searched with seed 0 and a quarter of the steps, by validation loss: three
rates, and halves or doubles of them while the lowest or the highest is best, six at most. Of those
within 0.002 of the lowest loss, the lowest rate counts. Then the controls and the best of the other
cases have three fresh seeds with all steps, which are scored on the test set. The controls
(`cases.PLANS`) try two rates with all steps, and no others; all of their cases have fresh seeds.

WORKDIR/atlas/TASK.json has a line for each run that is done; with it alone, and without the runs,
they are not repeated. One that was interrupted goes on; one that failed, such as by a loss that is
not finite, stands there with its reason, until that line is deleted.
"""

import json
import math
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import command_line, reports, runs
from experiments.atlas import sizes
from experiments.atlas.cases import (
    CONTROLS,
    LARGE,
    MUON,
    PASS,
    PLANS,
    SOURCES,
    Case,
    Stage,
    base_of,
    models,
    stages,
)
from experiments.atlas.sizes import Fields
from experiments.runs import Failed, OutOfTime, Record, Runs, flags_of, note, read, search_rates
from mhe_jax.config.fields import load_json
from mhe_jax.tasks.cost import cached_numbers

# Where each search begins.
RATES = {
    "lm": ("2e-3", "4e-3", "8e-3"),
    "translation": ("1e-3", "2e-3", "4e-3"),
    LARGE: ("1e-3", "2e-3", "4e-3"),
    "lm_controls": ("4e-3", "8e-3"),
    "translation_controls": ("1e-3", "2e-3"),
    "lm_rotary": ("4e-3", "8e-3"),
    PASS: ("2e-3", "4e-3", "8e-3"),
    MUON: ("2e-3", "4e-3", "8e-3"),
}
SEARCH_SEED, SCORED_SEEDS, NEW_SEEDS = "0", ("1", "2", "3"), ("4", "5", "6")
# A search has a quarter of the steps.
SHORTER = 4
# Of rates whose losses are as close to the lowest as this, the lowest rate is taken.
TIE = 0.002


class Atlas:
    """The runs of one task below one directory."""

    def __init__(self, at: Runs, task: str, steps: int | None):
        self.at, self.task, self.source = at, task, SOURCES[task]
        self.steps = steps or base_of(task).train.num_steps
        self.planned = task in PLANS
        self.seeds = NEW_SEEDS if self.planned else SCORED_SEEDS
        self.seeds = self.seeds[:2] if task == PASS else self.seeds
        about = {"task": task, "steps": self.steps}
        self.record = Record(at.directory / f"atlas/{task}.json", about)

    def search(self, case: Case) -> tuple[str, float]:
        """The learning rate by the choosing seed, and its validation loss."""

        def loss(rate: str) -> float:
            return loss_of(self.line(case, rate, SEARCH_SEED))

        rates = RATES[self.task]
        losses = {r: loss(r) for r in rates} if self.planned else search_rates(rates, loss)
        rate = chosen(losses)
        return rate, losses[rate]

    def line(self, case: Case, rate: str, seed: str) -> dict[str, Any]:
        """The record's line of a run, which is made if it is not there."""
        fields = self.fields(case, seed)
        who = {**case._asdict(), "fields": fields, "rate": rate, "seed": int(seed)}
        for line in self.record.lines:
            if who.items() <= line.items():
                return line
        self.record.add(line := who | self.run(case, fields, rate, seed))
        return line

    def fields(self, case: Case, seed: str) -> Fields:
        """What lies over the config of the task."""
        config = base_of(self.task)
        short = seed == SEARCH_SEED and (not self.planned or self.task == PASS)
        steps = max(1, self.steps // SHORTER) if short else self.steps
        fields = models(self.task)[case.regime][case.name] | {"train.num_steps": steps}
        if steps < config.train.num_steps:
            warmup = config.optimizer.warmup_steps
            fields["optimizer.warmup_steps"] = max(1, warmup * steps // config.train.num_steps)
        return fields

    def run(self, case: Case, fields: Fields, rate: str, seed: str) -> dict[str, Any]:
        name = f"atlas/{self.task}/{case.regime}/{case.name},{rate},seed={seed}"
        flags = flags_of(fields | {"optimizer.learning_rate": rate, "train.seed": seed})
        scores = {}
        try:
            run = self.at.train(name, self.source.config, self.source.data, *flags)
            if seed in self.seeds:
                scores = self.at.evaluate(run, "test")
        except Failed as failed:
            if failed.status != 1:  # a signal or a wrong input is no result
                raise
            note(f"error: {failed}")
            return {"failed": failed.reason}
        result, config = read(run / runs.RESULT), load_json(run / "config.json")
        kept = ("steps", "best_step", "parameters", "training_seconds", "device", "jax")
        return {
            **{name: result[name] for name in kept},
            "validation_loss": result["best_validation_loss"],
            **{name: scores[name] for name in (self.source.score,) if name in scores},
            **({"curve": curve(run)} if self.task == PASS else {}),
            "cached": cached_numbers(config),
            "flops": sizes.flops(config),
            "processor": reports.processor(),
            "flax": reports.version_of("flax"),
        }


def belongs(line: dict[str, Any], case: Case) -> bool:
    return (line["regime"], line["name"]) == case


def curve(run: Path) -> list[tuple[int, float]]:
    """Step and validation loss."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["split"] == "validation"]


def loss_of(line: dict[str, Any]) -> float:
    """Of a run that failed, or never had one, it is infinite."""
    loss = line.get("validation_loss")
    return math.inf if loss is None or not math.isfinite(loss) else loss


def chosen(losses: Mapping[str, float]) -> str:
    """The learning rate of the lowest loss, or the lowest of those in a tie with it."""
    best = min(losses.values())
    return min((rate for rate, loss in losses.items() if loss <= best + TIE), key=float)


def measure(work: Atlas, stage: Stage) -> bool:
    """All runs of a stage, the controls' fresh seeds before those of the best others.

    Returns whether every one of them is done, or has failed by itself.
    """
    each = work.at.each
    found: dict[Case, tuple[str, float]] = {}

    def search(case: Case) -> None:
        found[case] = work.search(case)

    # The first rates of all at once: no core waits for the other rates of a case.
    first = product(stage.cases, RATES[work.task])
    each(lambda one: work.line(one[0], one[1], SEARCH_SEED), first)
    done = each(search, stage.cases)
    ranked = [case for case in found if math.isfinite(found[case][1])]
    ranked.sort(key=lambda case: (found[case][1], stage.cases.index(case)))
    controls = [case for case in ranked if case.name in CONTROLS]
    others = [case for case in ranked if case.name not in CONTROLS]
    seeds = [(case, seed) for case in controls + others[: stage.best] for seed in work.seeds]
    return done & each(lambda one: work.line(one[0], found[one[0]][0], one[1]), seeds)


def main() -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("task", choices=SOURCES)
    positive = command_line.positive
    parser.add_argument("--steps", type=positive, help="of each run, else the config's")
    parser.add_argument("--stages", type=positive, help="the first so many; else all")
    parser.add_argument(
        "--minutes", type=positive, help="then it stops, to go on when called again"
    )
    args = parser.parse_args()
    work = Atlas(Runs(args, args.minutes), args.task, args.steps)
    try:
        return int(not all([measure(work, stage) for stage in stages(args.task)[: args.stages]]))
    except OutOfTime:
        note("time is up: the same command goes on")
        return 1


if __name__ == "__main__":
    sys.exit(main())
