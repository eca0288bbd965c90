"""The pictures of the page, from its records: the score of each model against its cache.

python experiments/atlas/picture.py       # writes docs/images/atlas-lm.svg and the other
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import pictures
from experiments.atlas.cases import TASKS, WIDE, Case, base_of, models
from experiments.atlas.sizes import changed
from experiments.atlas.tables import DECIDES, MHA, Lines, lines_of, measured, with_error
from experiments.pictures import Point
from mhe_jax.report.plots import front
from mhe_jax.tasks.cache import cached_numbers

RECORDS = Path(__file__).parent / "records"
ABOUT = {"lm": "A language model on WikiText-2", "translation": "Translation on Multi30k"}
SCORE = {"lm": "validation loss", "translation": "BLEU"}


def points(lines: Lines, task: str) -> list[Point]:
    """`mha` of the config, and the models of as many parameters, if their seeds are done."""
    cases = {"mha": MHA, "mha, deeper": Case("depth", "mha")}
    cases |= {name: Case("limits", name) for name in WIDE}
    for regime, more in (("depth", ""), ("width", ", wider MLP")):
        cases |= {kind + more: Case(regime, kind) for kind in models(task)[regime] if kind != "mha"}
    found = []
    for name, case in cases.items():
        own = measured(lines, case)
        values = own.values(DECIDES[task][0]) if own else []
        if len(values) > 1:
            config = changed(base_of(task), models(task)[case.regime][case.name])
            found.append(Point(name, cached_numbers(config), *with_error(values)))
    return found


def draw(task: str) -> None:
    found, lower = points(lines_of(RECORDS, task), task), DECIDES[task][2]
    note = f"As many parameters; {'lower' if lower else 'higher'} is better. Bars: standard error."
    across = "cached numbers a token, of all layers (log scale)"
    about = f"{ABOUT[task]}: {SCORE[task]} against the cache"
    figure, axes = pictures.new_axes(about, note, across, SCORE[task])
    axes.set_xscale("log", base=2)
    for point in found:
        kinds = {"mha": "#111827", "mhe": "#c2410c"}
        pictures.mark(axes, point, kinds.get(point.name[:3], "#3f51b5"))
    steps = front([(p.x, p.y) for p in found], lower)
    line = {"drawstyle": "steps-post", "color": "0.6", "linestyle": "--", "linewidth": 1}
    axes.plot(*zip(*steps, strict=True), **line)
    axes.margins(x=0.2)
    pictures.label(axes, found)
    pictures.save(figure, f"atlas-{task}.svg")


if __name__ == "__main__":
    for each in TASKS:
        draw(each)
