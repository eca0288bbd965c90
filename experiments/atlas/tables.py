"""The tables of README.md here, from the records of atlas.py.

    python experiments/atlas/tables.py runs/atlas
    python experiments/atlas/tables.py experiments/atlas/records

What no run has measured says so; sizes and costs are those of the closed forms.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import command_line
from experiments.atlas import sizes
from experiments.atlas.atlas import RATES, SEARCH_SEED, belongs, chosen, loss_of
from experiments.atlas.cases import (
    LARGE,
    MUON,
    PLANS,
    SOURCES,
    TASKS,
    Case,
    attention,
    base_of,
    models,
    stages,
)
from experiments.atlas.sizes import changed
from experiments.reports import grid, shown
from experiments.runs import beyond, mean_and_deviation, read
from mhe_jax.tasks.cost import cached_numbers

NOT_MEASURED = "not measured"
REGIMES = {
    "depth": "the same number of parameters, by depth",
    "width": "the same number of parameters, by the MLP's width",
    "shape": "the same shape",
    "limits": "`mha` with fewer, wider heads",
}
NAMES = {"lm": "Language model", "translation": "Translation", LARGE: "A larger language model"}
NAMES |= {
    MUON: "Muon against AdamW",
    "lm_controls": "Controls: language model",
    "translation_controls": "Controls: translation",
    "lm_rotary": "Controls: rotary positions",
}
SCORE = {"perplexity_per_token": "test perplexity a token", "bleu": "test BLEU"}
MHA = Case("shape", "mha")
# What the decision is taken by, its digits, and whether it is better where it is lower.
DECIDES = {"lm": ("validation_loss", 3, True), "translation": ("bleu", 2, False)}
DECIDES |= {
    task: DECIDES["translation" if SOURCES[task].score == "bleu" else "lm"] for task in PLANS
}
# What is compared with which controls: README, "Controls".
LEADS = {
    "mva-narrow": (
        "mha-thin-narrow",
        "mva-narrow-no-bias",
        "mha",
        "mha-2-heads",
        "mha-narrow",
        "mha-narrow-2-heads",
        "gqa",
        "mqa",
    ),
    "mva-narrow-no-bias": ("mha-thin-narrow",),
    "mva": ("mha-thin", "mva-no-bias", "mha"),
}
Lines = Sequence[dict[str, Any]]


def lines_of(directory: Path, task: str) -> Lines:
    return read(directory / f"{task}.json").get("lines", [])


class Measured(NamedTuple):
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


def measured(lines: Lines, case: Case, task: str = "lm") -> Measured | None:
    """None until the search of the rate has ended, or where every rate failed."""
    own = [line for line in lines if belongs(line, case)]
    losses = {line["rate"]: loss_of(line) for line in own if line["seed"] == int(SEARCH_SEED)}
    if not losses:
        return None
    best = min(losses, key=losses.__getitem__)
    left = RATES[task] - losses.keys() if task in PLANS else beyond(losses, best)
    if left or math.isinf(losses[best]):
        return None
    rate = chosen(losses)
    fresh = [line for line in own if line["rate"] == rate and line["seed"] != int(SEARCH_SEED)]
    return Measured(rate, losses[rate], [line for line in fresh if "failed" not in line])


def with_error(values: list[float]) -> tuple[float, float | None]:
    """Mean and its standard error: the sample's standard deviation over √n; None of one."""
    mean, deviation = mean_and_deviation(values)
    return mean, None if deviation is None else deviation / math.sqrt(len(values))


def compared(lines: Lines, task: str, cases: dict[str, Case]) -> str:
    """A row for each case."""
    head = ["attention", "layers", "MLP", "parameters", "cached numbers a token"]
    head += ["cache, % of mha", "training MFLOPs a token", "steps", "learning rate"]
    head += ["loss of the search", "validation loss", SCORE[SOURCES[task].score]]
    return grid(head, [[name, *row(lines, task, case)] for name, case in cases.items()])


def row(lines: Lines, task: str, case: Case) -> list[str]:
    base = base_of(task)
    config = changed(base, models(task)[case.regime][case.name])
    m, mha = config.model, changed(base, attention(base, "mha"))
    layers = str(m.num_layers) + (f" + {m.decoder_layers}" if "cross" in base.facts.roles else "")
    cached, found = cached_numbers(config), measured(lines, case, task)
    # A trial has its own steps.
    steps = found.fresh[0]["steps"] if found and found.fresh else config.train.num_steps
    cells = [layers, shown(m.mlp_features), shown(sizes.parameters(config)), shown(cached)]
    cells += [shown(100 * cached / cached_numbers(mha)), shown(sizes.flops(config) / 1e6, 2)]
    cells.append(shown(steps))
    if found is None:
        return cells + [NOT_MEASURED] * 4
    losses = [shown(found.search_loss, 3), found.shown("validation_loss", 3)]
    return [*cells, found.rate, *losses, found.shown(SOURCES[task].score, 2)]


def regime(lines: Lines, task: str, name: str) -> str:
    """All cases of a regime, below `mha` of the config."""
    cases = {each: Case(name, each) for each in models(task)[name]}
    if MHA not in cases.values():
        cases = {"mha, the config's": MHA, **cases}
    return compared(lines, task, cases)


