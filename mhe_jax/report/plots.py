"""The pictures of a comparison. A mark and colour are the same group throughout a section."""

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from mhe_jax.report.groups import Section
from mhe_jax.report.runs import STEP
from mhe_jax.report.tables import TIMES, unlike
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.cost import cached_numbers
from mhe_jax.tasks.metrics import lower_is_better

# One more than there are colours in C0 to C9: the first 110 groups all look different.
MARKS = "osD^vh*d<>p"
# Above this ratio of the highest to the lowest value, a linear axis hides the low ones.
WIDE = 4.0


def embedded(figure: Any) -> str:
    """The figure as the address of an image that a page holds itself."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def front(points: Sequence[tuple[float, float]], lower: bool) -> list[tuple[float, float]]:
    """The points (cost, score) that no other beats, by cost: none is as cheap and better.

    >>> front([(3, 9), (1, 5), (2, 4)], lower=False), front([(3, 9), (1, 5), (2, 4)], lower=True)
    ([(1, 5), (3, 9)], [(1, 5), (2, 4)])
    """
    sign, kept = 1 if lower else -1, []
    for point in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not kept or sign * point[1] < sign * kept[-1][1]:
            kept.append(point)
    return kept


def scores_and_costs(section: Section) -> Any:
    """The score against three costs; the line goes through what nothing beats by its mean.

    Bars are one standard deviation over seeds. Times are left out where they do not compare.
    """
    s, lower = section, lower_is_better(section.metric)
    score = s.mean[s.metric]
    known = math.nan if unlike(s, TIMES, STEP) else 1.0
    costs = {
        "attention parameters (millions)": s.mean["parameters.attention"] / 1e6,
        "cached numbers a token": s.groups.config.map(cached_numbers).replace(0, math.nan),
        "time of a step (ms)": 1000 * s.mean[STEP] * known,
    }
    figure = Figure(layout="constrained", figsize=(11, 4))
    panels = figure.subplots(1, len(costs), sharey=True)
    for axes, (name, cost) in zip(panels, costs.items(), strict=True):
        for number, group in enumerate(s.groups.index):
            bars = {"yerr": s.std[s.metric][group], "capsize": 3, "linestyle": "none"}
            axes.errorbar(cost[group], score[group], **bars, **_look(number, group))
        points = [each for each in zip(cost, score, strict=True) if not any(map(math.isnan, each))]
        if best := front(points, lower):
            end = (max(cost for cost, _ in points), best[-1][1])
            axes.plot(*zip(*best, end, strict=True), color="0.5", drawstyle="steps-post", zorder=1)
        _spread_out(axes, [cost for cost, _ in points], "x")
        axes.set(xlabel=name, title="" if points else "not known, or does not compare")
        axes.grid(alpha=0.3)
    better = "lower" if lower else "higher"
    panels[0].set_ylabel(f"{s.metric.replace('_', ' ')} ({better} is better)")
    _legend(figure, panels[0])
    return figure


def _look(number: int, name: str) -> dict[str, Any]:
    """Colour, mark and label of a group; mha, which the others are to match, is a cross."""
    mark = "X" if name.partition(",")[0] == "mha" else MARKS[number % len(MARKS)]
    # A dollar would begin a formula.
    return {"color": f"C{number % 10}", "marker": mark, "label": name.replace("$", r"\$")}


def learning_curves(section: Section) -> Any:
    """Validation loss by step, a line for each run; training loss where there is no validation."""
    figure = Figure(layout="constrained", figsize=(7.5, 4))
    axes = figure.subplots()
    values = []
    for number, group in enumerate(section.groups.index):
        look = {**_look(number, group), "markersize": 4, "linewidth": 1}
        for curve in section.runs[section.runs.group == group].curve:
            if points := curve.get("validation") or curve.get("train"):
                values += [loss for _, loss in points]
                axes.plot(*zip(*points, strict=True), **look)
                look["label"] = None  # that of its first line is enough
    _spread_out(axes, values)
    axes.set(xlabel="step", ylabel=f"loss ({TASKS[section.task].loss_unit})")
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    return figure


def _legend(figure: Any, axes: Any) -> None:
    """Below the axes; its height is added, as it can be taller than they are."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        inches = 0.5 + 0.07 * max(map(len, labels))  # of a column
        ncols = min(max(int(figure.get_figwidth() / inches), 1), 3)
        figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(labels) / ncols))
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize=8)


def _spread_out(axes: Any, values: Sequence[float], which: str = "y") -> None:
    """Makes the axis of these values logarithmic if that helps, with ticks such as 0.5, 1, 2, 5."""
    values = [value for value in values if math.isfinite(value)]
    if values and 0 < WIDE * min(values) < max(values):
        axes.set(**{f"{which}scale": "log"})
        axis = getattr(axes, f"{which}axis")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
