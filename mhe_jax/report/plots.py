"""The pictures of a comparison. Marks and colours stand for the same group in all of a section."""

import io
from collections.abc import Iterable, Mapping
from typing import Any

from mhe_jax.report import paper, published
from mhe_jax.report.groups import Section
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.metrics import lower_is_better
from mhe_jax.training.curve import label_plainly, new_figure, plain, spread_out

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
    _legend(figure, *axes.get_legend_handles_labels())
    return figure


def score_against_parameters(section: Section) -> Any:
    """The score, and PRR, against attention parameters.

    Where the task is one of the paper's, what it published is there too, hollow.
    """
    figure = new_figure(figsize=(11, 5))
    left, right = figure.subplots(1, 2)
    handles, counts = {}, []
    for number, group in enumerate(section.groups):
        count, mean = group.parameters("attention"), group.mean(section.metric)
        if count is None or mean is None:
            continue
        counts.append(count / 1e6)
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
    benchmark = published_for(section)
    if benchmark == published.WMT14:
        for row in published.TRANSLATION:
            for kind, mark in (("mha", "o"), ("mhe_mul", "s")):
                count, score = getattr(row, kind), float(getattr(row, f"{kind}_bleu"))
                name = f"published: {kind} on {benchmark}"
                counts.append(count / 1e6)
                handles[name] = left.plot(count / 1e6, score, marker=mark, **hollow)[0]
            right.plot(100 * row.mhe_mul / row.mha, float(row.prr), marker="s", **hollow)
    elif benchmark:
        for number, (kind, entries) in enumerate(published.ENCODER_SCORES.items()):
            share = 100 * paper.encoder_parameters(kind) / paper.encoder_parameters("mha")
            mark, name = MARKS[number % len(MARKS)], f"published: {kind} on {benchmark}"
            entry = entries[published.BENCHMARKS.index(benchmark)]
            handles[name] = right.plot(share, float(entry.prr), marker=mark, **hollow)[0]
    left.set(
        xlabel="attention parameters (millions)",
        ylabel=section.metric.replace("_", " "),
        title="score",
        xscale="log",
    )
    if counts:
        label_plainly(left.xaxis, counts)
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
    _legend(figure, handles.values(), handles.keys())
    return figure


def published_for(section: Section) -> str | None:
    """The benchmark whose published scores stand beside those of a section; None for others."""
    if not section.groups or lower_is_better(section.metric):
        return None
    return published.benchmark_of(section.groups[0].config)


def memory_figure(lines: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Any:
    """`{run: {name: {T: bytes}}}`: a panel for each run, MB against T on logarithmic axes."""
    figure = new_figure(figsize=(11, 5))
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    sizes = []
    for axes, (run, series) in zip(panels, lines.items(), strict=True):
        lengths = sorted({length for points in series.values() for length in points})
        for number, (name, points) in enumerate(series.items()):
            style = {**_style(number), "markersize": 5, "linewidth": 1.2}
            shown = [size / 1e6 for size in points.values()]
            sizes += shown
            axes.plot(list(points), shown, label=plain(name), **style)
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
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize=8)
