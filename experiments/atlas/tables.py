"""The tables of README.md here, from the records of atlas.py.

    python experiments/atlas/tables.py runs/atlas
    python experiments/atlas/tables.py experiments/atlas/records

The bar, a table of comparisons for each of `QUESTIONS`, and all results of each task. What no run
has measured is named below its table; sizes and costs are those of the closed forms. Each ± is two
standard errors.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import command_line
from experiments.atlas import sizes
from experiments.atlas.atlas import RATES, SEARCH_SEED, belongs, chosen, loss_of
from experiments.atlas.cases import (
    LARGE,
    MUON,
    PASS,
    PLANS,
    ROTARY,
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
from mhe_jax.config import Config
from mhe_jax.tasks.cost import cached_numbers

NOT_MEASURED = "not measured"
NAMES = {
    "lm": "small language model",
    LARGE: "larger language model",
    "translation": "translation",
    "lm_controls": "controls, language model",
    "translation_controls": "controls, translation",
    ROTARY: "controls, rotary positions",
    MUON: "Muon",
    PASS: "one pass",
}
SCORE = {"perplexity_per_token": "test perplexity a token", "bleu": "test BLEU"}
MHA = Case("shape", "mha")
# What the decision is taken by, its digits, and whether it is better where it is lower.
DECIDES = {
    task: ("bleu", 2, False) if source.score == "bleu" else ("validation_loss", 3, True)
    for task, source in SOURCES.items()
}
# What tells a case from those of the same name in other regimes.
MORE = {"depth": ", deeper", "width": ", wider MLP", "adamw": ", AdamW", "muon": ", Muon"}
# By title, where it is asked and what is compared with what, by the names of `named`. A list of
# names is compared with each of the other list.
_LM, _CONTROLS = ("lm",), ("lm_controls", "translation_controls")
Pairs = dict[str, str]
QUESTIONS: dict[str, tuple[tuple[str, ...], Pairs]] = {
    "One score matrix for all heads": (
        _LM,
        {
            "mva": "mha; mha, 4 heads; mha, 2 heads; mha, 1 head",
            "mha, 4 heads; mha, 2 heads; mha, 1 head": "mha",
        },
    ),
    "As many parameters, half of the cache": (
        _LM,
        {"mva-narrow": "mha; mha, deeper; mha, 2 heads; mha-narrow; mva", "mha-narrow": "mha"},
    ),
    "Head embeddings": (
        _LM,
        {
            "mhe_add; mhe_mul": "sha",
            "mhe_add": "mhe_mul",
            "mhe_add-2-score-groups": "mhe_add",
            "mhe_add-2-groups": "mhe_add; mha",
        },
    ),
    "Fewer key and value heads": (
        _LM,
        {"gqa": "mha; mhe_add-2-groups", "mqa": "mha; mhe_add; mhe_mul; sha"},
    ),
    "Deeper models": (
        _LM,
        {
            "mha, deeper": "mha",
            "gqa, deeper; gta, deeper; mhe_add-2-groups, deeper; mqa, deeper": "mha; mha, 2 heads",
            "sha, deeper": "mha, deeper; mqa, deeper; mhe_add-2-groups, deeper",
        },
    ),
    "In the larger model": (
        (LARGE,),
        {"mva; mva-narrow": "mha; mha-narrow", "mha-narrow": "mha"},
    ),
    "In translation": (
        ("translation",),
        {
            "mva-narrow": "mha; mha, deeper; mha-narrow",
            "mha-narrow; mha, deeper; mha, 2 heads": "mha",
        },
    ),
    # Of protocol.md, "Controls".
    "The claim, run anew": (_CONTROLS, {"mva-narrow; mva": "mha"}),
    "Is a thin `mha` as good?": (
        _CONTROLS,
        {"mva-narrow": "mha-thin-narrow", "mha-thin-narrow": "mha"},
    ),
    "Is it the key bias?": (
        _CONTROLS,
        {"mva-narrow": "mva-narrow-no-bias", "mva": "mva-no-bias"},
    ),
    "Is it one map?": (_CONTROLS, {"mva-narrow-no-bias": "mha-thin-narrow"}),
    "Would another control do?": (
        _CONTROLS,
        {
            "mva-narrow": "mha-narrow-2-heads; gqa; mqa",
            "mva": "mha-thin",
            "mha-narrow-2-heads": "mha",
        },
    ),
    "Does it survive rotary positions?": (
        (ROTARY,),
        {
            "mva-narrow": "mha-thin-narrow; mha; mha-2-heads; mha-narrow-2-heads; mha-narrow; gqa",
            "mha-2-heads; mha-narrow-2-heads; mha-narrow; mva": "mha",
            "mha-2-heads": "mha-narrow-2-heads",
        },
    ),
    "By each optimizer": (
        (MUON,),
        {
            "mva, AdamW": "mha, AdamW",
            "mva, Muon": "mha, Muon; mva, AdamW",
            "mha, Muon": "mha, AdamW",
        },
    ),
}
Lines = Sequence[dict[str, Any]]


def lines_of(directory: Path, task: str) -> Lines:
    return read(directory / f"{task}.json").get("lines", [])


class Measured(NamedTuple):
    """What the runs of a case say, at the learning rate that the choosing seed has found."""

    rate: str
    fresh: Lines

    def values(self, name: str) -> list[float]:
        return [line[name] for line in self.fresh if line.get(name) is not None]

    def shown(self, name: str, digits: int) -> str:
        """Mean ± two standard errors over the fresh seeds."""
        if not (found := self.values(name)):
            return NOT_MEASURED
        mean, error = with_error(found)
        spread = "" if error is None else f" ± {2 * error:.{digits}f}"
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
    return Measured(rate, [line for line in fresh if "failed" not in line])


def seeds(task: str) -> int:
    """Fresh ones of each case."""
    return 2 if task == PASS else 3


def with_error(values: list[float]) -> tuple[float, float | None]:
    """Mean and its standard error: the sample's standard deviation over √n; None of one."""
    mean, deviation = mean_and_deviation(values)
    return mean, None if deviation is None else deviation / math.sqrt(len(values))


