"""The demo's parallel text: English and German numbers, dates and times of day, in words.

Nothing is downloaded: the words come from `num2words` and `babel` (extra `demo`). Every number,
date and minute of the day belongs to one split, by its hash, and so does every phrase about it: a
test phrase shows how well a model combines known words, never whether it has seen the phrase.
Python's and NumPy's generators are not used, so that the text is the same on every machine.
"""

import datetime
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

from mhe_jax.config import InputError, not_installed

Split = Literal["train", "validation", "test"]
Pair = tuple[str, str]

# Pairs in a split; numbers, dates and times take turns.
SIZES: dict[str, int] = {"train": 27_000, "validation": 300, "test": 500}

COUNTED = [
    ("", ""),
    ("number ", "Nummer "),
    ("page ", "Seite "),
    ("line ", "Zeile "),
    ("room ", "Zimmer "),
]
# Each takes the accusative, so that "eine Minute" stays as it is.
RELATIONS = [
    ("", ""),
    ("at ", "um "),
    ("about ", "gegen "),
    ("until ", "bis "),
    ("for ", "für "),
]
FIRST_DAY = datetime.date(1900, 1, 1)
NUM_DAYS = (datetime.date(2100, 1, 1) - FIRST_DAY).days


def pairs(split: Split) -> list[Pair]:
    """All (English, German) pairs of `split`, each once, always the same and in the same order.

    >>> pairs("test")[0] in pairs("train")
    False
    """
    if split not in SIZES:
        raise InputError(f"demo:{split}: has no split {split!r}; it has {', '.join(SIZES)}")
    for package in ("num2words", "babel"):
        if importlib.util.find_spec(package) is None:
            raise not_installed(
                f"the demo's phrases need {package}, which is not installed", "demo"
            )
    draw = _random(int.from_bytes(hashlib.sha256(split.encode()).digest()[:8]))
    found: dict[Pair, None] = {}  # as an ordered set
    makers: list[Callable[[str, Iterator[int]], Pair]] = [_number, _date, _time]
    while len(found) < SIZES[split]:
        make = makers[len(found) % len(makers)]
        count = len(found)
        while len(found) == count:
            found[make(split, draw)] = None
    return list(found)


