"""Tables and pictures of docs/atlas.md."""

import json
import re
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import atlas_picture, atlas_tables
from benchmarks.atlas_cases import LARGE, TASKS

ROOT = Path(__file__).parents[1]


def lines(regime, name, losses, scores, rate="4e-3", score="perplexity_per_token"):
    """A search whose best rate is in the middle, and the fresh seeds."""
    who = {"regime": regime, "name": name, "rate": rate}
    edges = [
        {**who, "rate": other, "seed": 0, "validation_loss": 9.0} for other in ("2e-3", "8e-3")
    ]
    chosen = {**who, "seed": 0, "validation_loss": 1.0}
    fresh = [
        {**who, "seed": seed + 1, "steps": 2000, "validation_loss": loss, score: value}
        for seed, (loss, value) in enumerate(zip(losses, scores, strict=True))
    ]
    return [*edges, chosen, *fresh]


def test_rows():
    found = lines("depth", "gqa", [2.0, 2.1, 2.2], [40.0, 41.0, 42.0])
    # A seed at another rate, such as one that was best until a line was deleted, does not count.
    other = {**found[-1], "rate": "2e-3", "validation_loss": 9.0}
    table = atlas_tables.regime([*found, other], "lm", "depth")
    row = next(line for line in table.markdown().splitlines() if line.startswith("| gqa"))
    error = statistics.stdev([2.0, 2.1, 2.2]) / 3**0.5
    assert row.endswith(
        f"| 256 | 33 | 7.00 | 2,000 | 4e-3 | 1.000 | 2.100 ± {error:.3f} | 41.00 ± 0.58 |"
    )
    assert table.markdown().count("not measured") == 4 * 8
    trial = [line | {"steps": 4} if "steps" in line else line for line in found]
    assert "| 7.00 | 4 | 4e-3 |" in atlas_tables.regime(trial, "lm", "depth").markdown()
    # A search that has not ended says nothing.
    table = atlas_tables.regime(found[1:], "lm", "depth")
    assert table.markdown().count("not measured") == 4 * 9


def test_a_page_names_the_tables_that_only_mha_would_fill(tmp_path):
    """`gqa` has seeds by depth, and `mha` in the same shape, which is no score of another kind."""
    found = lines("depth", "gqa", [2.0, 2.1, 2.2], [40.0, 41.0, 42.0])
    found += lines("shape", "mha", [2.0, 2.1, 2.2], [40.0, 41.0, 42.0])
    found += lines("flops", "sha", [], [])  # searched alone
    failed = {"regime": "flops", "name": "gqa", "rate": "4e-3", "seed": 0, "failed": "no memory"}
    for task, lines_of_task in {"lm": [*found, failed], LARGE: [failed]}.items():
        record = {"task": task, "steps": 2000, "lines": lines_of_task}
        tmp_path.joinpath(f"{task}.json").write_text(json.dumps(record))
    page, _, others = atlas_tables.page(tmp_path).partition("### Not measured\n\n")
    titles = re.findall("^### (.*)$", page, re.MULTILINE)
    both = [f"{atlas_tables.NAMES[t]}: " for t in TASKS]
    depth = atlas_tables.REGIMES["depth"]
    fails = [f"{name}: runs that failed" for name in ("Language model", "A larger language model")]
    assert titles == ["The bar", "A larger language model", both[0] + depth, *fails]
    assert others.splitlines() == [
        f"- {task}{name}"
        for name in atlas_tables.REGIMES.values()
        for task in both
        if task + name != both[0] + depth
    ]
    assert page.count("no memory") == 2


@pytest.mark.parametrize(
    ("bleu", "deep", "bar"),
    [
        ([36.0, 36.1, 36.2], [33.0, 33.1, 33.2], "yes"),
        # As good as the error allows; better than one `mha` and not than the other.
        ([33.2, 34.2, 35.2], [33.0, 33.1, 33.2], "no"),
        ([36.0, 36.1, 36.2], [37.0, 37.1, 37.2], "no"),
        ([], [33.0, 33.1, 33.2], "not measured"),
    ],
)
def test_the_bar(bleu, deep, bar):
    """Better than both `mha`, in both tasks, by more than two standard errors of the difference."""
    records = {
        "lm": [
            *lines("shape", "mha", [2.0, 2.01, 2.02], [1, 1, 1]),
            *lines("depth", "mha", [2.1, 2.11, 2.12], [1, 1, 1]),
            *lines("depth", "gqa", [1.9, 1.91, 1.92], [1, 1, 1]),
        ],
        "translation": [
            *lines("shape", "mha", [1, 1, 1], [33.4, 33.5, 33.6], score="bleu"),
            *lines("depth", "mha", [1, 1, 1], deep, score="bleu"),
            *lines("depth", "gqa", [1] * len(bleu), bleu, score="bleu"),
        ],
    }
    rows = {(row[0], row[1]): row[2:] for row in atlas_tables.decision(records).rows}
    loss, _, found = rows[atlas_tables.REGIMES["depth"], "gqa"]
    # (0.01 / √3) · √2 · 2
    assert loss == "+0.100 ± 0.016"
    assert found == bar
    assert (atlas_tables.REGIMES["depth"], "mqa") not in rows


def test_a_picture():
    """Marks of what has its seeds, labels that are not in each other's way, the front."""
    mha = lines("shape", "mha", [2.0, 2.01, 2.02], [1, 1, 1])
    assert atlas_picture.picture(mha, "lm") is None
    one, other = ([1.90, 1.91, 1.92], [1.9001, 1.9101, 1.9201])  # closer than a line of text
    begun = lines("depth", "gqa", [], [])
    kinds = [*lines("depth", "sha", one, one), *lines("depth", "mqa", other, other)]
    wide = lines("width", "mva-narrow", other, other)
    found = atlas_picture.points([*mha, *wide], "lm")
    assert [(p.name, p.cached) for p in found] == [("mha", 768), ("mva-narrow, wider MLP", 360)]
    drawn = atlas_picture.picture([*mha, *kinds, *begun], "lm")
    assert drawn.count("<circle") == 3
    heights = {
        name: float(down)
        for down, name in re.findall(r'<text x="[\d.]+" y="([\d.]+)".*>(mha|sha|mqa)<', drawn)
    }
    assert heights["sha"] - heights["mqa"] == pytest.approx(atlas_picture.LINE, abs=0.1)
    # `sha` has the least cache and the least loss: nothing else is on the front.
    assert "stroke-dasharray" not in drawn
    found = atlas_picture.points([*mha, *kinds, *begun], "lm")
    assert [(p.name, p.cached) for p in found] == [("mha", 768), ("sha", 128), ("mqa", 128)]
    assert found[1].score == pytest.approx(1.91)
    assert found[1].error == pytest.approx(0.01 / 3**0.5)