def named(task: str) -> dict[str, Case]:
    """The cases of a task, the most important first, each by a name that no other has."""
    every = [case for stage in stages(task) for case in stage.cases]
    count = Counter(case.name for case in every)
    return {c.name + (MORE.get(c.regime, "") if count[c.name] > 1 else ""): c for c in every}


def config_of(task: str, case: Case) -> Config:
    return changed(base_of(task), models(task)[case.regime][case.name])


def cache(task: str, case: Case) -> str:
    """In % of that of `mha` of the config's shape."""
    mha = changed(base_of(task), attention(base_of(task), "mha"))
    return shown(100 * cached_numbers(config_of(task, case)) / cached_numbers(mha))


def results(lines: Lines, task: str) -> str:
    """A row for each case with fresh seeds, the best first; the others are named below."""
    name, _, lower = DECIDES[task]
    rows, begun, searched, left = [], [], [], []
    for label, case in named(task).items():
        found = measured(lines, case, task)
        if found and 0 < len(found.values(name)) < seeds(task):
            begun.append(label)
        elif found and found.values(name):
            mean, _ = with_error(found.values(name))
            rows.append((mean if lower else -mean, [label, *row(found, task, case)]))
        else:
            (searched if found else left).append(label)
    head = ["attention", "layers", "MLP width", "parameters", "cached numbers a token"]
    head += ["% of mha", "training MFLOPs a token", "learning rate"]
    head += ["validation loss", SCORE[SOURCES[task].score]]
    cells = [each for _, each in sorted(rows)]
    same = [n for n in range(len(head)) if len(cells) > 1 and len({row[n] for row in cells}) == 1]
    kept = [[c for n, c in enumerate(row) if n not in same] for row in (head, *cells)]
    alike = "; ".join(f"{head[n]} {cells[0][n]}" for n in same)
    notes = {"In all rows": [alike] * bool(same), "Searched for its rate alone": searched}
    notes |= {"Seeds begun": begun, "Not measured": left}
    return below(grid(kept[0], kept[1:]), notes) if rows else ""


def row(found: Measured, task: str, case: Case) -> list[str]:
    config = config_of(task, case)
    m, cached = config.model, cached_numbers(config)
    layers = str(m.num_layers) + (f" + {m.decoder_layers}" if "cross" in config.facts.roles else "")
    cells = [layers, shown(m.mlp_features), shown(sizes.parameters(config)), shown(cached)]
    cells += [cache(task, case), shown(sizes.flops(config) / 1e6, 2), found.rate]
    return [*cells, found.shown("validation_loss", 3), found.shown(SOURCES[task].score, 2)]


def below(table: str, notes: dict[str, Sequence[str]]) -> str:
    """A table and a line for each note that says something."""
    return "\n\n".join([table, *(f"{key}: {'; '.join(n)}." for key, n in notes.items() if n)])


def gain(lines: Lines, task: str, case: Case, *others: Case) -> tuple[float, float] | None:
    """How much better than the best of others, and two standard errors of the difference.

    None unless all have their fresh seeds.
    """
    name, _, lower = DECIDES[task]
    means = []
    for one in (case, *others):
        found = measured(lines, one, task)
        if found is None or len(found.values(name)) < seeds(task):
            return None
        mean, error = with_error(found.values(name))
        means.append((-mean if lower else mean, error))
    (own, error), (best, other) = means[0], max(means[1:])
    return own - best, 2 * math.hypot(error, other)


