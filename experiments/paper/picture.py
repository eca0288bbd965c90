"""The picture of README: test BLEU against attention parameters, from the records of translation.

    python experiments/paper/picture.py                      # writes docs/images/translation.svg

Of each kind the learning rate with the best validation loss of seed 0.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import pictures, runs
from experiments.paper.paper import RATES, TRANSLATION
from experiments.pictures import Point

RECORDS = Path(__file__).parent / "records" / "translation"
ABOUT = "Multi30k, English to German: BLEU against attention parameters"
NOTE = "Test 2016, small model, 2,100 steps. Bars: ± over three seeds; hollow: one seed."


def points(records: Path) -> list[Point]:
    found = []
    for name in TRANSLATION:
        rate = min(RATES, key=lambda rate: runs.loss(records / f"{name},{rate},seed=0"))
        files = sorted(records.glob(f"{name},{rate},seed=*/eval_test.json"))
        scores = [runs.read(file) for file in files]
        bleu = runs.mean_and_deviation([score["bleu"] for score in scores])
        found.append(Point(name, scores[0]["parameters"]["attention"] / 1e6, *bleu))
    return found


def main() -> None:
    found = points(RECORDS)
    figure, axes = pictures.new_axes(ABOUT, NOTE, "attention parameters, millions", "BLEU")
    for point in found:
        pictures.mark(axes, point, "#c2410c" if point.name.startswith("mhe") else "#3f51b5")
    pictures.label(axes, found)
    axes.margins(x=0.15)
    pictures.save(figure, "translation.svg")


if __name__ == "__main__":
    main()
