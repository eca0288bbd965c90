"""The pictures of a comparison: score against costs, and learning curves."""

import base64
import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mhe_jax.report.runs import STEP, TIMES, Section
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.metrics import lower_is_better

MARKS = "osD^vh*d<>p"  # one more than there are colours in C0 to C9
CAPTION = (
    "Score against costs: the line goes through what nothing beats by its mean; bars are one "
    "standard deviation over seeds; the cross is mha. Learning curves have a line for each run."
)


def front(points: Sequence[tuple[float, float]], lower: bool) -> list[tuple[float, float]]:
    """The points (cost, score) that no other beats, by cost: none is as cheap and better."""
    sign, kept = 1 if lower else -1, []
    for point in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not kept or sign * point[1] < sign * kept[-1][1]:
            kept.append(point)
    return kept


def pictures(section: Section) -> dict[str, str]:
    """By name, addresses of images that a page holds itself, with what `CAPTION` says.

    A cost that no group has, or that does not compare, has none. Curves are of the validation
    loss, or of the training loss where there is none. The last tells the marks of all.
    """
    s, lower = section, lower_is_better(section.metric)
    score, known = s.mean[s.metric], math.nan if s.unlike(TIMES, STEP) else 1.0
    costs = {
        "attention parameters (millions)": s.mean["parameters.attention"] / 1e6,
        "cached numbers a token": s.groups.cached,
        "time of a step (ms)": 1000 * s.mean[STEP] * known,
    }
    titled = f"{s.metric.replace('_', ' ')} ({'lower' if lower else 'higher'} is better)"
    looks, drawn = {}, {}
    for number, group in enumerate(s.groups.index):
        # A cross is mha, which the others are to match.
        mark = "X" if group.partition(",")[0] == "mha" else MARKS[number % len(MARKS)]
        looks[group] = {"color": f"C{number % 10}", "marker": mark}
    for name, cost in costs.items():
        points = [each for each in zip(cost, score, strict=True) if not any(map(math.isnan, each))]
        if not points:
            continue
        axes = _axes(name, titled)
        for group, look in looks.items():
            bars = {"yerr": s.std[s.metric][group], "capsize": 3, "linestyle": "none"}
            axes.errorbar(cost[group], score[group], **bars, **look)
        best = front(points, lower)
        end = (max(cost for cost, _ in points), best[-1][1])
        axes.plot(*zip(*best, end, strict=True), color="0.5", drawstyle="steps-post", zorder=1)
        drawn[name] = axes.figure
    axes = _axes("step", f"loss ({TASKS[s.task].loss_unit})")
    for group, look in looks.items():
        for curve in s.runs[s.runs.group == group].curve:
            if points := curve.get("validation") or curve.get("train"):
                axes.plot(*zip(*points, strict=True), **look, markersize=4, linewidth=1)
    if axes.lines:
        drawn["learning curves"] = axes.figure
    if drawn:
        drawn["marks"] = Figure()
        marks = [Line2D([], [], linestyle="none", **look) for look in looks.values()]
        # A dollar would begin a formula.
        names = [textwrap.fill(group.replace("$", r"\$"), 50) for group in looks]
        drawn["marks"].legend(marks, names, frameon=False, fontsize=9)
    return {name: _address(figure) for name, figure in drawn.items()}


def _axes(x: str, y: str) -> Any:
    axes = Figure(figsize=(4.4, 3.6), layout="constrained").add_subplot(xlabel=x, ylabel=y)
    axes.locator_params("x", nbins=5)
    return axes


def _address(figure: Figure) -> str:
    buffer = io.BytesIO()
    # Tight: a legend of any size is whole.
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
