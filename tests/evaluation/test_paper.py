"""The published tables: everything that is printed is shown, with the right verdict."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from mhe_jax.report import paper, published

ROOT = Path(__file__).parents[2]


def test_all_counts_are_shown_and_only_the_last_digit_of_mha_differs():
    rows = paper.parameter_rows()
    assert len(rows) == 21
    differing = [(r.name, r.printed, r.shown) for r in rows if r.verdict != "equal"]
    assert differing == [("mha", "28.32", "28.31")]
    assert [r.verdict for r in rows].count("differs") == 1


def test_all_prr_and_peop_are_shown_and_rounding_explains_each():
    prr, peop = paper.retention_rows(), paper.elasticity_rows()
    assert (len(prr), len(peop)) == (35, 24)
    assert all(row.verdict in ("equal", "within") for row in prr + peop)
    assert [row.verdict for row in prr + peop].count("equal") == 45
    # Each cell of the paper once.
    cells = {(row.table, row.name) for row in prr}
    assert len(cells) == 35
    assert {row.name for row in peop} == set(published.ENCODER_SCORES) - {"sha"}
    assert {row.table for row in peop} == set(published.BENCHMARKS)


def test_intervals_hold_every_score_that_rounds_to_the_printed_one():
    """By brute force over scores in steps of a hundredth, for one PRR and one PEoP."""
    (row,) = (r for r in paper.retention_rows() if (r.table, r.name) == ("GLUE", "mqa"))
    around = [Fraction(n, 100) for n in range(-5, 6)]
    found = [100 * (Fraction("81.3") + a) / (Fraction("81.9") + b) for a in around for b in around]
    assert (min(found), max(found)) == (row.low, row.high)
    assert row.computed == 100 * Fraction("81.3") / Fraction("81.9")
    (row,) = (r for r in paper.elasticity_rows() if (r.table, r.name) == ("GLUE", "mhe_add"))
    spent = Fraction(8_875_008 - 8_847_360, 8_847_360)
    found = [
        (Fraction("80.4") + a - Fraction("79.2") - b) / (Fraction("79.2") + b) / spent
        for a in around
        for b in around
    ]
    assert (min(found), max(found)) == (row.low, row.high)


@pytest.mark.parametrize(
    ("printed", "computed", "low", "high", "verdict"),
    [
        ("98.2", "98.24", "98.24", "98.24", "equal"),
        ("98.2", "98.26", "98.25", "98.40", "within"),
        ("98.2", "98.26", "98.26", "98.40", "differs"),
        ("98.2", "98.0", "97.9", "98.14", "differs"),
        ("98.2", "98.0", "97.9", "98.15", "within"),
        ("1,000", "1000", "1000", "1000", "equal"),
        ("1,000", "1001", "1001", "1001", "differs"),
    ],
)
def test_verdicts(printed, computed, low, high, verdict):
    numbers = (Fraction(text) for text in (computed, low, high))
    assert paper.Row("table", "model", printed, *numbers).verdict == verdict


def test_a_wrong_score_is_told(monkeypatch):
    entries = published.ENCODER_SCORES["el"]
    wrong = entries[0]._replace(prr="97.7")
    changed = {**published.ENCODER_SCORES, "el": (wrong, *entries[1:])}
    monkeypatch.setattr(published, "ENCODER_SCORES", changed)
    assert paper.counts(paper.retention_rows())["differs"] == 1
    assert "| GLUE | el | 97.7 | 98.0 | 97.93 to 98.17 | differs |" in paper.tables()


def test_retention_and_elasticity():
    assert paper.retention(45.0, 50.0) == 90
    assert paper.retention(55.0, 50.0, lower_is_better=True) == pytest.approx(90)
    assert paper.elasticity(11.0, 300, 10.0, 200) == pytest.approx(0.2)
    assert paper.elasticity(9.0, 300, 10.0, 200, lower_is_better=True) == pytest.approx(0.2)
    assert paper.elasticity(11.0, 200, 10.0, 200) is None


def test_the_command_hides_nothing():
    done = subprocess.run(
        [sys.executable, "eval.py", "paper"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == {
        "parameters": {"equal": 20, "within": 0, "differs": 1},
        "prr": {"equal": 25, "within": 10, "differs": 0},
        "peop": {"equal": 20, "within": 4, "differs": 0},
    }
    shown = [line for line in lines if line.endswith(("| equal |", "| within |", "| differs |"))]
    assert len(shown) == 21 + 35 + 24
