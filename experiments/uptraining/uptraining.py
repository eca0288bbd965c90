"""From a trained MHA to fewer parameters: scores at once, and after a part of the steps.

    python experiments/uptraining/uptraining.py translation
    python experiments/uptraining/uptraining.py lm --steps 40 --seeds 1    # a trial

Three `mha` runs are trained, each is converted to six other attentions (`python -m mhe_jax
convert`), and the new run is scored on the test set at once and after 5, 10 and 25 % of the steps
that the `mha` run took. Beside them stand each kind from nothing with 25 % of the steps, and the
control: `mha` itself, continued for as long. Each kind has, for each number of steps, the learning
rate with the lowest validation loss of seed 0: of three, and of halves or doubles of them while the
lowest or the highest is best, six at most.

WORKDIR/uptraining/TASK.json
gets every number as soon as a kind has all seeds of a number of steps; with it alone, and without
the runs, what it has is not repeated either. The table goes to standard output, with the scores of
whole runs from the records where there are any.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import command_line, runs
from experiments.paper.paper import MULTI30K, TRANSLATION
from experiments.reports import grid, shown
from experiments.runs import Record, Runs, flags_of, loss, read, search_rates

SHARES = (0.05, 0.1, 0.25)
RATES = ("5e-4", "1e-3", "2e-3")
# A start and a share of the steps: the columns of the table.
PARTS = [("at once", 0.0), *(("uptrained", share) for share in SHARES), ("nothing", SHARES[-1])]
# The control last, which is no news.
NAMES = ("gqa", "mva", "mhe_mul", "mhe_add-2-groups", "mhe_add", "mqa", "mha")
# Whole runs from nothing, of translation and of the language model.
RECORDS = Path(__file__).parents[1]
WHOLE = (RECORDS / "paper/records/translation", RECORDS / "atlas/records/lm/shape")


class Source(NamedTuple):
    """What is converted: the config of the runs, how long, at which rate, and how it is scored."""

    config: str
    data: str
    steps: int
    rate: str
    score: str
    # Rates of short runs from nothing.
    nothing: tuple[str, ...]
    # Width of the scores of `mva`.
    scores: str


SOURCES = {
    "translation": Source(*MULTI30K, 2100, "2e-3", "bleu", ("1e-3", "2e-3", "4e-3"), "128"),
    "lm": Source(
        *("wikitext2_lm.py", "wikitext-2", 2000, "4e-3", "perplexity_per_token"),
        *(("2e-3", "4e-3"), "64"),
    ),
}


class Uptraining:
    """The runs of one task below one directory."""

    def __init__(self, at: Runs, task: str, steps: int | None, seeds: int):
        self.at, self.task, self.source = at, task, SOURCES[task]
        self.steps = steps or self.source.steps
        self.seeds = tuple(map(str, range(seeds)))
        about = {"task": task, "steps": self.steps, "seeds": seeds}
        self.record = Record(at.directory / f"uptraining/{task}.json", about)

    def attention(self, name: str, before: str = "model.attention.") -> list[str]:
        fields = TRANSLATION[name]
        if name == "mva":
            fields = fields | {"score_features": self.source.scores}
        return flags_of(fields, before)

    def name(self, *parts: str) -> str:
        return f"uptraining/{self.task}/{','.join(parts)}"

    def train(self, name: str, steps: int, rate: str, seed: str, *flags: str) -> Path:
        flags = ("--optimizer.learning_rate", rate, "--train.seed", seed, *flags)
        if steps != self.source.steps:
            warmup = str(max(1, min(150, steps // 10)))
            flags += ("--train.num_steps", str(steps), "--optimizer.warmup_steps", warmup)
        return self.at.train(name, self.source.config, self.source.data, *flags)

    def trained(self, seed: str) -> Path:
        """The run that is converted."""
        name, flags = self.name("mha", f"seed={seed}"), self.attention("mha")
        run = self.train(name, self.steps, self.source.rate, seed, *flags)
        self.at.evaluate(run, "test")
        return run

    def converted(self, name: str, seed: str) -> Path:
        """The run converted and scored; `mha` as it is."""
        source = self.trained(seed)
        if name == "mha":
            return source
        run = self.at.directory / self.name(name, f"seed={seed}")
        with self.at.locks[run]:
            if not (run / "config.json").exists():
                flags = self.attention(name, "")
                self.at.call(run, "-m", "mhe_jax", "convert", str(source), str(run), *flags)
        self.at.evaluate(run, "test", "--checkpoint", "last")
        return run

    def part(self, name: str, start: str, share: float, rate: str, seed: str) -> Path:
        """A run of a part of the steps, from the converted one or from nothing."""
        if start == "uptrained":
            begun = ()
            flags = ["--train.init_from", str(self.converted(name, seed))]
        else:
            begun, flags = (start,), self.attention(name)
        name = self.name(name, *begun, f"share={share:g}", f"rate={rate}", f"seed={seed}")
        return self.train(name, self.steps_of(share), rate, seed, *flags)

    def steps_of(self, share: float) -> int:
        return max(1, round(share * self.steps))

    def kind(self, name: str) -> None:
        """Adds to the record what it lacks of a kind."""
        there = {(x["start"], x["share"]) for x in self.record.lines if x["attention"] == name}
        for part in PARTS:
            if part not in there:
                self.record.add(*self.lines(name, *part))

    def lines(self, name: str, start: str, share: float) -> list[dict[str, Any]]:
        """A line for each seed of a part, at the rate at which the first has the least loss."""
        if not share:
            found = [(self.converted(name, seed), seed) for seed in self.seeds]
            return [self.line(run, name, start, share, None, seed) for run, seed in found]
        rates = RATES if start == "uptrained" else self.source.nothing

        def make(rate: str, seed: str) -> Path:
            return self.part(name, start, share, rate, seed)

        losses = search_rates(rates, lambda rate: loss(make(rate, self.seeds[0])))
        rate = min(losses, key=losses.__getitem__)
        lines = [self.line(make(rate, seed), name, start, share, rate, seed) for seed in self.seeds]
        lines[0]["losses"] = losses  # in validation, by rate
        return lines

    def line(self, run: Path, name, start, share, rate, seed) -> dict[str, Any]:
        score = self.source.score
        # A run that was converted is scored already, by its last checkpoint.
        found = self.at.evaluate(run, "test")
        kept = {key: found.get(key) for key in ("device", "jax", "parameters", score)}
        if start != "nothing":  # what the `mha` run itself scores, trained here
            kept["source"] = read(self.trained(seed) / "eval_test.json")[score]
        who = {"attention": name, "start": start, "share": share, "rate": rate, "seed": int(seed)}
        return {**who, "steps": self.steps_of(share) if share else 0, **kept}


def table(lines: list[dict[str, Any]], score: str) -> str:
    """Mean ± standard deviation over seeds, of each kind after each number of steps."""
    head = ["attention", "parameters in attention", "at once"]
    head += [f"{share:.0%} of the steps" for share in SHARES]
    head += [f"from nothing, {SHARES[-1]:.0%}", "from nothing, all"]
    done, rows = {line["attention"] for line in lines}, []
    for name in (name for name in (NAMES[-1], *NAMES[:-1]) if name in done):
        own = [line for line in lines if line["attention"] == name]
        row = [name, shown((own[0]["parameters"] or {}).get("attention"))]
        for part in PARTS:
            row.append(_mean([x[score] for x in own if (x["start"], x["share"]) == part]))
        files = (file for place in WHOLE for file in place.glob(f"{name},*/eval_test.json"))
        row.append(_mean([found[score] for file in files if score in (found := read(file))]))
        rows.append(row)
    return grid(head, rows)


def _mean(scores: list[float]) -> str:
    if not scores:
        return "-"
    mean, deviation = runs.mean_and_deviation(scores)
    return f"{mean:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def main() -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("task", choices=SOURCES)
    positive: Callable[[str], int] = command_line.positive
    parser.add_argument("--steps", type=positive, help="of the mha runs, else the config's")
    parser.add_argument("--seeds", type=positive, default=3, help="of each case")
    args = parser.parse_args()
    at = Runs(args)
    work = Uptraining(at, args.task, args.steps, args.seeds)
    done = at.each(work.kind, NAMES)
    print(table(work.record.lines, work.source.score))
    return int(not done)


if __name__ == "__main__":
    sys.exit(main())
