"""The tables of docs/atlas.md, from the records of benchmarks/atlas.py.

    python benchmarks/atlas_tables.py runs/atlas
    python benchmarks/atlas_tables.py docs/records/atlas

What no run has measured says so; sizes and costs are those of the closed forms.
"""

import collections
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import command_line, sizes
from benchmarks.atlas import CHOOSES, chosen, loss_of, of, steps_of
from benchmarks.atlas_cases import LARGE, SOURCES, TASKS, Case, attention, base_of, models, stages
from benchmarks.sizes import changed
from benchmarks.workplace import beyond
from mhe_jax.report.tables import Column, Table, mean_and_deviation
from mhe_jax.tasks.cache import cached_numbers

NOT_MEASURED = "not measured"
REGIMES = {
    "depth": "the same number of parameters, by depth",
    "width": "the same number of parameters, by the MLP's width",
    "shape": "the same shape",
    "flops": "the same FLOPs of training",
    "time": "the same time of training",
    "heads": "head embeddings, numbers of heads",
    "starts": "head embeddings, how they start and learn",
    "limits": "where `mva` stops",
}
NAMES = {"lm": "Language model", "translation": "Translation", LARGE: "A larger language model"}
SCORE = dict.fromkeys(("lm", LARGE), "test perplexity a token") | {"translation": "test BLEU"}
MHA = Case("shape", "mha")
Lines = Sequence[dict[str, Any]]


def read(directory: Path, task: str) -> Lines:
    file = directory / f"{task}.json"
    return json.loads(file.read_text())["lines"] if file.exists() else []


@dataclass(frozen=True)
class Measured:
    """What the runs of a case say, at the learning rate that the choosing seed has found."""

    rate: str
    chosen: float
    fresh: Lines

    def values(self, name: str) -> list[float]:
        return [line[name] for line in self.fresh if line.get(name) is not None]

    def shown(self, name: str, digits: int) -> str:
        """Mean ± its standard error over the fresh seeds."""
        if not (found := self.values(name)):
            return NOT_MEASURED
        mean, error = with_error(found)
        spread = "" if error is None else f" ± {error:.{digits}f}"
        return f"{mean:.{digits}f}{spread}" + (f" ({len(found)} seeds)" if len(found) != 3 else "")


def measured(lines: Lines, case: Case) -> Measured | None:
    """None until the search of the rate has ended, or where every rate failed."""
    own = [line for line in lines if of(line, case)]
    losses = {line["rate"]: loss_of(line) for line in own if line["seed"] == int(CHOOSES)}
    if not losses:
        return None
    best = min(losses, key=losses.__getitem__)
    if beyond(losses, best) or math.isinf(losses[best]):
        return None
    rate = chosen(losses)
    fresh = [line for line in own if line["rate"] == rate and line["seed"] != int(CHOOSES)]
    return Measured(rate, losses[rate], [line for line in fresh if "failed" not in line])


def with_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error: the sample's standard deviation over √n; None of one."""
    mean, deviation = mean_and_deviation(values)
    return mean, None if deviation is None else deviation / math.sqrt(len(values))


def regime(lines: Lines, task: str, name: str) -> Table:
    """All cases of a regime, below `mha` as it is."""
    cases = {each: Case(name, each) for each in models(task)[name]}
    if MHA not in cases.values():
        cases = {"mha, as it is": MHA, **cases}
    return compared(lines, task, name, f"{NAMES[task]}: {REGIMES[name]}", cases)


def large(lines: Lines) -> Table:
    """All cases of the larger model, in one table."""
    cases = {
        case.name + (", wider MLP" if case.regime == "width" else ""): case
        for stage in stages(LARGE)
        for case in stage.cases
    }
    return compared(lines, LARGE, "all", NAMES[LARGE], cases)


def compared(lines: Lines, task: str, name: str, title: str, cases: dict[str, Case]) -> Table:
    columns = [Column("attention"), Column("layers"), Column("MLP", 0), Column("parameters", 0)]
    columns += [Column("cached numbers a token", 0), Column("% of mha's", 0)]
    columns += [Column("MFLOPs a token", 2), Column("steps", 0), Column("rate")]
    columns += [Column("validation loss that chose", 3), Column("validation loss")]
    columns += [Column(SCORE[task]), Column("ms a step", 0)]
    rows = [[shown, *row(lines, task, case)[1:]] for shown, case in cases.items()]
    return Table(f"{task}-{name}", title, columns, rows)


