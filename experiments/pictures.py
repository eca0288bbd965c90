"""What the pictures of pages have in common; a record always gives the same picture."""

from pathlib import Path
from typing import Any, NamedTuple

IMAGES = Path(__file__).parents[1] / "docs" / "images"


class Point(NamedTuple):
    name: str
    x: float
    y: float
    error: float | None  # None: one seed


def new_axes(title: str, note: str, x: str, y: str) -> tuple[Any, Any]:
    """A figure and its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "mhe_jax", "svg.fonttype": "none"})
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(title=f"{title}\n{note}", xlabel=x, ylabel=y)
    axes.title.set_fontsize("medium")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def mark(axes: Any, point: Point, color: str, size: float = 6) -> None:
    """With the bar of its error; hollow where it has one seed."""
    fill = "white" if point.error is None else color
    axes.errorbar(
        point.x, point.y, yerr=point.error, fmt="o", color=color, markerfacecolor=fill,
        markersize=size,
    )  # fmt: skip


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


def save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / name, metadata={"Date": None})
    print(f"docs/images/{name}")