def _random(state: int) -> Iterator[int]:
    """SplitMix64: 64 random bits at a time."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def _split_of(kind: str, value: int) -> Split:
    """A sixteenth of all values is for validation, a sixteenth for test."""
    share = hashlib.sha256(f"{kind}: {value}".encode()).digest()[0] % 16
    return "test" if share == 0 else "validation" if share == 1 else "train"


def _draw_value(kind: str, split: str, draw: Iterator[int], bound: int, step: int = 1) -> int:
    """A multiple of `step` below `bound` that belongs to the split."""
    while True:
        value = next(draw) % (bound // step) * step
        if _split_of(kind, value) == split:
            return value


def _number(split: str, draw: Iterator[int]) -> Pair:
    """A cardinal below a million, short ones more often than chance, or an ordinal below 1000."""
    if next(draw) % 8 == 0:
        value = 1 + _draw_value("ordinal", split, draw, 999)
        return f"the {_words(value, 'en', 'ordinal')}", f"der {_words(value, 'de', 'ordinal')}"
    bound = (1_000, 10_000, 100_000, 1_000_000, 1_000_000)[next(draw) % 5]
    value = _draw_value("cardinal", split, draw, bound)
    english, german = COUNTED[next(draw) % len(COUNTED)]
    return english + _words(value, "en"), german + _words(value, "de")


def _date(split: str, draw: Iterator[int]) -> Pair:
    """A day of the years 1900 to 2099, with or without its weekday."""
    date = FIRST_DAY + datetime.timedelta(_draw_value("date", split, draw, NUM_DAYS))
    english_day, german_day = _words(date.day, "en", "ordinal"), _words(date.day, "de", "ordinal")
    english_year, german_year = _words(date.year, "en", "year"), _words(date.year, "de", "year")
    (english_month, german_month), (english_weekday, german_weekday) = (
        (names["en"], names["de"]) for names in (_months()[date.month], _weekdays()[date.weekday()])
    )
    english = f"the {english_day} of {english_month}, {english_year}"
    form = next(draw) % 4
    if form == 0:
        return english, f"der {german_day} {german_month} {german_year}"
    if form == 1:
        return f"on {english}", f"am {german_day}n {german_month} {german_year}"
    if form == 2:
        return (
            f"{english_weekday}, {english}",
            f"{german_weekday}, der {german_day} {german_month} {german_year}",
        )
    return (
        f"on {english_weekday}, {english}",
        f"am {german_weekday}, dem {german_day}n {german_month} {german_year}",
    )


def _time(split: str, draw: Iterator[int]) -> Pair:
    """A minute of the day: by the clock face and part of the day, or by a.m. and p.m.

    Half of the draws are multiples of five minutes, for which the clock face has its own words.
    """
    step = 5 if next(draw) % 2 else 1
    value = _draw_value("clock", split, draw, 24 * 60, step)
    english_relation, german_relation = RELATIONS[next(draw) % len(RELATIONS)]
    say = _time_on_the_face if next(draw) % 2 else _time_in_figures
    english, german = say(*divmod(value, 60))
    return english_relation + english, german_relation + german


def _time_in_figures(hour: int, minute: int) -> Pair:
    """three thirty-five p.m. — fünfzehn Uhr fünfunddreißig"""
    half = "a.m." if hour < 12 else "p.m."
    english, german = _words(hour % 12 or 12, "en"), _hour_of(hour)
    if minute == 0:
        return f"{english} {half}", f"{german} Uhr"
    figures = ("oh " if minute < 10 else "") + _words(minute, "en")
    return f"{english} {figures} {half}", f"{german} Uhr {_words(minute, 'de')}"


def _time_on_the_face(hour: int, minute: int) -> Pair:
    """half past three in the afternoon — halb vier nachmittags

    The part of the day follows the time itself, so that each English part has one German one.
    """
    if hour < 4 or hour >= 22:
        english_part, german_part = "at night", "nachts"
    elif hour < 12:
        english_part, german_part = "in the morning", "morgens"
    elif hour < 18:
        english_part, german_part = "in the afternoon", "nachmittags"
    else:
        english_part, german_part = "in the evening", "abends"
    this, following = hour % 12 or 12, (hour + 1) % 12 or 12
    english_this, english_following = _words(this, "en"), _words(following, "en")
    german_this, german_following = _words(this, "de"), _words(following, "de")
    if minute == 0:
        english, german = f"{english_this} o'clock", f"{_hour_of(this)} Uhr"
    elif minute == 30:
        english, german = f"half past {english_this}", f"halb {german_following}"
    elif minute < 30:
        english = f"{_minutes_in_english(minute)} past {english_this}"
        german = (
            f"fünf vor halb {german_following}"  # 25 past three is five before half four
            if minute == 25
            else f"{_minutes_in_german(minute)} nach {german_this}"
        )
    else:
        english = f"{_minutes_in_english(60 - minute)} to {english_following}"
        german = (
            f"fünf nach halb {german_following}"
            if minute == 35
            else f"{_minutes_in_german(60 - minute)} vor {german_following}"
        )
    return f"{english} {english_part}", f"{german} {german_part}"


def _minutes_in_english(minute: int) -> str:
    if minute == 15:
        return "quarter"
    if minute % 5 == 0:
        return _words(minute, "en")
    return f"{_words(minute, 'en')} minute{'s' if minute > 1 else ''}"


def _minutes_in_german(minute: int) -> str:
    if minute == 15:
        return "Viertel"
    if minute % 5 == 0:
        return _words(minute, "de")
    return "eine Minute" if minute == 1 else f"{_words(minute, 'de')} Minuten"


def _hour_of(hour: int) -> str:
    """The hour as it is said before "Uhr": null, ein, zwei ..."""
    return {0: "null", 1: "ein"}.get(hour) or _words(hour, "de")


@cache
def _words(value: int, language: str, form: str = "cardinal") -> str:
    from num2words import num2words

    words = num2words(value, lang=language, to=form)
    # num2words says "einhunderteinstausend" for 101,000 and "nineteen oh-five" for 1905.
    return words.replace("einstausend", "eintausend").replace("oh-", "oh ")


@cache
def _months() -> dict[int, dict[str, str]]:
    return _names("get_month_names")


@cache
def _weekdays() -> dict[int, dict[str, str]]:
    return _names("get_day_names")


def _names(function: str) -> dict[int, dict[str, str]]:
    """{number: {language: name}}, months from 1, weekdays from 0 (Monday)."""
    from babel import dates

    tables = {language: getattr(dates, function)(locale=language) for language in ("en", "de")}
    return {n: {language: tables[language][n] for language in tables} for n in tables["en"]}
