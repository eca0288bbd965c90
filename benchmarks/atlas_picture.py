"""The pictures of docs/atlas.md: scores against cached numbers, at the same number of parameters.

    python benchmarks/atlas_picture.py      # writes docs/images/atlas-TASK.svg

By docs/records/atlas: means over the fresh seeds, bars their standard error; the line is the front,
the best score for each size of cache. The same record gives the same picture, byte for byte.
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import command_line
from benchmarks.atlas_cases import TASKS, WIDE, Case, base_of, models
from benchmarks.atlas_tables import DECIDES, MHA, Lines, measured, read, with_error
from benchmarks.sizes import changed
from benchmarks.svg import GREY, Plot
from mhe_jax.report.atlas import front
from mhe_jax.tasks.cache import cached_numbers

ROOT = Path(__file__).parents[1]
RECORDS, IMAGES = ROOT / "docs" / "records" / "atlas", ROOT / "docs" / "images"
MHE, OTHER, CROSS = "#c2410c", "#3f51b5", "#111827"
ABOUT = {"lm": "A language model on WikiText-2", "translation": "Translation on Multi30k"}
SCORE = {"lm": "validation loss", "translation": "BLEU"}
# At least as far apart are the lines of labels.
LINE = 16


class Point(NamedTuple):
    name: str
    cached: int
    score: float
    error: float


def main() -> None:
    command_line.PlainParser(__doc__).parse_args()
    for task in TASKS:
        if drawn := picture(read(RECORDS, task), task):
            file = IMAGES / f"atlas-{task}.svg"
            file.write_text(drawn, encoding="utf-8")
            print(file.relative_to(ROOT))


def points(lines: Lines, task: str) -> list[Point]:
    """`mha` of the config, and the models of as many parameters, if their seeds are done."""
    cases = {"mha": MHA, "mha, deeper": Case("depth", "mha")}
    cases |= {name: Case("limits", name) for name in WIDE}
    for regime, more in (("depth", ""), ("width", ", wider MLP")):
        for kind in models(task)[regime]:
            if kind != "mha":
                cases[kind + more] = Case(regime, kind)
    found = []
    for name, case in cases.items():
        own = measured(lines, case)
        values = own.values(DECIDES[task][0]) if own else []
        mean, error = with_error(values) if values else (0.0, None)
        if error is not None:
            config = changed(base_of(task), models(task)[case.regime][case.name])
            found.append(Point(name.replace("-2-", ", 2 "), cached_numbers(config), mean, error))
    return found


def picture(lines: Lines, task: str) -> str | None:
    """None before `mha` and another kind have their seeds."""
    found = points(lines, task)
    if len(found) < 2:
        return None
    lower, step = DECIDES[task][2], 0.02 if task == "lm" else 0.5
    low = math.floor(min(p.score - p.error for p in found) / step) * step
    high = math.ceil(max(p.score + p.error for p in found) / step) * step
    cached = [p.cached for p in found]
    better = "lower" if lower else "higher"
    best = [found[i] for i in front([(p.cached, p.score) for p in found], lower)]
    note = f"As many parameters; {better} is better. Bars: standard error."
    if len(best) > 1:
        note += " Dashed: the front."
    plot = Plot(
        f"{ABOUT[task]}: {SCORE[task]} against the cache",
        note,
        x=(math.log2(min(cached)) - 0.25, math.log2(max(cached)) + 0.8),
        y=(low, high),
    )
    ticks: dict[float, str] = {
        k: f"{2**k:,}" for k in range(20) if min(cached) <= 2**k <= max(cached)
    }
    count = round((high - low) / step)
    heights = [low + k * step for k in range(count + 1)]
    digits = 2 if lower else 1
    plot.axes(
        ticks,
        {y: f"{y:.{digits}f}" for y in heights},
        ("cached numbers a token, of all layers (log scale)", ""),
    )
    for one, other in zip(best, best[1:], strict=False):
        corner = plot.at(math.log2(other.cached), one.score)
        plot.line(*plot.at(math.log2(one.cached), one.score), *corner, GREY, 1, "4 3")
        plot.line(*corner, *plot.at(math.log2(other.cached), other.score), GREY, 1, "4 3")
    for p in found:
        plot.mark(math.log2(p.cached), p.score, color(p.name), p.error)
    label(plot, found)
    return plot.svg()


def color(name: str) -> str:
    return CROSS if name.startswith("mha") else MHE if name.startswith("mhe") else OTHER


def label(plot: Plot, found: list[Point]) -> None:
    """To the right of each mark, or to the left of it where another mark is in the way.

    Below a label that is in the way.
    """
    marks = [plot.at(math.log2(p.cached), p.score) for p in found]
    placed: list[tuple[float, float, float]] = []  # left, right, down
    for p in sorted(found, key=lambda p: -p.score):
        mark, down = plot.at(math.log2(p.cached), p.score)
        wide, down = 8 * len(p.name), down - 4  # over the front
        left = mark + 9
        if any(left < x < left + wide and abs(y - down) < LINE for x, y in marks):
            left = mark - 9 - wide
        for start, end, height in placed:
            if left < end and start < left + wide:
                down = max(down, height + LINE)
        placed.append((left, left + wide, down))
        at, anchor = (left, "start") if left > mark else (mark - 9, "end")
        plot.text(at, down, p.name, anchor, fill=color(p.name), halo=True)


if __name__ == "__main__":
    main()
