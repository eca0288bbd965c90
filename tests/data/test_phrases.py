"""The demo's phrases: the same everywhere, right, and never the same thing in two splits."""

import hashlib
import sys

import pytest

from mhe_jax.config import InputError
from mhe_jax.data import phrases

pytest.importorskip("num2words", reason="needs the extra demo")
pytest.importorskip("babel", reason="needs the extra demo")


@pytest.fixture(scope="module")
def splits():
    return {split: phrases.pairs(split) for split in phrases.SIZES}


def test_sizes_and_no_phrase_twice(splits):
    for split, size in phrases.SIZES.items():
        assert len(splits[split]) == size
        for side in (0, 1):
            assert len({pair[side] for pair in splits[split]}) == size


def test_no_phrase_of_one_split_is_in_another(splits):
    for side in (0, 1):
        sides = [{pair[side] for pair in pairs} for pairs in splits.values()]
        assert not sides[0] & sides[1]
        assert not sides[0] & sides[2]
        assert not sides[1] & sides[2]


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


def test_three_types_take_turns(splits):
    for _, german in splits["test"][1::3]:
        assert german.startswith(("der ", "am ")) or ", der " in german
    for _, german in splits["test"][2::3]:
        assert "Uhr" in german or german.endswith(
            ("nachts", "morgens", "nachmittags", "abends"),
        )


def test_every_word_of_the_test_source_is_in_training(splits):
    trained = {word for english, _ in splits["train"] for word in english.split()}
    assert {word for english, _ in splits["test"] for word in english.split()} <= trained


def test_phrases_are_short(splits):
    assert max(len(side.split()) for pairs in splits.values() for p in pairs for side in p) <= 20


def test_the_same_on_every_machine(splits):
    """The draws, not the words, which belong to num2words and babel."""
    draw = phrases._random(1234567)  # SplitMix64's published vector
    assert [next(draw), next(draw)] == [6457827717110365317, 3203168211198807973]
    days = [phrases._split_of("date", value) for value in range(10_000)]
    digest = hashlib.sha256(" ".join(days).encode()).hexdigest()
    assert digest == "4003ac714c8312670cd711154a20e03b5858c9775af9cd411672011cc4035300"
    assert phrases.pairs("test") == splits["test"]


@pytest.mark.parametrize(
    ("hour", "minute", "english", "german"),
    [
        (0, 0, "twelve o'clock at night", "zwölf Uhr nachts"),
        (1, 0, "one o'clock at night", "ein Uhr nachts"),
        (3, 45, "quarter to four at night", "Viertel vor vier nachts"),
        (9, 59, "one minute to ten in the morning", "eine Minute vor zehn morgens"),
        (12, 30, "half past twelve in the afternoon", "halb eins nachmittags"),
        (15, 15, "quarter past three in the afternoon", "Viertel nach drei nachmittags"),
        (15, 25, "twenty-five past three in the afternoon", "fünf vor halb vier nachmittags"),
        (15, 35, "twenty-five to four in the afternoon", "fünf nach halb vier nachmittags"),
        (18, 2, "two minutes past six in the evening", "zwei Minuten nach sechs abends"),
        (23, 40, "twenty to twelve at night", "zwanzig vor zwölf nachts"),
    ],
)
def test_time_on_the_face(hour, minute, english, german):
    assert phrases._time_on_the_face(hour, minute) == (english, german)


@pytest.mark.parametrize(
    ("hour", "minute", "english", "german"),
    [
        (0, 0, "twelve a.m.", "null Uhr"),
        (0, 5, "twelve oh five a.m.", "null Uhr fünf"),
        (1, 1, "one oh one a.m.", "ein Uhr eins"),
        (12, 0, "twelve p.m.", "zwölf Uhr"),
        (13, 0, "one p.m.", "dreizehn Uhr"),
        (15, 35, "three thirty-five p.m.", "fünfzehn Uhr fünfunddreißig"),
    ],
)
def test_time_in_figures(hour, minute, english, german):
    assert phrases._time_in_figures(hour, minute) == (english, german)


@pytest.mark.parametrize("say", [phrases._time_on_the_face, phrases._time_in_figures])
def test_each_minute_of_the_day_has_a_phrase_of_its_own(say):
    """So the German follows from the English, and the other way round."""
    said = [say(*divmod(minute, 60)) for minute in range(24 * 60)]
    for side in (0, 1):
        assert len({pair[side] for pair in said}) == 24 * 60


@pytest.mark.parametrize(
    ("value", "german"),
    [
        (0, "null"),
        (1_001, "eintausendeins"),
        (101_001, "einhunderteintausendeins"),
        (21_345, "einundzwanzigtausenddreihundertfünfundvierzig"),
    ],
)
def test_numbers(value, german):
    assert phrases._words(value, "de") == german


def test_unknown_split():
    with pytest.raises(InputError, match="has no split 'dev'; it has train, validation, test"):
        phrases.pairs("dev")


@pytest.mark.parametrize("package", ["num2words", "babel"])
def test_missing_package_names_the_extra(package, monkeypatch):
    for cached in (phrases._words, phrases._months, phrases._weekdays):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"need {package}.*-e .*\[demo\]"):
        phrases.pairs("test")
