"""The picture of README: test BLEU against attention parameters, from docs/records/translation.

    python benchmarks/picture.py                      # writes docs/images/translation.svg

Of each kind the learning rate with the best validation loss; bars are the standard deviation over
three seeds, hollow marks have one seed. The same files give the same picture, byte for byte.
"""

from pathlib import Path

from mhe_jax.report.groups import Group, sections
from mhe_jax.report.runs import read_runs

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "records" / "translation"
OUT = ROOT / "docs" / "images" / "translation.svg"

WIDTH, HEIGHT = 600, 400
LEFT, RIGHT, TOP, BOTTOM = 44, 20, 84, 56  # the margins of the axes
MILLIONS, BLEU = (0.4, 1.7), (32.0, 35.0)  # what the axes show
INK, GREY, MHE, OTHER = "#1f2430", "#6b7280", "#c2410c", "#3f51b5"
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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="sans-serif" font-size="14">',
        f"<title>{ABOUT}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        text(12, 28, ABOUT, fill=INK, size=16),
        text(12, 50, NOTE, fill=GREY),
        *axes(),
        *(part for group in section.groups for part in mark(group)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def axes() -> list[str]:
    parts = []
    for bleu in (32, 33, 34, 35):
        height = y(bleu)
        parts.append(line(LEFT, height, WIDTH - RIGHT, height, "#e5e7eb"))
        parts.append(text(LEFT - 8, height + 4, str(bleu), anchor="end", fill=GREY))
    for tenths in (4, 8, 12, 16):
        right = x(tenths / 10)
        parts.append(text(right, HEIGHT - BOTTOM + 20, f"{tenths / 10} M", "middle", GREY))
    parts.append(line(LEFT, y(BLEU[0]), WIDTH - RIGHT, y(BLEU[0]), GREY))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text(middle, HEIGHT - 12, "attention parameters", "middle", GREY))
    parts.append(text(LEFT - 12, y(35) - 12, "BLEU", "middle", GREY))
    return parts


def mark(group: Group) -> list[str]:
    name = group.name.split(", learning_rate")[0]
    count, bleu, spread = group.parameters("attention"), group.mean("bleu"), group.spread("bleu")
    assert count is not None
    assert bleu is not None
    right, height = x(count / 1e6), y(bleu)
    color = MHE if name.startswith("mhe") else OTHER
    parts = []
    if spread is not None:
        parts.append(line(right, y(bleu - spread), right, y(bleu + spread), color, 1.5))
    fill = color if spread is not None else "#ffffff"
    parts.append(
        f'<circle cx="{right:.1f}" cy="{height:.1f}" r="5" fill="{fill}" '
        f'stroke="{color}" stroke-width="1.5"/>'
    )
    dx, dy, anchor = PLACES.get(name, (10, 4, "start"))
    label = name.replace("num_groups=2", "2 groups").replace("score_groups=2", "2 score groups")
    parts.append(text(right + dx, height + dy, label, anchor, INK))
    return parts


def x(millions: float) -> float:
    low, high = MILLIONS
    return LEFT + (millions - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def y(bleu: float) -> float:
    low, high = BLEU
    return HEIGHT - BOTTOM - (bleu - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{color}" stroke-width="{width}"/>'
    )


def text(
    right: float, down: float, words: str, anchor: str = "start", fill: str = INK, size: int = 14
) -> str:
    return (
        f'<text x="{right:.1f}" y="{down:.1f}" text-anchor="{anchor}" fill="{fill}" '
        f'font-size="{size}">{words}</text>'
    )


if __name__ == "__main__":
    main()
