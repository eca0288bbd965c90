"""The pictures of a comparison. A mark and colour are the same group throughout a section."""

import io
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mhe_jax.report import paper, published
from mhe_jax.report.groups import Section
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.metrics import lower_is_better
from mhe_jax.training.curve import label_plainly, new_figure, plain, spread_out

# Each contrasts with white by 3 to 1 or more.
COLOURS = (
    *("#1f77b4", "#c85200", "#2a8a2a", "#d62728", "#8458b8"),
    *("#8c564b", "#c2499f", "#6b6b6b", "#85860e", "#0f8796"),
)
# One more than there are colours: the first 110 groups all look different.
MARKS, CROSSES = "osD^vh*d<>p", "XP"


def svg(figure: Any) -> str:
    """The figure as text that a page can embed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def style(number: int, name: str) -> dict[str, Any]:
    """Colour and mark of a group; mha, which the others are to match, is a cross."""
    round_, colour = divmod(number, len(COLOURS))
    mark = CROSSES[round_ % len(CROSSES)] if is_mha(name) else MARKS[number % len(MARKS)]
    return {"color": COLOURS[colour], "marker": mark}


def is_mha(name: str) -> bool:
    return name.partition(",")[0] == "mha"


def learning_curves(section: Section) -> Any:
    """Validation loss by step, a line for each run; training loss where there is no validation."""
    figure = new_figure(figsize=(7.5, 4))
    axes = figure.subplots()
    splits, values = set(), []
    for number, group in enumerate(section.groups):
        label = plain(group.name)  # of its first line
        for run in group.runs:
            split = "validation" if run.curve.get("validation") else "training"
            points = run.curve.get(split.removesuffix("ing"))
            if points:
                splits.add(split)
                values += [loss for _, loss in points]
                axes.plot(
                    *zip(*points, strict=True),
                    **style(number, group.name),
                    markersize=4,
                    linewidth=1,
                    label=label,
                )
                label = None
    spread_out(axes, values)
    which = " or ".join(sorted(splits, reverse=True))
    axes.set(xlabel="step", ylabel=f"{which} loss ({TASKS[section.task].loss_unit})".strip())
    axes.grid(alpha=0.3)
    _legend(figure, *axes.get_legend_handles_labels())
    return figure


def beside_the_paper(section: Section, benchmark: str) -> Any:
    """PRR against the share of mha's attention parameters; the paper's numbers are hollow."""
    figure = new_figure(figsize=(7.5, 4))
    axes = figure.subplots()
    handles, lower = {}, lower_is_better(section.metric)
    marks: dict[str, Any] = {"markersize": 8, "linestyle": "none"}
    for number, group in enumerate(section.groups):
        count, mean = group.parameters("attention"), group.mean(section.metric)
        base = section.base(group, "mha")
        base_count = base and base.parameters("attention")
        base_mean = base and base.mean(section.metric)
        if count and mean is not None and base_count and base_mean:
            kept = paper.retention(mean, base_mean, lower_is_better=lower)
            (handles[plain(group.name)],) = axes.plot(
                100 * count / base_count, kept, **marks, **style(number, group.name)
            )
    if benchmark == published.WMT14:
        printed = [("mhe_mul", row.mhe_mul / row.mha, row.prr) for row in published.TRANSLATION]
    else:
        column, whole = published.BENCHMARKS.index(benchmark), paper.encoder_parameters("mha")
        printed = [
            (kind, paper.encoder_parameters(kind) / whole, entries[column].prr)
            for kind, entries in published.ENCODER_SCORES.items()
        ]
    kinds = list(published.ENCODER_SCORES)
    for kind, share, prr in printed:
        grey = {**style(kinds.index(kind), kind), "color": "0.45", "markerfacecolor": "none"}
        (handles[f"published: {kind} on {benchmark}"],) = axes.plot(
            100 * share, float(prr), **marks, **grey
        )
    axes.set(
        xlabel="attention parameters, % of mha's", ylabel="PRR: % of mha's score", xscale="log"
    )
    axes.set_xticks([20, 30, 50, 70, 100], ["20", "30", "50", "70", "100"])
    axes.grid(alpha=0.3)
    axes.tick_params(which="minor", labelbottom=False)
    _legend(figure, handles.values(), handles.keys())
    return figure


def published_for(section: Section) -> str | None:
    """The benchmark whose published scores stand beside those of a section; None for others."""
    if not section.groups or lower_is_better(section.metric):
        return None
    return published.benchmark_of(section.groups[0].config)


def memory_figure(lines: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Any:
    """`{run: {name: {T: bytes}}}`: a panel for each run, MB against T on logarithmic axes."""
    figure = new_figure(figsize=(11, 4.5))
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    sizes = []
    for axes, (run, series) in zip(panels, lines.items(), strict=True):
        lengths = sorted({length for points in series.values() for length in points})
        for number, (name, points) in enumerate(series.items()):
            marks = {**style(number, name), "markersize": 5, "linewidth": 1.2}
            shown = [size / 1e6 for size in points.values()]
            sizes += shown
            axes.plot(list(points), shown, label=plain(name), **marks)
        axes.set(xscale="log", yscale="log", xlabel="T", ylabel="MB", title=run)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    if sizes:
        label_plainly(panels[0].yaxis, sizes)
    _legend(figure, *panels[0].get_legend_handles_labels())
    return figure


def _legend(figure: Any, handles: Iterable[Any], labels: Iterable[str]) -> None:
    """Below the axes, in as many columns as the longest name leaves room for."""
    if labels := list(labels):
        inches = 0.5 + 0.07 * max(map(len, labels))  # of a column
        ncols = min(max(int(figure.get_figwidth() / inches), 1), 3)
        # Its height is added: with many long names it can be taller than the axes.
        figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(labels) / ncols))
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize=8)
