"""The tables of docs/atlas.md, from the records of benchmarks/atlas.py.

    python benchmarks/atlas_tables.py runs/atlas
    python benchmarks/atlas_tables.py docs/records/atlas

What no run has measured says so; sizes and costs are those of the closed forms.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import command_line, sizes
from benchmarks.atlas import SEARCH_SEED, belongs, chosen, loss_of
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
    "heads": "head embeddings, numbers of heads",
    "starts": "head embeddings, how they start and learn",
    "limits": "`mva` in other sizes",
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
    search_loss: float
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
    own = [line for line in lines if belongs(line, case)]
    losses = {line["rate"]: loss_of(line) for line in own if line["seed"] == int(SEARCH_SEED)}
    if not losses:
        return None
    best = min(losses, key=losses.__getitem__)
    if beyond(losses, best) or math.isinf(losses[best]):
        return None
    rate = chosen(losses)
    fresh = [line for line in own if line["rate"] == rate and line["seed"] != int(SEARCH_SEED)]
    return Measured(rate, losses[rate], [line for line in fresh if "failed" not in line])


def with_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error: the sample's standard deviation over √n; None of one."""
    mean, deviation = mean_and_deviation(values)
    return mean, None if deviation is None else deviation / math.sqrt(len(values))


def regime(lines: Lines, task: str, name: str) -> Table:
    """All cases of a regime, below `mha` of the config."""
    cases = {each: Case(name, each) for each in models(task)[name]}
    if MHA not in cases.values():
        cases = {"mha, the config's": MHA, **cases}
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
    columns += [Column("cached numbers a token", 0), Column("cache, % of mha", 0)]
    columns += [Column("training MFLOPs a token", 2), Column("steps", 0), Column("learning rate")]
    columns += [Column("loss of the search", 3), Column("validation loss")]
    columns.append(Column(SCORE[task]))
    rows = [[shown, *row(lines, task, case)] for shown, case in cases.items()]
    return Table(f"{task}-{name}", title, columns, rows)


def row(lines: Lines, task: str, case: Case) -> list[Any]:
    base = base_of(task)
    config = changed(base, models(task)[case.regime][case.name])
    m, mha = config.model, changed(base, attention(base, "mha"))
    both = f"{m.num_layers} + {m.decoder_layers}"
    cached = cached_numbers(config)
    cells = [both if task == "translation" else str(m.num_layers), m.mlp_features]
    cells += [sizes.parameters(config), cached, 100 * cached / cached_numbers(mha)]
    cells += [sizes.flops(config) / 1e6, config.train.num_steps]
    if (found := measured(lines, case)) is None:
        return cells + [NOT_MEASURED] * 4
    if found.fresh:
        cells[-1] = found.fresh[0]["steps"]  # a trial has its own
    losses = [found.search_loss, found.shown("validation_loss", 3)]
    return [*cells, found.rate, *losses, found.shown(SOURCES[task].score, 2)]


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
    """The bar: the same kind in the same regime, better in both tasks outside its errors.

    Kinds that were measured in neither are left out.
    """
    columns = [Column("regime"), Column("attention"), Column("LM: lead in validation loss")]
    columns += [Column("Multi30k: lead in BLEU"), Column("bar")]
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
            if not (known := [g for g in gains.values() if g is not None]):
                continue
            missed = any(difference <= errors for difference, errors in known)
            bar = "no" if missed else "yes" if len(known) == len(TASKS) else NOT_MEASURED
            rows.append([REGIMES[name], kind, *cells, bar])
    return Table("decision", "The bar", columns, rows)


def scored(lines: Lines, case: Case) -> bool:
    """Whether it has seeds that were scored on the test set."""
    found = measured(lines, case)
    return found is not None and bool(found.fresh)


def page(directory: Path) -> str:
    """All tables in which more than `mha` is scored, and the names of the others."""
    records = {task: read(directory, task) for task in TASKS}
    larger = read(directory, LARGE)
    tables, others = [decision(records), large(larger)], []
    for name in REGIMES:
        for task, lines in records.items():
            cases = (Case(name, each) for each in models(task)[name])
            if any(scored(lines, case) for case in cases if case != MHA):
                tables.append(regime(lines, task, name))
            else:
                others.append(f"{NAMES[task]}: {REGIMES[name]}")
    failed = (failures(lines, task) for task, lines in (records | {LARGE: larger}).items())
    tables += [table for table in failed if table.rows]
    parts = [table.markdown() for table in tables]
    if others:
        parts.append("\n".join(["### Not measured", "", *(f"- {name}" for name in others)]))
    return "\n\n".join(parts)


def main() -> None:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("directory", type=Path, help="WORKDIR/atlas, or docs/records/atlas")
    directory = parser.parse_args().directory
    files = [f"{task}.json" for task in SOURCES]
    if not any((directory / file).exists() for file in files):
        parser.error(
            f"{directory} has none of {', '.join(files)}, which benchmarks/atlas.py writes"
        )
    print(page(directory))


if __name__ == "__main__":
    main()
