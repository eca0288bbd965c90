"""The pictures of the pages, from their records: the same record gives the same picture.

    python experiments/pictures.py        # writes docs/images/translation.svg and the others

Of translation each kind has the learning rate with the best validation loss of seed 0. The
background is white, for pages that are dark, and text is 9 points or more of a picture 4.8 inches
wide, for those that are narrow.
"""

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(ROOT := Path(__file__).parents[1]))

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from matplotlib.transforms import Bbox

from experiments import runs
from experiments.atlas.cases import TASKS, Case, base_of, models, stages
from experiments.atlas.sizes import changed
from experiments.atlas.tables import DECIDES, MHA, lines_of, measured, seeds, with_error
from experiments.paper.paper import RATES, TRANSLATION
from experiments.uptraining.uptraining import NAMES
from mhe_jax.tasks.cost import cached_numbers

HERE, IMAGES = ROOT / "experiments", ROOT / "docs" / "images"
RECORDS = HERE / "atlas" / "records"
ABOUT = {"lm": "A small language model", "translation": "Translation"}
SCORE = {"lm": "validation loss", "translation": "BLEU"}
COLORS = {"mha": "#1d4ed8", "mva": "#c2410c"}  # by what a name begins with; others are grey
GREY = "#6b7280"
WIDER = Case("limits", "mha, 2 heads")
LINE = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3}
# Where a name may stand beside its mark, in points: the nearest place that is free.
AROUND = [
    (far * math.cos(turn * math.pi / 4), far * math.sin(turn * math.pi / 4))
    for far in (8, 16, 26, 38)
    for turn in (0, 4, 2, 6, 1, 7, 3, 5)
]
AFTER = [(16.0, -11.0 * step) for step in range(9)]


class Point(NamedTuple):
    name: str
    x: float
    y: float
    error: float | None  # None: one seed
    hollow: bool = False

    @property
    def color(self) -> str:
        return COLORS.get(self.name[:3], GREY)


def new_axes(title: str, x: str, y: str) -> Any:
    matplotlib.rcParams.update({"svg.hashsalt": "mhe_jax", "svg.fonttype": "none"})
    figure = Figure(figsize=(4.8, 3.9), layout="constrained")
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=0.1, h_pad=0.1)
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    axes.title.set_fontsize(11)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def mark(axes: Any, point: Point, color: str, size: float = 6) -> None:
    """On the band of its error."""
    if point.error is not None:
        ends = [point.y - point.error, point.y + point.error]
        axes.plot([point.x] * 2, ends, color=color, alpha=0.3, linewidth=5, solid_capstyle="butt")
    fill = "white" if point.hollow else color
    look = {"markerfacecolor": fill, "markersize": size, "zorder": 3}  # above all bands
    axes.plot(point.x, point.y, "o", color=color, **look)


def label(axes: Any, points: list[Point], places: list[tuple[float, float]], colors: Any) -> None:
    """Names beside their marks, clear of all marks and names; a line leads to one farther off."""
    axes.figure.draw_without_rendering()  # lays it out

    def put(point: Point, place: tuple[float, float]) -> Any:
        side = "center" if abs(place[0]) < 1 else "left" if place[0] > 0 else "right"
        where = {"xytext": place, "textcoords": "offset points", "ha": side, "va": "center"}
        look: dict[str, Any] = {"fontsize": 9, "color": colors(point)}
        if math.hypot(*place) > 15:
            start = {"left": 0, "center": 0.5, "right": 1}[side]
            look["arrowprops"] = LINE | {"relpos": (start, 0.5)}
        return axes.annotate(point.name, (point.x, point.y), **where, **look)

    def box(point: Point, place: tuple[float, float]) -> Bbox:
        text = put(point, place)
        text.arrowprops = text.arrow_patch = None  # of the name alone
        found = Bbox(text.get_window_extent().get_points())
        text.remove()
        return found

    taken = []
    for p in points:
        ends = [(p.x, p.y - (p.error or 0)), (p.x, p.y + (p.error or 0))]
        taken.append(Bbox(axes.transData.transform(ends)).padded(4))
    for point in sorted(points, key=lambda p: -p.y):

        def cost(place: tuple[float, float], point: Point = point) -> int:
            own = box(point, place)
            inside = axes.bbox.x0 < own.x0 and own.x1 < axes.bbox.x1 and axes.bbox.y0 < own.y0
            return sum(own.overlaps(other) for other in taken) + 100 * (not inside)

        place = min(places, key=cost)
        taken.append(box(point, place))
        put(point, place)


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
        found.append(
            Point(name, scores[0]["parameters"]["attention"] / 1e6, *bleu, bleu[1] is None)
        )
    return found


def translation() -> None:
    title = "Translation, with the same layers"
    x, y = (
        "attention parameters, millions (← fewer)",
        "BLEU (better →)",
    )
    axes, found = new_axes(title, x, y), of_translation()
    for point in found:
        mark(axes, point, point.color)
    axes.margins(x=0.15)
    label(axes, found, AROUND, lambda point: point.color)
    save(axes, "translation.svg")


def of_atlas(records: Path, task: str) -> list[Point]:
    """Scores and caches of `mha` and of models of as many parameters, if their seeds are done.

    Those of the record of the controls. Hollow are `mha` and what they lack, of the older record:
    it has other seeds, and rates that shorter runs have chosen. One shape of a kind is enough.
    """
    cases = {"mha": MHA, "mha, 2 heads": WIDER}
    deep, wide = models(task)["depth"], models(task)["width"]
    cases |= {f"{name}, deeper": Case("depth", name) for name in deep}
    cases |= {name + ", wider MLP" * (name in deep): Case("width", name) for name in wide}
    newer = f"{task}_controls"
    controls = {case.name: case for stage in stages(newer) for case in stage.cases}
    found: list[Point] = []
    for source, own in ((newer, controls), (task, cases)):
        lines, newest = lines_of(records, source), not found
        had = {point.name for point in found}
        for name, case in own.items():
            runs_of = measured(lines, case, source)
            values = runs_of.values(DECIDES[source][0]) if runs_of else []
            other = case == MHA or name.removesuffix(", deeper") not in had
            if len(values) >= seeds(source) and other:
                config = changed(base_of(source), models(source)[case.regime][case.name])
                scores = *with_error(values), not newest
                found.append(Point(name, cached_numbers(config), *scores))
    return found


def atlas(task: str) -> None:
    found, lower = of_atlas(RECORDS, task), DECIDES[task][2]
    across = "cached numbers a token, log scale (← smaller cache)"
    # Of text that stands turned, right is up.
    up = f"{SCORE[task]} ({'← better' if lower else 'better →'})"
    axes = new_axes(f"{ABOUT[task]}, equal parameters", across, up)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    for point in found:
        mark(axes, point, point.color)
    axes.margins(x=0.15)
    label(axes, found, AROUND, lambda point: point.color)
    save(axes, f"atlas-{task}.svg")


def uptraining() -> None:
    """Test BLEU against the % of the steps, of what goes on from the trained MHA."""
    lines = runs.read(HERE / "uptraining/records/translation.json")["lines"]
    title, across = "A trained mha made another kind", "steps of training on, % of those of mha"
    axes = new_axes(title, across, "BLEU (better →)")
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
    axes.set(xticks=(0, 5, 10, 25), xlim=(-1, 40))
    label(axes, ends, AFTER, lambda point: colors[point.name])
    save(axes, "uptraining.svg")


def main() -> None:
    translation()
    for task in TASKS:
        atlas(task)
    uptraining()


if __name__ == "__main__":
    main()
