"""What the demo shows of itself at its end."""

import json

import pytest

from mhe_jax.cli import demo
from mhe_jax.config import InputError

PHRASES = [(f"english {number}", f"german {number}") for number in range(60)]
RIGHT = [german for _, german in PHRASES]
SPREAD = [0, 10, 20, 30, 40, 50]


def with_wrong(*numbers):
    return [f"bad {n}" if n in numbers else line for n, line in enumerate(RIGHT)]


def blocks(text):
    """The number of each phrase that is shown, and the lines below it."""
    found = []
    for line in text.splitlines():
        if line.startswith("english "):
            found.append((int(line.split()[1]), []))
        else:
            found[-1][1].append(line)
    return found


def test_right_ones_have_no_mark():
    assert blocks(demo.examples(PHRASES, RIGHT)) == [(n, [f"    german {n}"]) for n in SPREAD]


def test_a_wrong_one_has_a_mark_and_the_right_one_below_it():
    shown = blocks(demo.examples(PHRASES, with_wrong(20, 7)))
    assert (20, ["  ✗ bad 20", "    right: german 20"]) in shown
    assert shown[-1] == (7, ["  ✗ bad 7", "    right: german 7"])


def test_the_first_is_a_right_one_and_some_more_wrong_ones_come_last():
    shown = blocks(demo.examples(PHRASES, with_wrong(0, 10, 3, 5, 7)))
    assert [number for number, _ in shown] == [20, 30, 40, 50, 0, 10, 3, 5]


def evaluated(place, bleu=90.0, sources=("demo:test",), lines=None):
    from mhe_jax.data.phrases import pairs

    lines = [german for _, german in pairs("test")] if lines is None else lines
    scores = {"bleu": bleu, "exact_match": 80.0, "sources": list(sources)}
    (place / "eval_test.json").write_text(json.dumps(scores))
    (place / "test.hypotheses.txt").write_text("".join(f"{line}\n" for line in lines))
    return str(place)


@pytest.fixture
def words():
    for library in ("num2words", "babel"):
        pytest.importorskip(library)


@pytest.mark.parametrize(
    ("wanted", "enough"),
    [
        ("", True),
        ("--bleu 90 --exact_match 80", True),
        ("--bleu 90.1", False),
        ("--exact_match 80.1", False),
    ],
)
def test_too_low_a_score_is_status_1(tmp_path, words, capsysbinary, wanted, enough):
    arguments = [evaluated(tmp_path), *wanted.split()]
    if enough:
        demo.main(arguments)
    else:
        with pytest.raises(SystemExit, match="^1$"):
            demo.main(arguments)
    out = capsysbinary.readouterr().out.decode()
    assert "\n90.0 BLEU and 80.0 % exact match" in out
    assert "✗" not in out


def test_mistakes_are_one_line(tmp_path, words):
    with pytest.raises(InputError, match="no run given; usage: "):
        demo.main([])
    with pytest.raises(InputError, match="was not evaluated"):
        demo.main([""])
    with pytest.raises(InputError, match="gs://bucket/name"):
        demo.main(["s3://bucket/run"])
    with pytest.raises(InputError, match=r"was not evaluated: .*eval.*"):
        demo.main([str(tmp_path)])
    with pytest.raises(InputError, match="was not evaluated on demo:test$"):
        demo.main([evaluated(tmp_path, sources=("x.tsv",))])
    with pytest.raises(InputError, match="was not evaluated on demo:test$"):
        demo.main([evaluated(tmp_path, lines=["one"])])
