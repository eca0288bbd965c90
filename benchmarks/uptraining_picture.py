"""The picture of docs/uptraining.md: test BLEU against steps of uptraining, from its record.

    python benchmarks/uptraining_picture.py           # writes docs/images/uptraining.svg

Means over three seeds, bars their standard deviation. The same record gives the same picture, byte
for byte.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks.svg import GREY, Plot
from mhe_jax.report.tables import mean_and_deviation

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "records" / "uptraining" / "translation.json"
OUT = ROOT / "docs" / "images" / "uptraining.svg"
COLORS = {
    "gqa": "#0f766e",
    "mva": "#3f51b5",
    "mhe_mul": "#c2410c",
    "mhe_add-2-groups": "#65a30d",
    "mhe_add": "#db2777",
    "mqa": "#7c3aed",
    "mha": "#374151",
}
ABOUT = "A trained MHA made another kind, and trained on"
NOTE = "Multi30k, test 2016, small model. Bars: ± over three seeds; dashed: MHA as it was."
BLEU = (22, 35)
NEIGHBOURS = ((0, 5), (5, 10), (10, 25))


def main() -> None:
    OUT.write_text(picture(json.loads(RECORD.read_text())["lines"]), encoding="utf-8")


def picture(lines: list[dict[str, Any]]) -> str:
    plot = Plot(ABOUT, NOTE, x=(-0.5, 25), y=BLEU, right=150)
    plot.axes(
        {0: "at once", 5: "5 %", 10: "10 %", 25: "25 %"},
        {bleu: str(bleu) for bleu in range(BLEU[0], BLEU[1], 2)},
        ("steps, of those that MHA took", "BLEU"),
    )
    ends = {}
    for name, color in COLORS.items():
        points = curve(lines, name)
        if not points:
            continue
        if name == "mha":
            whole = points[0][1]
            plot.line(*plot.at(0, whole), *plot.at(25, whole), GREY, dashes="6 4")
            ends[name], points = plot.at(25, whole), points[1:]
        for (x1, y1, _), (x2, y2, _) in zip(points, points[1:], strict=False):
            if (x1, x2) not in NEIGHBOURS:
                continue  # what lies between is not measured
            plot.line(*plot.at(x1, y1), *plot.at(x2, y2), color, 1.5)
        for x, y, spread in points:
            plot.mark(x, y, color, spread, 3.5)
        if points:
            ends[name] = plot.at(*points[-1][:2])
    height = 0.0
    for name, (_, down) in sorted(ends.items(), key=lambda end: end[1][1]):
        height = max(height + 17, down + 4)
        plot.text(plot.across(25) + 10, height, name.replace("-2-", ", 2 "), fill=COLORS[name])
    return plot.svg()


def curve(lines: list[dict[str, Any]], name: str) -> list[tuple[float, float, float | None]]:
    """(% of the steps, mean, standard deviation) of what goes on from the trained MHA."""
    scores: dict[float, list[float]] = {}
    for line in lines:
        if line["attention"] == name and line["start"] != "nothing":
            scores.setdefault(100 * line["share"], []).append(line["bleu"])
    return [(share, *mean_and_deviation(found)) for share, found in sorted(scores.items())]


if __name__ == "__main__":
    main()