def row(lines: Lines, task: str, case: Case) -> list[Any]:
    base = base_of(task)
    own = [line for line in lines if of(line, case)]
    config = changed(base, models(task)[case.regime][case.name])
    m, mha = config.model, changed(base, attention(base, "mha"))
    both = f"{m.num_layers} + {m.decoder_layers}"
    steps = config.train.num_steps
    if case.regime == "time":
        steps = steps_of(own[0]) if own else NOT_MEASURED
    cells = [case.name, both if task == "translation" else str(m.num_layers), m.mlp_features]
    cached = cached_numbers(config)
    cells += [sizes.parameters(config), cached, 100 * cached / cached_numbers(mha)]
    cells += [sizes.flops(config) / 1e6, steps]
    if (found := measured(lines, case)) is None:
        return cells + [NOT_MEASURED] * 5
    most = processor(lines)
    times = [line["step_seconds"] for line in found.fresh if line.get("processor") == most]
    times = [seconds for seconds in times if seconds]
    cells += [found.rate, found.chosen, found.shown("validation_loss", 3)]
    milliseconds = 1e3 * min(times) if times else NOT_MEASURED
    return [*cells, found.shown(SOURCES[task].score, 2), milliseconds]


def processor(lines: Lines) -> str | None:
    """The one that most runs ran on, whose times are shown."""
    names = collections.Counter(line["processor"] for line in lines if "processor" in line)
    return names.most_common(1)[0][0] if names else None


def failures(lines: Lines, task: str) -> Table:
    columns = [Column("regime"), Column("attention"), Column("rate"), Column("seed", 0)]
    rows = [
        [*(line[key] for key in ("regime", "name", "rate", "seed")), line["failed"]]
        for line in lines
        if "failed" in line
    ]
    columns.append(Column("reason"))
    return Table(f"{task}-failed", f"{NAMES[task]}: runs that failed", columns, rows)


# What the decision is taken by, and whether it is better where it is lower.
DECIDES = {"lm": ("validation_loss", 3, True), "translation": ("bleu", 2, False)}


def gain(lines: Lines, task: str, case: Case) -> tuple[float, float] | None:
    """How much better than the better `mha`, and two standard errors of the difference.

    Both `mha` have the same number of parameters: as it is, and as deep as the rule of depth says.
    None unless all three have their fresh seeds.
    """
    name, _, lower = DECIDES[task]
    means = []
    for one in (case, MHA, Case("depth", "mha")):
        found = measured(lines, one)
        mean, error = with_error(found.values(name) or [0.0]) if found else (0.0, None)
        if error is None:
            return None
        means.append((-mean if lower else mean, error))
    (own, error), (best, other) = means[0], max(means[1:])
    return own - best, 2 * math.hypot(error, other)


def decision(records: dict[str, Lines]) -> Table:
    """The bar: the same kind in the same regime, better in both tasks outside its errors."""
    columns = [Column("regime"), Column("attention")]
    columns += [Column("LM: lower validation loss"), Column("Multi30k: more BLEU"), Column("bar")]
    rows = []
    for name in ("depth", "width"):
        for kind in models("lm")[name]:
            if kind == "mha":
                continue
            gains = {t: gain(records[t], t, Case(name, kind)) for t in TASKS}
            cells = [
                NOT_MEASURED
                if g is None
                else f"{g[0]:+.{DECIDES[t][1]}f} ± {g[1]:.{DECIDES[t][1]}f}"
                for t, g in gains.items()
            ]
            known = [g for g in gains.values() if g is not None]
            missed = any(difference <= errors for difference, errors in known)
            bar = "no" if missed else "yes" if len(known) == len(TASKS) else NOT_MEASURED
            rows.append([REGIMES[name], kind, *cells, bar])
    return Table("decision", "The bar", columns, rows)


def tables(directory: Path) -> Iterator[Table]:
    records = {task: read(directory, task) for task in TASKS}
    yield decision(records)
    larger = read(directory, LARGE)
    yield large(larger)
    for name in REGIMES:
        for task, lines in records.items():
            yield regime(lines, task, name)
    for task, lines in (records | {LARGE: larger}).items():
        if (table := failures(lines, task)).rows:
            yield table


def main() -> None:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("directory", type=Path, help="WORKDIR/atlas, or docs/records/atlas")
    for table in tables(parser.parse_args().directory):
        print(table.markdown(), end="\n\n")


if __name__ == "__main__":
    main()
