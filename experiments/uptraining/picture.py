"""The picture of the page: test BLEU against steps of uptraining, from the record.

python experiments/uptraining/picture.py           # writes docs/images/uptraining.svg
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import pictures, runs
from experiments.pictures import Point

RECORD = Path(__file__).parent / "records" / "translation.json"
NAMES = ("gqa", "mva", "mhe_mul", "mhe_add-2-groups", "mhe_add", "mqa", "mha")
ABOUT = "A trained MHA made another kind, and trained on"
NOTE = "Multi30k, test 2016, small model. Bars: ± over three seeds; dashed: MHA as it was."


def curve(lines: list[dict[str, Any]], name: str) -> list[Point]:
    """Against the % of the steps, what goes on from the trained MHA."""
    scores: dict[float, list[float]] = {}
    for line in lines:
        if line["attention"] == name and line["start"] != "nothing":
            scores.setdefault(100 * line["share"], []).append(line["bleu"])
    return [Point(name, share, *runs.mean_and_deviation(found)) for share, found in scores.items()]


def main() -> None:
    lines = runs.read(RECORD)["lines"]
    steps = "steps, % of those that MHA took"
    figure, axes = pictures.new_axes(ABOUT, NOTE, steps, "BLEU")
    ends, colors = [], {name: f"C{number}" for number, name in enumerate(NAMES)}
    for name, color in colors.items():
        points = sorted(curve(lines, name), key=lambda point: point.x)
        if name == "mha":
            axes.axhline(points[0].y, color=color, linestyle="--", linewidth=1)
            points = points[1:]
        axes.plot([p.x for p in points], [p.y for p in points], color=color)
        for point in points:
            pictures.mark(axes, point, color, 4)
        ends.append(points[-1])
    axes.set(xticks=(0, 5, 10, 25), xlim=(-0.5, 33))
    pictures.label(axes, ends, left=25, **colors)
    pictures.save(figure, "uptraining.svg")


if __name__ == "__main__":
    main()