def lead(task: str, found: tuple[float, float] | None) -> str:
    digits = DECIDES[task][1]
    return f"{found[0]:+.{digits}f} ± {found[1]:.{digits}f}" if found else NOT_MEASURED


def comparisons(records: dict[str, Lines], tasks: tuple[str, ...], pairs: Pairs) -> str:
    """A row for each pair that is measured; those that are not are named below."""
    rows, left, several = [], [], len(tasks) > 1
    each = [(a, b) for A, B in pairs.items() for a, b in product(A.split("; "), B.split("; "))]
    for task, names in product(tasks, each):
        two = [named(task)[name] for name in names]
        where = [NAMES[task].removeprefix("controls, ")] * several
        if not (found := gain(records[task], task, *two)):
            left.append(": ".join([*where, " against ".join(names)]))
            continue
        verdict = "better" if found[0] > 0 else "worse"
        verdict = verdict if abs(found[0]) > found[1] else "not told apart"
        caches = ", ".join(cache(task, case) for case in two)
        sized = ", ".join(shown(sizes.parameters(config_of(task, c)) / 1e6, 2) for c in two)
        rows.append([*where, *names, lead(task, found), verdict, caches, sized])
    unit = " or ".join("BLEU" if DECIDES[t][0] == "bleu" else "validation loss" for t in tasks)
    head = [*["task"] * several, "A", "B", f"lead of A in {unit}", "A is"]
    head += ["caches of A and B, % of mha", "parameters of A and B, millions"]
    return below(grid(head, rows), {"Not measured": left}) if rows else ""


def one_pass(lines: Lines) -> str:
    """The loss of each seed at the end, and where the cheapest case has ended."""
    found = {name: measured(lines, case, PASS) for name, case in named(PASS).items()}
    fresh = {name: m.fresh for name, m in found.items() if m and m.fresh}
    rows = []
    for name, runs in fresh.items():
        cells = []
        for cost in ("steps", "flops", "training_seconds"):
            least = min(line[cost] for each in fresh.values() for line in each)
            losses = [
                np.interp(least / line[cost] * line["steps"], *np.transpose(line["curve"]))
                for line in runs
            ]
            cells.append(", ".join(f"{loss:.3f}" for loss in losses))
        rows.append([name, *cells, cache(PASS, named(PASS)[name])])
    head = ["attention", "validation loss, each seed", "at equal FLOPs", "at equal time"]
    return grid([*head, "cache, % of mha"], rows) if rows else ""


def decision(records: dict[str, Lines]) -> str:
    """The bar: the same kind in the same regime, better in both tasks outside its errors.

    Kinds that were measured in neither are left out.
    """
    rows = []
    for label, case in named("lm").items():
        # As many parameters: as it is, and as deep as the rule of depth says.
        both = MHA, Case("depth", "mha")
        if case in both or case.regime not in ("depth", "width"):
            continue
        gains = {task: gain(records[task], task, case, *both) for task in TASKS}
        if known := [found for found in gains.values() if found is not None]:
            missed = any(difference <= errors for difference, errors in known)
            bar = "no" if missed else "yes" if len(known) == len(TASKS) else NOT_MEASURED
            caches = ", ".join(cache(task, case) for task in TASKS)
            rows.append([label, *(lead(task, found) for task, found in gains.items()), caches, bar])
    head = ["attention", "lead in validation loss, language model", "lead in BLEU, translation"]
    return grid([*head, "caches there, % of mha", "meets the bar"], rows) if rows else ""


def page(directory: Path) -> dict[str, str]:
    """By title, all tables in which something is measured."""
    records = {task: lines_of(directory, task) for task in SOURCES}
    tables = {"The bar": decision(records)}
    tables |= {title: comparisons(records, *each) for title, each in QUESTIONS.items()}
    tables["In one pass"] = one_pass(records[PASS])
    tables |= {f"Results: {NAMES[task]}": results(records[task], task) for task in NAMES}
    return {title: table for title, table in tables.items() if table}


def main() -> None:
    parser = command_line.PlainParser(__doc__)
    parser.add_argument("directory", type=Path, help="WORKDIR/atlas, or the records here")
    directory = parser.parse_args().directory
    if not any(lines_of(directory, task) for task in SOURCES):
        parser.error(f"{directory} has no {', '.join(f'{t}.json' for t in SOURCES)} of atlas.py")
    print(*(f"### {title}\n\n{table}" for title, table in page(directory).items()), sep="\n\n")


if __name__ == "__main__":
    main()
