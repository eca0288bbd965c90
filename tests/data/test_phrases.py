"""The demo's phrases: the same everywhere, right, and never the same thing in two splits."""

import hashlib
import sys

import pytest

from mhe_jax.config import InputError
from mhe_jax.data import phrases

pytest.importorskip("num2words", reason="needs the extra demo")
pytest.importorskip("babel", reason="needs the extra demo")


FACE, FIGURES = phrases._time_on_the_face, phrases._time_in_figures


@pytest.fixture(scope="module")
def splits():
    return {split: phrases.pairs(split) for split in phrases.SIZES}


def test_no_phrase_comes_twice_nor_in_two_splits(splits):
    for split, size in phrases.SIZES.items():
        assert len(splits[split]) == size
    for side in (0, 1):
        every = [pair[side] for pairs in splits.values() for pair in pairs]
        assert len(set(every)) == len(every) == sum(phrases.SIZES.values())


def _without_frame(german):
    """The number, date or time itself: "um halb vier nachts" and "halb vier nachts" are one."""
    first, _, rest = german.partition(" ")
    framed = {word.strip() for _, word in (*phrases.COUNTED, *phrases.RELATIONS)} - {""}
    return rest if first in framed else german


def test_what_is_held_out_is_the_thing_not_the_phrase(splits):
    trained = {_without_frame(german) for _, german in splits["train"]}
    held_out = {_without_frame(german) for s in ("validation", "test") for _, german in splits[s]}
    assert not trained & held_out


def test_dates_are_held_out_in_every_form(splits):
    # Day and year are the same words in all four forms once the case ending is gone.
    def dates(split):
        return {
            (words[-3].removesuffix("n"), words[-2], words[-1])
            for words in (german.split() for _, german in splits[split][1::3])
        }

    assert not dates("train") & (dates("validation") | dates("test"))


def test_every_word_of_the_test_source_is_in_training(splits):
    trained = {word for english, _ in splits["train"] for word in english.split()}
    assert {word for english, _ in splits["test"] for word in english.split()} <= trained


def test_the_same_on_every_machine(splits):
    """The draws, not the words, which belong to num2words and babel."""
    draw = phrases._random(1234567)  # SplitMix64's published vector
    assert [next(draw), next(draw)] == [6457827717110365317, 3203168211198807973]
    days = [phrases._split_of("date", value) for value in range(10_000)]
    digest = hashlib.sha256(" ".join(days).encode()).hexdigest()
    assert digest == "4003ac714c8312670cd711154a20e03b5858c9775af9cd411672011cc4035300"
    assert phrases.pairs("test") == splits["test"]


@pytest.mark.parametrize(
    ("say", "given", "expected"),
    [
        (FACE, (0, 0), ("twelve o'clock at night", "zwölf Uhr nachts")),
        (FACE, (3, 45), ("quarter to four at night", "Viertel vor vier nachts")),
        (
            FACE,
            (15, 25),
            ("twenty-five past three in the afternoon", "fünf vor halb vier nachmittags"),
        ),
        (FIGURES, (0, 5), ("twelve oh five a.m.", "null Uhr fünf")),
        (FIGURES, (13, 0), ("one p.m.", "dreizehn Uhr")),
        (phrases._words, (101_001, "de"), "einhunderteintausendeins"),
    ],
)
def test_times_and_numbers(say, given, expected):
    assert say(*given) == expected


@pytest.mark.parametrize("say", [FACE, FIGURES])
def test_each_minute_of_the_day_has_a_phrase_of_its_own(say):
    """So the German follows from the English, and the other way round."""
    said = [say(*divmod(minute, 60)) for minute in range(24 * 60)]
    for side in (0, 1):
        assert len({pair[side] for pair in said}) == 24 * 60


@pytest.mark.parametrize("package", ["num2words", "babel"])
def test_missing_package_names_the_extra(package, monkeypatch):
    for cached in (phrases._words, phrases._months, phrases._weekdays):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"need {package}.*-e .*\[demo\]"):
        phrases.pairs("test")
