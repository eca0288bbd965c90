"""The pictures of a comparison. Marks and colours stand for the same group in all of a section."""

import io
from collections.abc import Mapping
from typing import Any

from mhe_jax.report import paper, published
from mhe_jax.report.groups import Section
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.metrics import lower_is_better
from mhe_jax.training.curve import new_figure, plain, spread_out

MARKS = "osD^vP*X<>p"  # one more than there are colours: the first 110 groups all look different


def svg(figure: Any) -> str:
    """The figure as text that a page can embed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "marker": MARKS[number % len(MARKS)]}


def learning_curves(section: Section) -> Any:
    """Validation loss by step, a line for each run; training loss where there is no validation."""
    figure = new_figure(figsize=(7.5, 4.5))
    axes = figure.subplots()
    splits, values = set(), []
    for number, group in enumerate(section.groups):
        for run in group.runs:
            split = "validation" if run.curve.get("validation") else "training"
            points = run.curve.get(split.removesuffix("ing"))
            if points:
                splits.add(split)
                values += [loss for _, loss in points]
                first = run is group.runs[0]
                axes.plot(
                    *zip(*points, strict=True),
                    **_style(number),
                    markersize=4,
                    linewidth=1,
                    label=plain(group.name) if first else None,
                )
    spread_out(axes, values)
    which = " or ".join(sorted(splits, reverse=True))
    axes.set(xlabel="step", ylabel=f"{which} loss ({TASKS[section.task].loss_unit})".strip())
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    return figure


def score_against_parameters(section: Section) -> Any:
    """The score, and PRR, against attention parameters, with the published ones hollow."""
    figure = new_figure(figsize=(11, 5))
    left, right = figure.subplots(1, 2)
    handles = {}
    for number, group in enumerate(section.groups):
        count, mean = group.parameters("attention"), group.mean(section.metric)
        if count is None or mean is None:
            continue
        spread = group.spread(section.metric)
        style = {**_style(number), "markersize": 8, "linestyle": "none"}
        handles[plain(group.name)] = left.errorbar(
            count / 1e6, mean, yerr=spread, capsize=3, **style
        )
        base = section.base(group, "mha")
        base_count = base and base.parameters("attention")
        base_mean = base and base.mean(section.metric)
        if base_count and base_mean:
            kept = paper.retention(mean, base_mean, lower_is_better=lower_is_better(section.metric))
            right.plot(100 * count / base_count, kept, **style)
    hollow = {"markerfacecolor": "none", "linestyle": "none", "markersize": 8, "color": "0.45"}
    if section.metric == "bleu":
        for row in published.TRANSLATION:
            for kind, mark in (("mha", "o"), ("mhe_mul", "s")):
                count, score = getattr(row, kind), float(getattr(row, f"{kind}_bleu"))
                name = f"published: {kind} on WMT14, other data and sizes"
                handles[name] = left.plot(count / 1e6, score, marker=mark, **hollow)[0]
            right.plot(100 * row.mhe_mul / row.mha, float(row.prr), marker="s", **hollow)
    else:
        for number, (kind, entries) in enumerate(published.ENCODER_SCORES.items()):
            share = 100 * paper.encoder_parameters(kind) / paper.encoder_parameters("mha")
            mark, name = MARKS[number % len(MARKS)], f"published: {kind}, GLUE to SQuAD v2.0"
            for entry in entries:
                handles[name] = right.plot(share, float(entry.prr), marker=mark, **hollow)[0]
    left.set(
        xlabel="attention parameters (millions)",
        ylabel=section.metric.replace("_", " "),
        title="score",
        xscale="log",
    )
    left.xaxis.set_major_formatter("{x:g}")
    right.set(
        xlabel="attention parameters, % of mha's",
        ylabel="PRR: % of mha's score",
        title="share of mha's score",
        xscale="log",
    )
    right.set_xticks([20, 30, 50, 70, 100], ["20", "30", "50", "70", "100"])
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.tick_params(which="minor", labelbottom=False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def memory_figure(lines: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Any:
    """`{run: {name: {T: bytes}}}`: a panel for each run, MB against T on logarithmic axes."""
    figure = new_figure(figsize=(11, 5))
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    for axes, (run, series) in zip(panels, lines.items(), strict=True):
        lengths = sorted({length for points in series.values() for length in points})
        for number, (name, points) in enumerate(series.items()):
            style = {**_style(number), "markersize": 5, "linewidth": 1.2}
            axes.plot(
                list(points), [size / 1e6 for size in points.values()], label=plain(name), **style
            )
        axes.set(xscale="log", yscale="log", xlabel="T", ylabel="MB", title=run)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.tick_params(which="minor", labelleft=False)
        axes.grid(alpha=0.3)
    _legend(figure, panels[0])
    return figure


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
