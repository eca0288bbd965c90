"""From a trained MHA to fewer parameters: scores at once, and after a part of the steps.

    python benchmarks/uptraining.py translation
    python benchmarks/uptraining.py lm
    python benchmarks/uptraining.py translation --steps 40 --seeds 1    # a trial of the script

Three `mha` runs are trained (or found: WORKDIR/uptraining/translation/mha,seed=N), each is
converted to six other attentions (`python -m mhe_jax convert`), and the new run is scored on the
test set at once and after 5, 10 and 25 % of the steps that the `mha` run took. Beside them stand
each kind from nothing with 25 % of the steps, and the control: `mha` itself, continued for as long.
Each kind has, for each number of steps, the learning rate with the lowest validation loss of seed
0: of three, and of halves or doubles of them while the lowest or the highest is best, six at most.

A run that is done is not repeated, one that was interrupted goes on. WORKDIR/uptraining/TASK.json
gets every number, with version, device and the score of the `mha` run, as soon as a kind has all
seeds of a number of steps; with it alone, and without the runs, what it has is not repeated
either. The table goes to standard output, with the scores of the whole runs of docs/records where
there are any. Two cases at a time, one core each.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import command_line, experiments
from benchmarks.experiments import TRANSLATION, attention
from benchmarks.workplace import Failed, Record, Workplace, add_flags, loss, note, search_rates
from mhe_jax.cli.sweep import plan
from mhe_jax.config import InputError
from mhe_jax.report.tables import Column, Table, mean_and_deviation

SHARES = (0.05, 0.1, 0.25)
RATES = ("5e-4", "1e-3", "2e-3")
# Whole runs from nothing, of translation and of the language model.
RECORDS = Path(__file__).parents[1] / "docs" / "records"
WHOLE = (RECORDS / "translation", RECORDS / "atlas" / "lm" / "shape")
NAMES = ("gqa", "mva", "mhe_mul", "mhe_add-2-groups", "mhe_add", "mqa")


@dataclass(frozen=True)
class Source:
    """What is converted: the config of the runs, how long, at which rate, and how it is scored."""

    config: str
    data: str
    steps: int
    rate: str
    score: str
    # Rates of short runs from nothing.
    nothing: tuple[str, ...]
    # Fields of attention that differ from those of the translation.
    fields: dict[str, dict[str, str]]

    def attention(self, name: str) -> dict[str, str]:
        return self.fields.get(name, TRANSLATION[name])


SOURCES = {
    "translation": Source(
        *experiments.MULTI30K, 2100, "2e-3", "bleu", ("1e-3", "2e-3", "4e-3"), {}
    ),
    "lm": Source(
        "wikitext2_lm.py",
        "wikitext-2",
        2000,
        "4e-3",
        "perplexity_per_token",
        ("2e-3", "4e-3"),
        {"mva": {"kind": "mva", "score_features": "64"}},
    ),
}


class Uptraining:
    """The runs of one task below one directory."""

    def __init__(self, at: Workplace, task: str, steps: int | None, seeds: int):
        self.at, self.task, self.source = at, task, SOURCES[task]
        self.steps = steps or self.source.steps
        self.seeds = tuple(map(str, range(seeds)))

    def name(self, *parts: str) -> str:
        return f"uptraining/{self.task}/{','.join(parts)}"

    def train(self, name: str, steps: int, rate: str, seed: str, *flags: str) -> Path:
        warmup = str(max(1, min(150, steps // 10)))
        flags = ("--optimizer.learning_rate", rate, "--train.seed", seed, *flags)
        if steps != self.source.steps:
            flags += ("--train.num_steps", str(steps), "--optimizer.warmup_steps", warmup)
        return self.at.train(name, self.source.config, self.source.data, *flags)

    def trained(self, seed: str) -> Path:
        """The run that is converted."""
        flags = attention({"kind": "mha"})
        run = self.train(
            self.name("mha", f"seed={seed}"), self.steps, self.source.rate, seed, *flags
        )
        self.at.evaluate(run, "test")
        return run

    def converted(self, name: str, seed: str) -> Path:
        """The run converted and scored; `mha` as it is."""
        source = self.trained(seed)
        if name == "mha":
            return source
        run = self.at.directory / self.name(name, f"seed={seed}")
        with self.at.locks[run]:
            if not (run / plan.CONFIG).exists():
                fields = self.source.attention(name)
                flags = [part for field, value in fields.items() for part in (f"--{field}", value)]
                self.at.call(run, "-m", "mhe_jax", "convert", str(source), str(run), *flags)
        self.at.evaluate(run, "test", "--checkpoint", "last")
        return run

    def uptrained(self, name: str, share: float, rate: str, seed: str) -> Path:
        start = self.converted(name, seed)
        parts = (name, f"share={share:g}", f"rate={rate}", f"seed={seed}")
        return self.train(
            self.name(*parts), self.part(share), rate, seed, "--train.init_from", str(start)
        )

    def from_nothing(self, name: str, share: float, rate: str, seed: str) -> Path:
        flags = attention(self.source.attention(name))
        parts = (name, "nothing", f"share={share:g}", f"rate={rate}", f"seed={seed}")
        return self.train(self.name(*parts), self.part(share), rate, seed, *flags)

    def part(self, share: float) -> int:
        return max(1, round(share * self.steps))

    def missing(self, record: Record, name: str) -> list[tuple[str, float]]:
        """The parts of one kind, its start and its share of the steps, that a record lacks."""
        starts = (("at once", 0.0), *(("uptrained", share) for share in SHARES))
        there = {(x["start"], x["share"]) for x in record.lines if x["attention"] == name}
        return [part for part in (*starts, ("nothing", SHARES[-1])) if part not in there]

    def lines(self, name: str, start: str, share: float) -> list[dict[str, Any]]:
        """A line for each run of a part that was scored on the test set."""
        if start == "at once":
            runs = [(self.converted(name, seed), seed) for seed in self.seeds]
            return [self.line(run, name, start, share, None, seed) for run, seed in runs]
        if start == "nothing":
            return self.chosen(name, start, share, self.source.nothing, self.from_nothing)
        return self.chosen(name, start, share, RATES, self.uptrained)

    def chosen(self, name, start, share, rates, make) -> list[dict[str, Any]]:
        """All seeds of the rate, of `rates` and beyond, at which the first has the least loss."""
        losses = search_rates(rates, lambda rate: loss(make(name, share, rate, self.seeds[0])))
        rate = min(losses, key=losses.__getitem__)
        lines = []
        for seed in self.seeds:
            run = make(name, share, rate, seed)
            self.at.evaluate(run, "test")
            lines.append(self.line(run, name, start, share, rate, seed))
        lines[0]["losses"] = losses  # in validation, by rate
        return lines

    def line(self, run: Path, name, start, share, rate, seed) -> dict[str, Any]:
        found = json.loads((run / "eval_test.json").read_text())
        kept = {k: found.get(k) for k in ("device", "jax", "parameters", self.source.score)}
        if start != "nothing":  # what the `mha` run itself scores, trained here
            trained = self.trained(seed)
            kept["source"] = json.loads((trained / "eval_test.json").read_text())[self.source.score]
        who = {"attention": name, "start": start, "share": share, "rate": rate, "seed": int(seed)}
        return {**who, "steps": self.part(share) if share else 0, **kept}


def table(lines: list[dict[str, Any]], score: str) -> Table:
    """Mean ± standard deviation over seeds, of each kind after each number of steps."""
    columns = [Column("attention"), Column("parameters in attention", 0), Column("at once")]
    columns += [Column(f"{share:.0%} of the steps") for share in SHARES]
    columns += [Column(f"from nothing, {SHARES[-1]:.0%}"), Column("from nothing, all")]
    rows = []
    done = {line["attention"] for line in lines}
    for name in (name for name in ("mha", *NAMES) if name in done):
        own = [line for line in lines if line["attention"] == name]
        row = [name, own[0]["parameters"]["attention"] if own[0].get("parameters") else None]
        for start, share in (
            ("at once", 0.0),
            *(("uptrained", share) for share in SHARES),
            ("nothing", SHARES[-1]),
        ):
            row.append(_mean([x[score] for x in own if (x["start"], x["share"]) == (start, share)]))
        row.append(_mean(_recorded(name, score)))
        rows.append(row)
    return Table("uptraining", "From a trained MHA", columns, rows)


def _recorded(name: str, score: str) -> list[float]:
    """Of whole runs from nothing, at their best rate: the one that has scores."""
    files = (file for place in WHOLE for file in place.glob(f"{name},*/eval_test.json"))
    return [found[score] for f in files if score in (found := json.loads(f.read_text()))]


def _mean(scores: list[float]) -> str:
    if not scores:
        return "-"
    mean, deviation = mean_and_deviation(scores)
    return f"{mean:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def main() -> None:
    args = parse()
    at = Workplace(args.workdir, args.directory, args.jobs)
    work = Uptraining(at, args.task, args.steps, args.seeds)
    failed = []

    def case(name: str) -> None:
        try:
            for part in work.missing(record, name):
                record.add(*work.lines(name, *part))
        except (Failed, InputError) as error:
            note(f"error: {error}")
            failed.append(name)

    try:
        about = {"task": work.task, "steps": work.steps, "seeds": len(work.seeds)}
        record = Record(at.directory / f"uptraining/{work.task}.json", about)
        with at, record, ThreadPoolExecutor(args.jobs) as pool:
            # The control last, which is no news.
            missing = {name: work.missing(record, name) for name in (*NAMES, "mha")}
            if any(start != "nothing" for parts in missing.values() for start, _ in parts):
                list(pool.map(work.trained, work.seeds))  # all of these need them
                if not record.lines:
                    record.add(*work.lines("mha", "at once", 0.0))
            list(pool.map(case, (name for name, parts in missing.items() if parts)))
    except KeyboardInterrupt:
        note("stopped; the same command resumes")
        sys.exit(130)
    except (Failed, InputError) as error:
        note(f"error: {error}")
        sys.exit(1)
    print(table(record.lines, work.source.score).markdown())
    sys.exit(bool(failed))


def parse() -> argparse.Namespace:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("task", choices=SOURCES)
    add_flags(parser, "cases")
    parser.add_argument(
        "--steps", type=command_line.positive, help="of the mha runs, else the config's"
    )
    parser.add_argument("--seeds", type=command_line.positive, default=3, help="of each case")
    return parser.parse_args()


if __name__ == "__main__":
    main()
