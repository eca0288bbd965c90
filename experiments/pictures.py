"""The pictures of the pages, from their records: the same record gives the same picture.

    python experiments/pictures.py        # writes docs/images/translation.svg and the others

Of translation each kind has the learning rate with the best validation loss of seed 0.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(ROOT := Path(__file__).parents[1]))

import matplotlib
from matplotlib.figure import Figure

from experiments import runs
from experiments.atlas.cases import TASKS, WIDE, Case, base_of, models
from experiments.atlas.sizes import changed
from experiments.atlas.tables import DECIDES, MHA, Lines, lines_of, measured, with_error
from experiments.paper.paper import RATES, TRANSLATION
from experiments.uptraining.uptraining import NAMES
from mhe_jax.report.report import front
from mhe_jax.tasks.cost import cached_numbers

HERE, IMAGES = ROOT / "experiments", ROOT / "docs" / "images"
ABOUT = {"lm": "A language model on WikiText-2", "translation": "Translation on Multi30k"}
SCORE = {"lm": "validation loss", "translation": "BLEU"}


class Point(NamedTuple):
    name: str
    x: float
    y: float
    error: float | None  # None: one seed


def new_axes(title: str, note: str, x: str, y: str) -> Any:
    matplotlib.rcParams.update({"svg.hashsalt": "mhe_jax", "svg.fonttype": "none"})
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(title=f"{title}\n{note}", xlabel=x, ylabel=y)
    axes.title.set_fontsize("medium")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def mark(axes: Any, point: Point, color: str, size: float = 6) -> None:
    """With the bar of its error; hollow where it has one seed."""
    fill = "white" if point.error is None else color
    look = {"color": color, "markerfacecolor": fill, "markersize": size}
    axes.errorbar(point.x, point.y, yerr=point.error, fmt="o", **look)


def label(axes: Any, points: list[Point], left: float | None = None, **colors: str) -> None:
    """Names to the right of their marks, or all at `left`; each below one that is in the way."""
    axes.figure.draw_without_rendering()  # lays it out
    placed: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: -p.y):
        at = point.x if left is None else left
        across, up = axes.transData.transform((at, point.y))
        wide = 6 * max(len(p.name) for p in points)
        for other, height in sorted(placed, key=lambda place: -place[1]):
            if abs(other - across) < wide and abs(height - up) < 12:
                up = height - 12
        placed.append((across, up))
        place = axes.transData.inverted().transform((across, up))
        where = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
        color = colors.get(point.name, "black")
        axes.annotate(point.name, place, fontsize="small", color=color, **where)


def save(axes: Any, name: str) -> None:
    axes.figure.savefig(IMAGES / name, metadata={"Date": None})
    print(f"docs/images/{name}")


def of_translation() -> list[Point]:
    """Test BLEU of each kind against its attention parameters."""
    records, found = HERE / "paper/records/translation", []
    for name in TRANSLATION:
        rate = min(RATES, key=lambda rate: runs.loss(records / f"{name},{rate},seed=0"))
        files = sorted(records.glob(f"{name},{rate},seed=*/eval_test.json"))
        scores = [runs.read(file) for file in files]
        bleu = runs.mean_and_deviation([score["bleu"] for score in scores])
        found.append(Point(name, scores[0]["parameters"]["attention"] / 1e6, *bleu))
    return found


def translation() -> None:
    note = "Test 2016, small model, 2,100 steps. Bars: ± over three seeds; hollow: one seed."
    about = "Multi30k, English to German: BLEU against attention parameters"
    axes, found = new_axes(about, note, "attention parameters, millions", "BLEU"), of_translation()
    for point in found:
        mark(axes, point, "#c2410c" if point.name.startswith("mhe") else "#3f51b5")
    label(axes, found)
    axes.margins(x=0.15)
    save(axes, "translation.svg")


def of_atlas(lines: Lines, task: str) -> list[Point]:
    """Scores of `mha` and of models of as many parameters, if their seeds are done, and caches."""
    cases = {"mha": MHA, "mha, deeper": Case("depth", "mha")}
    cases |= {name: Case("limits", name) for name in WIDE}
    for regime, more in (("depth", ""), ("width", ", wider MLP")):
        cases |= {kind + more: Case(regime, kind) for kind in models(task)[regime] if kind != "mha"}
    found = []
    for name, case in cases.items():
        own = measured(lines, case)
        values = own.values(DECIDES[task][0]) if own else []
        if len(values) > 1:
            config = changed(base_of(task), models(task)[case.regime][case.name])
            found.append(Point(name, cached_numbers(config), *with_error(values)))
    return found


def atlas(task: str) -> None:
    found, lower = of_atlas(lines_of(HERE / "atlas/records", task), task), DECIDES[task][2]
    note = f"As many parameters; {'lower' if lower else 'higher'} is better. Bars: standard error."
    across = "cached numbers a token, of all layers (log scale)"
    axes = new_axes(f"{ABOUT[task]}: {SCORE[task]} against the cache", note, across, SCORE[task])
    axes.set_xscale("log", base=2)
    for point in found:
        kinds = {"mha": "#111827", "mhe": "#c2410c"}
        mark(axes, point, kinds.get(point.name[:3], "#3f51b5"))
    steps = front([(p.x, p.y) for p in found], lower)
    line = {"drawstyle": "steps-post", "color": "0.6", "linestyle": "--", "linewidth": 1}
    axes.plot(*zip(*steps, strict=True), **line)
    axes.margins(x=0.2)
    label(axes, found)
    save(axes, f"atlas-{task}.svg")


def uptraining() -> None:
    """Test BLEU against the % of the steps, of what goes on from the trained MHA."""
    lines = runs.read(HERE / "uptraining/records/translation.json")["lines"]
    note = "Multi30k, test 2016, small model. Bars: ± over three seeds; dashed: MHA as it was."
    across = "steps, % of those that MHA took"
    axes = new_axes("A trained MHA made another kind, and trained on", note, across, "BLEU")
    ends, colors = [], {name: f"C{number}" for number, name in enumerate(NAMES)}
    for name, color in colors.items():
        scores: dict[float, list[float]] = {}
        for line in lines:
            if line["attention"] == name and line["start"] != "nothing":
                scores.setdefault(100 * line["share"], []).append(line["bleu"])
        points = [Point(name, x, *runs.mean_and_deviation(y)) for x, y in sorted(scores.items())]
        if name == "mha":
            axes.axhline(points[0].y, color=color, linestyle="--", linewidth=1)
            points = points[1:]
        axes.plot([p.x for p in points], [p.y for p in points], color=color)
        for point in points:
            mark(axes, point, color, 4)
        ends.append(points[-1])
    axes.set(xticks=(0, 5, 10, 25), xlim=(-0.5, 33))
    label(axes, ends, left=25, **colors)
    save(axes, "uptraining.svg")


if __name__ == "__main__":
    translation()
    for task in TASKS:
        atlas(task)
    uptraining()