def staged(task: str) -> dict[str, Case]:
    """All cases of a task's stages, by the names of rows."""
    return {
        case.name + (", wider MLP" if case.regime == "width" else ""): case
        for stage in stages(task)
        for case in stage.cases
    }


def gain(lines: Lines, task: str, case: Case, *others: Case) -> tuple[float, float] | None:
    """How much better than the best of others, and two standard errors of the difference.

    None unless all have their fresh seeds.
    """
    name, _, lower = DECIDES[task]
    means = []
    for one in (case, *others):
        found = measured(lines, one, task)
        mean, error = with_error(found.values(name) or [0.0]) if found else (0.0, None)
        if error is None:
            return None
        means.append((-mean if lower else mean, error))
    (own, error), (best, other) = means[0], max(means[1:])
    return own - best, 2 * math.hypot(error, other)


def lead(task: str, found: tuple[float, float] | None) -> str:
    digits = DECIDES[task][1]
    return f"{found[0]:+.{digits}f} ± {found[1]:.{digits}f}" if found else NOT_MEASURED


def controls(lines: Lines, task: str) -> str:
    """What each of `LEADS` leads its controls by, in what decides, with two standard errors."""
    cases = {case.name: case for case in staged(task).values()}
    rows = []
    for name, others in LEADS.items():
        for other in (other for other in others if {name, other} <= cases.keys()):
            verdict = NOT_MEASURED
            if found := gain(lines, task, cases[name], cases[other]):
                verdict = "better" if found[0] > 0 else "worse"
                verdict = verdict if abs(found[0]) > found[1] else "not told apart"
            rows.append([name, other, lead(task, found), verdict])
    what = "BLEU" if DECIDES[task][0] == "bleu" else "validation loss"
    return grid(["attention", "control", f"lead in {what}", "attention is"], rows)


def decision(records: dict[str, Lines]) -> str:
    """The bar: the same kind in the same regime, better in both tasks outside its errors.

    Kinds that were measured in neither are left out.
    """
    rows = []
    for name in ("depth", "width"):
        for kind in models("lm")[name]:
            # As many parameters: as it is, and as deep as the rule of depth says.
            both = MHA, Case("depth", "mha")
            gains = {task: gain(records[task], task, Case(name, kind), *both) for task in TASKS}
            known = [found for found in gains.values() if found is not None]
            if kind == "mha" or not known:
                continue
            cells = []
            for task, found in gains.items():
                cells.append(lead(task, found))
            missed = any(difference <= errors for difference, errors in known)
            bar = "no" if missed else "yes" if len(known) == len(TASKS) else NOT_MEASURED
            rows.append([REGIMES[name], kind, *cells, bar])
    leads = ["LM: lead in validation loss", "Multi30k: lead in BLEU"]
    return grid(["regime", "attention", *leads, "bar"], rows)


def scored(lines: Lines, case: Case) -> bool:
    """Whether it has seeds that were scored on the test set."""
    found = measured(lines, case)
    return found is not None and bool(found.fresh)


def optimizers(lines: Lines) -> str:
    """Each kind by each optimizer."""
    head = ["attention", "optimizer", "learning rate", "loss of the search"]
    head += ["validation loss", "test perplexity a token"]
    rows = []
    for optimizer, kinds in models(MUON).items():
        for kind in kinds:
            found = measured(lines, Case(optimizer, kind))
            cells = [NOT_MEASURED] * 4
            if found is not None:
                cells = [found.rate, shown(found.search_loss, 3)]
                cells += [found.shown("validation_loss", 3), found.shown(SOURCES[MUON].score, 2)]
            rows.append([kind, optimizer, *cells])
    return grid(head, rows)


def page(directory: Path) -> dict[str, str]:
    """By title, all tables in which more than `mha` is scored."""
    records = {task: lines_of(directory, task) for task in (*TASKS, LARGE, MUON, *PLANS)}
    large = compared(records[LARGE], LARGE, staged(LARGE))
    tables = {"The bar": decision(records), NAMES[LARGE]: large}
    if records[MUON]:
        tables[NAMES[MUON]] = optimizers(records[MUON])
    for task in PLANS:
        if records[task]:
            tables[NAMES[task]] = compared(records[task], task, staged(task))
            tables[f"{NAMES[task]}, leads"] = controls(records[task], task)
    for name in REGIMES:
        for task in TASKS:
            cases = (Case(name, each) for each in models(task)[name])
            if any(scored(records[task], case) for case in cases if case != MHA):
                tables[f"{NAMES[task]}: {REGIMES[name]}"] = regime(records[task], task, name)
    return tables


def main() -> None:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("directory", type=Path, help="WORKDIR/atlas, or the records here")
    directory = parser.parse_args().directory
    if not any(lines_of(directory, task) for task in SOURCES):
        parser.error(f"{directory} has no {', '.join(f'{t}.json' for t in SOURCES)} of atlas.py")
    print(*(f"### {title}\n\n{table}" for title, table in page(directory).items()), sep="\n\n")


if __name__ == "__main__":
    main()
