"""The picture of README: test BLEU against attention parameters, from docs/records/translation.

    python benchmarks/picture.py                      # writes docs/images/translation.svg

Of each kind the learning rate with the best validation loss; bars are the standard deviation over
three seeds, hollow marks have one seed. The same files give the same picture, byte for byte.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks.svg import Plot
from mhe_jax.report.groups import Group, sections
from mhe_jax.report.runs import read_runs

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "records" / "translation"
OUT = ROOT / "docs" / "images" / "translation.svg"

MHE, OTHER = "#c2410c", "#3f51b5"
# Where the label of a group stands, from its mark: right, down, and which end lies there.
PLACES = {
    "mhe_mul": (10, -11, "start"),
    "mhe_add": (10, 22, "start"),
    "sha": (-9, 5, "end"),
    "mhe_add, num_groups=2": (9, 14, "start"),
    "mhe_add, score_groups=2": (4, -22, "start"),
    "mha": (-10, -8, "end"),
}
ABOUT = "Multi30k, English to German: BLEU against attention parameters"
NOTE = "Test 2016, small model, 2,100 steps. Bars: ± over three seeds; hollow: one seed."


def main() -> None:
    OUT.write_text(picture(), encoding="utf-8")


def picture() -> str:
    (section,) = sections(read_runs([RECORDS], "test"), "bleu", ["optimizer.learning_rate"])
    plot = Plot(ABOUT, NOTE, x=(0.4, 1.7), y=(32.0, 35.0))
    plot.axes(
        {tenths / 10: f"{tenths / 10} M" for tenths in (4, 8, 12, 16)},
        {bleu: str(bleu) for bleu in (32, 33, 34, 35)},
        ("attention parameters", "BLEU"),
    )
    for group in section.groups:
        mark(plot, group)
    return plot.svg()


def mark(plot: Plot, group: Group) -> None:
    name = group.name.split(", learning_rate")[0]
    count, bleu, spread = group.parameters("attention"), group.mean("bleu"), group.spread("bleu")
    assert count is not None
    assert bleu is not None
    millions = count / 1e6
    plot.mark(millions, bleu, MHE if name.startswith("mhe") else OTHER, spread)
    dx, dy, anchor = PLACES.get(name, (10, 4, "start"))
    label = name.replace("num_groups=2", "2 groups").replace("score_groups=2", "2 score groups")
    plot.text(plot.across(millions) + dx, plot.down(bleu) + dy, label, anchor)


if __name__ == "__main__":
    main()
