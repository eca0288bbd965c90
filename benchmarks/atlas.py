"""The kinds of attention at equal size, by the protocol of docs/atlas.md.

    python benchmarks/atlas.py lm
    python benchmarks/atlas.py translation
    python benchmarks/atlas.py lm_large --jobs 12   # on a GPU: docs/atlas.md, "Commands"
    python benchmarks/atlas.py lm --steps 20 --budget 0.1 --workdir runs/trial    # a trial
    python benchmarks/atlas_tables.py runs/atlas    # the tables of docs/atlas.md

Runs go in the order of `atlas_cases.stages`, two at a time with one core each. In each stage the
learning rate of every case is searched with seed 0 and a quarter of the steps, by validation loss:
three rates, and halves or doubles of them while the lowest or the highest is best, six at most. Of
those within 0.002 of the lowest loss, the lowest rate counts. Then the controls and the best of the
other cases have three fresh seeds with all steps, which are scored on the test set.

WORKDIR/atlas/TASK.json has a line for each run that is done, with what it took; with it alone, and
without the runs, they are not repeated. One that was interrupted goes on; one that failed, such as
by a loss that is not finite, stands there with its reason, until that line is deleted. After
`--budget` hours of processor time of all lines together no new run begins. Runs of
docs/records/translation stand for those with the same config.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import command_line, experiments, reports, sizes
from benchmarks.atlas_cases import CONTROLS, LARGE, SOURCES, Case, Stage, base_of, models, stages
from benchmarks.sizes import Fields
from benchmarks.workplace import (
    PARSING,
    ROOT,
    Failed,
    Record,
    Workplace,
    add_flags,
    note,
    search_rates,
)
from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.cli.sweep import plan
from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import leaves, load_json, to_dict
from mhe_jax.tasks.cache import cached_numbers

# Where each search begins.
RATES = {
    "lm": ("2e-3", "4e-3", "8e-3"),
    "translation": experiments.RATES,
    LARGE: ("1e-3", "2e-3", "4e-3"),
}
# Hours of processor time: 25 in all. On a GPU they bound nothing.
HOURS = {"lm": 18.0, "translation": 7.0, LARGE: math.inf}
SEARCH_SEED, SCORED_SEEDS = "0", ("1", "2", "3")
# A search has a quarter of the steps.
SHORTER = 4
# Of rates whose losses are as close to the lowest as this, the lowest rate is taken.
TIE = 0.002
RECORDS = ROOT / "docs" / "records" / "translation"
SCORES = "eval_test.json"


class Spent(Exception):
    """No new run may begin."""


class Atlas:
    """The runs of one task below one directory."""

    def __init__(self, at: Workplace, task: str, steps: int | None, budget: float):
        self.at, self.task, self.source, self.budget = at, task, SOURCES[task], budget
        self.steps = steps or base_of(task).train.num_steps
        about = {"task": task, "steps": self.steps}
        self.record = Record(at.directory / f"atlas/{task}.json", about)
        if not (data := at.data / self.source.data).is_dir():
            raise InputError(f"there is no {data}: --data.directory is where the data lies")

    def search(self, case: Case) -> tuple[str, float]:
        """The learning rate by the choosing seed, and its validation loss."""
        rates = RATES[self.task]
        losses = search_rates(rates, lambda rate: loss_of(self.line(case, rate, SEARCH_SEED)))
        rate = chosen(losses)
        return rate, losses[rate]

    def line(self, case: Case, rate: str, seed: str) -> dict[str, Any]:
        """The record's line of a run, which is made if it is not there."""
        fields = self.fields(case, seed)
        who = {**case._asdict(), "fields": fields, "rate": rate, "seed": int(seed)}
        for line in self.record.lines:
            if who.items() <= line.items():
                return line
        line = who | (self.recorded(case, fields, rate, seed) or self.run(case, fields, rate, seed))
        self.record.add(line)
        return line

    def fields(self, case: Case, seed: str) -> Fields:
        """What lies over the config of the task."""
        fields = models(self.task)[case.regime][case.name]
        config = base_of(self.task)
        steps = fields.get("train.num_steps", self.steps)
        if self.steps != config.train.num_steps:
            steps = self.steps
        if seed == SEARCH_SEED:
            steps = max(1, steps // SHORTER)
        fields = fields | {"train.num_steps": steps}
        if steps < config.train.num_steps:
            warmup = config.optimizer.warmup_steps
            fields["optimizer.warmup_steps"] = max(1, warmup * steps // config.train.num_steps)
        return fields

    def recorded(self, case: Case, fields: Fields, rate: str, seed: str) -> dict[str, Any] | None:
        """Of the same run in docs/records/translation, if its config is the same."""
        run = RECORDS / f"{case.name},{rate},seed={seed}"
        if not (run / plan.CONFIG).exists() or (
            seed in SCORED_SEEDS and not (run / SCORES).exists()
        ):
            return None
        asked, found = (
            {
                field: value
                for field, value in leaves(to_dict(config)).items()
                if field not in ("workdir", "data.directory")
            }
            for config in (self.config(fields, rate, seed), load_json(run / plan.CONFIG))
        )
        if asked != found:
            return None
        return self.results(run, seed) | {
            "from": f"docs/records/translation/{run.name}",
            "hours": 0,
        }

    def config(self, fields: Fields, rate: str, seed: str) -> Config:
        flags = flags_of(fields, rate, seed)
        arguments = self.at.arguments(self.source.config, self.source.data, *flags)
        with PARSING:
            return parse_train_arguments(arguments)

    def run(self, case: Case, fields: Fields, rate: str, seed: str) -> dict[str, Any]:
        if sum(line["hours"] for line in self.record.lines) >= self.budget:
            raise Spent
        name = f"atlas/{self.task}/{case.regime}/{case.name},{rate},seed={seed}"
        run = self.at.directory / name
        try:
            flags = flags_of(fields, rate, seed)
            self.at.train(name, self.source.config, self.source.data, *flags)
            if seed in SCORED_SEEDS:
                self.at.evaluate(run, "test")
        except Failed as failed:
            if failed.status != 1:  # a signal or a wrong input is no result
                raise
            note(f"error: {failed}")
            return {"failed": failed.reason, "hours": self.hours(run)}
        where = {"processor": reports.processor(), "flax": reports.version_of("flax")}
        return self.results(run, seed) | where | {"hours": self.hours(run)}

    def hours(self, run: Path) -> float:
        return round(self.at.seconds[run] / 3600, 4)

    def results(self, run: Path, seed: str) -> dict[str, Any]:
        """What the files of a run say."""
        result, config = json.loads((run / plan.RESULT).read_text()), load_json(run / plan.CONFIG)
        scores = json.loads((run / SCORES).read_text()) if seed in SCORED_SEEDS else {}
        kept = ("steps", "best_step", "parameters", "training_seconds", "device", "jax")
        return {
            **{name: result[name] for name in kept},
            "validation_loss": result["best_validation_loss"],
            **{name: scores[name] for name in (self.source.score,) if name in scores},
            "cached": cached_numbers(config),
            "flops": sizes.flops(config),
        }


def flags_of(fields: Fields, rate: str, seed: str) -> list[str]:
    every = fields | {"optimizer.learning_rate": rate, "train.seed": seed}
    return [part for field, value in every.items() for part in (f"--{field}", str(value))]


def belongs(line: dict[str, Any], case: Case) -> bool:
    return (line["regime"], line["name"]) == case


def loss_of(line: dict[str, Any]) -> float:
    """Of a run that failed, or never had one, it is infinite."""
    loss = line.get("validation_loss")
    return math.inf if loss is None or not math.isfinite(loss) else loss


def chosen(losses: Mapping[str, float]) -> str:
    """The learning rate of the lowest loss, or the lowest of those in a tie with it."""
    best = min(losses.values())
    return min((rate for rate, loss in losses.items() if loss <= best + TIE), key=float)


def measure(work: Atlas, stage: Stage, jobs: int) -> bool:
    """All runs of a stage, the controls' fresh seeds before those of the best others.

    A case whose first rates are not all there, as one was killed, goes no further.

    Returns whether every one of them is done, or has failed by itself.
    """
    done = True

    def attempt(call: Callable[..., Any], *args: Any) -> Any:
        nonlocal done
        try:
            return call(*args)
        except (Failed, InputError) as error:
            note(f"error: {error}")
            done = False

    with ThreadPoolExecutor(jobs) as pool:
        # The first rates of all cases together: none waits for another.
        first = [(case, rate) for case in stage.cases for rate in RATES[work.task]]
        lines = pool.map(lambda one: attempt(work.line, *one, SEARCH_SEED), first)
        missing = {case for (case, _), line in zip(first, lines, strict=True) if line is None}
        cases = [case for case in stage.cases if case not in missing]
        searched = pool.map(functools.partial(attempt, work.search), cases)
        pairs = zip(cases, searched, strict=True)
        found = {case: result for case, result in pairs if result}
        ranked = sorted(found, key=lambda case: found[case][1])
        ranked = [case for case in ranked if math.isfinite(found[case][1])]
        controls = [case for case in ranked if case.name in CONTROLS]
        others = [case for case in ranked if case.name not in CONTROLS]
        seeds = [(case, seed) for case in controls + others[: stage.best] for seed in SCORED_SEEDS]
        runs = [(work.line, case, found[case][0], seed) for case, seed in seeds]
        list(pool.map(lambda run: attempt(*run), runs))
    return done


def main() -> None:
    args = parse()
    at = Workplace(args.workdir, args.directory, args.jobs)
    done = True
    try:
        budget = HOURS[args.task] if args.budget is None else args.budget
        work = Atlas(at, args.task, args.steps, budget)
        with at, work.record:
            for stage in stages(args.task):
                done = measure(work, stage, args.jobs) and done
    except KeyboardInterrupt:
        note("stopped; the same command resumes")
        sys.exit(130)
    except Spent:
        note(f"{budget:g} hours are spent: give a larger --budget to go on")
    except InputError as error:
        note(f"error: {error}")
        sys.exit(2)
    sys.exit(not done)


def parse() -> argparse.Namespace:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("task", choices=SOURCES)
    add_flags(parser, "runs")
    parser.add_argument(
        "--steps", type=command_line.positive, help="of each run, else the config's"
    )
    hours = "hours of processor time of all runs, else those of docs/atlas.md; lm_large has no end"
    parser.add_argument("--budget", type=command_line.positive_number, help=hours)
    return parser.parse_args()


if __name__ == "__main__":
    main()
