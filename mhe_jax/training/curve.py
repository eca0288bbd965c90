"""The picture that ends a run: its losses, its best checkpoint and its metric, by step."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError, not_installed
from mhe_jax.config.files import METRICS, publish
from mhe_jax.tasks.task import Task
from mhe_jax.training import tracking

PICTURE = "learning_curve.png"
# Above this ratio of the highest to the lowest loss, a linear axis hides the end of the curve.
WIDE = 4.0

Points = list[tuple[int, float]]


def learning_curve(workdir: Path, task: Task, best_step: int | None) -> str:
    """Draws what metrics.jsonl has; returns the line to tell people.

    Both losses are without label smoothing, so that they can be compared. Training losses are means
    over the steps since the one before, with dropout; validation losses are at their steps.

    Args:
      workdir: of the run.
      task: names the unit of the loss, and the metric that has an axis of its own.
      best_step: of the best checkpoint, which is marked; None where there is none.
    """
    try:
        figure = new_figure(figsize=(8, 4.8))
    except InputError as error:
        return f"no {PICTURE}: {error}"
    draw(figure, list(tracking.read(workdir / METRICS)), task, best_step)
    figure.suptitle(plain(workdir.name), fontsize=11)
    try:
        with publish(workdir / PICTURE) as draft:
            figure.savefig(draft, format="png", dpi=120)
    except InputError as error:  # the run is whole without it
        return f"no {PICTURE}: {error}"
    return f"learning curve: {workdir / PICTURE}"


def draw(figure: Any, lines: Sequence[dict[str, Any]], task: Task, best_step: int | None) -> None:
    """Puts the lines of metrics.jsonl on an empty figure."""
    axes = figure.subplots()
    validation = [line for line in lines if line["split"] == "validation"]
    train = _points([line for line in lines if line["split"] == "train"], "loss")
    losses = _points(validation, "loss")
    style = {"color": "C0", "linewidth": 1.2, "markersize": 4, "label": "training loss"}
    # A line of one point would not show.
    drawn = axes.plot(*_columns(train), "o-" if len(train) == 1 else "-", **style)
    drawn += axes.plot(*_columns(losses), "o-", color="C1", markersize=4, label="validation loss")
    spread_out(axes, [loss for _, loss in train + losses])
    axes.set(xlabel="step", ylabel=f"loss ({task.loss_unit})")
    axes.grid(alpha=0.3)
    for name in task.metrics:
        # Perplexity only repeats the loss.
        if (points := _points(validation, name)) and "perplexity" not in name:
            right = axes.twinx()
            shown = {"bleu": "BLEU", "auc": "AUC"}.get(name, name)
            style = {"color": "C2", "markersize": 4, "label": f"validation {shown}"}
            drawn += right.plot(*_columns(points), "s--", **style)
            right.set_ylabel(shown)
            break
    if best_step is not None:
        style = {"color": "0.4", "linestyle": ":", "linewidth": 1.2}
        drawn.append(axes.axvline(best_step, label=f"best checkpoint, step {best_step}", **style))
    drawn = [artist for artist in drawn if len(artist.get_xdata())]
    if drawn:
        figure.legend(handles=drawn, loc="outside lower center", ncols=len(drawn), fontsize=9)


def _points(lines: Sequence[dict[str, Any]], name: str) -> Points:
    found = []
    for line in lines:
        value = line.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            found.append((line["step"], value))
    return found


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def spread_out(axes: Any, values: Sequence[float], which: str = "y") -> None:
    """Makes the axis of these values logarithmic if that helps, with ticks such as 0.5, 1, 2, 5."""
    values = [value for value in values if math.isfinite(value)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low <= 0 or high <= WIDE * low:
        return
    axes.set(**{f"{which}scale": "log"})
    label_plainly(getattr(axes, f"{which}axis"), values)


def label_plainly(axis: Any, values: Sequence[float]) -> None:
    """Gives a logarithmic axis of values above 0 ticks such as 0.5, 1, 2, 5 around them."""
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    axis.set_ticks([tick for tick in ticks if below <= tick <= above])
    axis.set_ticks([], minor=True)
    axis.set_major_formatter("{x:g}")


def plain(name: str) -> str:
    """`name` as plain text: dollars would begin a formula, and a lone surrogate is no character."""
    return name.encode(errors="backslashreplace").decode().replace("$", r"\$")


def new_figure(**options: Any) -> Any:
    """An empty matplotlib figure, laid out so that nothing overlaps.

    Raises:
      InputError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("it needs matplotlib", "report") from None
    return Figure(layout="constrained", **options)
