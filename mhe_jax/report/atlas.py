"""The cost of a score: three pictures, each with the front of the groups that nothing beats."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mhe_jax.report.conditions import unlike_times
from mhe_jax.report.groups import Group, Section
from mhe_jax.report.page import Atlas, Picture
from mhe_jax.report.plots import is_mha, style, svg
from mhe_jax.report.runs import STEP
from mhe_jax.tasks.metrics import lower_is_better
from mhe_jax.training.curve import new_figure, spread_out

NOTE = (
    "The line is the front: the best score at each cost, by the means over seeds. Bars are one "
    "standard deviation over seeds, to either side; a hollow mark has one seed, and no bar. Within "
    "chance: the means differ by at most two standard errors of their difference."
)


class Cost(NamedTuple):
    """The price of a group's score: the mean over its seeds, and their standard deviation."""

    name: str
    unit: str
    scale: float  # to the unit
    mean: Callable[[Group], float | None]
    spread: Callable[[Group], float | None] = lambda group: None

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})"


TIME = Cost("time of a step", "ms", 1e3, lambda g: g.mean(STEP), lambda g: g.spread(STEP))
COSTS = (
    Cost("attention parameters", "millions", 1e-6, lambda g: g.parameters("attention")),
    Cost("cached numbers a token", "all layers", 1, Group.cached_numbers),
    TIME,
)


class Mark(NamedTuple):
    number: int  # of the group in its section
    group: Group
    cost: float
    score: float


def front(points: Sequence[tuple[float, float]], lower: bool) -> list[int]:
    """The numbers of the points (cost, score) that no other beats, by cost.

    A point beats another if it is no worse in both and better in one, so equal points stay.

    Args:
      lower: whether a lower score is better; a lower cost always is.

    >>> front([(3, 9), (1, 5), (2, 4)], lower=False), front([(3, 9), (1, 5), (2, 4)], lower=True)
    ([1, 0], [1, 2])
    """
    both = [(cost, score if lower else -score) for cost, score in points]
    kept = [
        i
        for i, (cost, score) in enumerate(both)
        if not any(c <= cost and s <= score and (c, s) != (cost, score) for c, s in both)
    ]
    return sorted(kept, key=lambda i: both[i])


def atlas(section: Section) -> Atlas:
    """The three pictures of a section."""
    keys = [
        (svg(_key(section, number, group)), group.name)
        for number, group in enumerate(section.groups)
    ]
    crosses = " The cross is mha." if any(is_mha(group.name) for group in section.groups) else ""
    return Atlas([picture(section, cost) for cost in COSTS], keys, NOTE + crosses)


def picture(section: Section, cost: Cost) -> Picture:
    """The scores against one cost. The caption names groups without a mark, and the reason."""
    metric = section.metric.replace("_", " ")
    told = [f"{metric} against {cost.name}."]
    if cost is TIME and (differs := unlike_times(section, STEP)):
        told.append(f"Not drawn: the times do not compare, {differs}.")
        return Picture(" ".join(told))
    marks, without = [], {}
    for number, group in enumerate(section.groups):
        paid, score = cost.mean(group), group.mean(section.metric)
        if paid is not None and score is not None:
            marks.append(Mark(number, group, cost.scale * paid, score))
        else:
            without.setdefault(metric if score is None else cost.name, []).append(group.name)
    points = [(mark.cost, mark.score) for mark in marks]
    best = [marks[i] for i in front(points, lower_is_better(section.metric))]
    if len(marks) > 1:
        told.append(f"By the means, nothing beats {'; '.join(mark.group.name for mark in best)}.")
    # Each mark against the best of the others that cost no more.
    doubts: dict[str | None, list[str]] = {"within chance": [], "one seed": []}
    for mark in marks:
        rivals = [other.group for other in best if other.cost <= mark.cost and other is not mark]
        for rival in rivals[-1:]:
            pairs = doubts.get(mark.group.against(rival, section.metric), [])
            pairs.append(f"{mark.group.name} and {rival.name}")
    says = {"within chance": "Within chance", "one seed": "With one seed, chance is not known"}
    told += [f"{says[found]}: {'; '.join(doubts[found])}." for found in says if doubts[found]]
    if best and cost is TIME:
        told.append(
            f"Medians of training on {best[0].group.runs[0].device or 'an unknown device'}."
        )
    for what, names in without.items():
        who = "all" if len(names) == len(section.groups) else "; ".join(names)
        told.append(f"Not shown, without {what}: {who}.")
    if not best:
        return Picture(" ".join(told))
    figure, spots = _draw(section, cost, marks, best)
    return Picture(" ".join(told), svg(figure), spots)


def _draw(
    section: Section, cost: Cost, marks: Sequence[Mark], best: Sequence[Mark]
) -> tuple[Any, list[tuple[float, float, str]]]:
    """The figure, and a spot for each mark: % from the left and from the top, text."""
    metric = section.metric.replace("_", " ")
    figure = new_figure(figsize=(4.6, 3.6))
    axes = figure.subplots()
    for mark in marks:
        paid, score = cost.spread(mark.group), mark.group.spread(section.metric)
        axes.errorbar(
            mark.cost,
            mark.score,
            xerr=None if paid is None else cost.scale * paid,
            yerr=score,
            capsize=3,
            elinewidth=1,
            **_marker(section, mark.number, mark.group),
        )
    # The best score for a cost: level up to the next mark of the front, and after the last one.
    end = max(mark.cost for mark in marks)
    axes.plot(
        [*(mark.cost for mark in best), end],
        [*(mark.score for mark in best), best[-1].score],
        **{"drawstyle": "steps-post", "color": "0.5", "linewidth": 1.2, "zorder": 1},
    )
    spread_out(axes, [mark.cost for mark in marks], "x")
    better = "higher"
    if lower_is_better(section.metric):
        better = "lower"
        spread_out(axes, [mark.score for mark in marks])
    axes.set(xlabel=cost.label, ylabel=f"{metric} ({better} is better)")
    axes.grid(alpha=0.3)
    figure.draw_without_rendering()  # lays it out
    place = axes.transData - figure.transFigure
    spots = []
    for mark in marks:
        left, bottom = place.transform((mark.cost, mark.score))
        spots.append((100 * left, 100 * (1 - bottom), _told(section, cost, mark)))
    return figure, spots


def _marker(section: Section, number: int, group: Group) -> dict[str, Any]:
    """How a group is drawn: hollow where it has one seed."""
    hollow = {} if group.spread(section.metric) is not None else {"markerfacecolor": "white"}
    return {**style(number, group.name), "markersize": 8, "linestyle": "none", **hollow}


def _key(section: Section, number: int, group: Group) -> Any:
    """The mark alone, for the legend."""
    figure = new_figure(figsize=(0.25, 0.25))
    axes = figure.subplots()
    axes.plot([0], [0], **_marker(section, number, group))
    axes.axis("off")
    return figure


def _told(section: Section, cost: Cost, mark: Mark) -> str:
    """The text at a mark: the group, its score, its cost, and the number of seeds."""
    group = mark.group
    score, seeds = group.spread(section.metric), len(group.values(section.metric))
    paid = cost.spread(group)
    lines = [
        group.name,
        f"{section.metric.replace('_', ' ')}: {mark.score:.4g}{_more(score)}",
        f"{cost.label}: {mark.cost:.4g}{_more(paid and cost.scale * paid)}",
        "one seed" if seeds == 1 else f"{seeds} seeds",
    ]
    return "\n".join(lines)


def _more(spread: float | None) -> str:
    return "" if spread is None else f" ± {spread:.2g}"
