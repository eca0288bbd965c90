"""Records as labelled examples: texts, label, and the spans that matter.

    CB, RTE, ...     texts and label as the record has them
    MultiRC          a paragraph, and a question with one of its answers
    COPA             the premise with its question in words, and each choice
    WiC              two sentences, and where the word stands in each
    WSC              one text, and where noun phrase and pronoun stand

Spans are read as in the baselines of Wang et al. 2019 (SuperGLUE), section 4: a classifier gets
the vectors of the spans in addition to that of the whole.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import zip_longest
from typing import Any

import numpy as np

from mhe_jax.config import DataConfig, InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.data.batches import Draw
from mhe_jax.data.readers import INDEX, Values, flat, open_records
from mhe_jax.tasks.labelled.table import DatasetRow

# The number of a text, and where a span begins and ends in it, in characters.
TextSpan = tuple[int, int, int]

# A whole number as pandas writes it where others are missing.
_WHOLE = re.compile(r"(-?\d+)\.0+")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = re.compile(r"[^\W\d_]{2,}")

COPA_QUESTIONS = {
    "cause": "What was the cause of this?",
    "effect": "What happened as a result?",
}


@dataclass(frozen=True, slots=True)
class Example:
    """One example; of task span, `texts` are a question and its context."""

    index: Any  # as the data set numbers it
    texts: tuple[str, ...]
    label: float | None = None  # a class, a choice or a score; None where unknown
    spans: tuple[TextSpan, ...] = ()
    answers: tuple[tuple[str, int], ...] = ()  # texts, and where they begin in the context


@dataclass(frozen=True, slots=True)
class Record:
    """Names and values; for messages, `where` they stand, and the data set that they are of."""

    where: str
    values: Values
    row: DatasetRow | None = None

    def value(self, field: str, kind: type = object) -> Any:
        """A required value: of kind str a text, of kind int a whole number, 0 or more."""
        if field not in self.values:
            has = ", ".join(map(repr, self.values)) or "nothing"
            if self.row and self.row.name == "own":  # else the data set names its fields
                named_by = "label_field" if field == self.row.label else "fields"
                has += f": --data.{named_by} names it"
            raise InputError(f"{self.where}: has no {field!r}; it has {has}")
        value = self.values[field]
        count = type(value) is int and value >= 0
        if not (count if kind is int else isinstance(value, kind)):
            takes = "a whole number, 0 or more" if kind is int else "a text"
            raise InputError(f"{self.where}: field {field!r} is {value!r:.80}: takes {takes}")
        return value


def read_examples(data: DataConfig, row: DatasetRow, split: str) -> list[Example]:
    """The examples of a split; only those of the test split may come without labels."""
    classes = {class_name(name): number for number, name in enumerate(label_names(data, row))}
    found = []
    for record in _records(data, row, split):
        texts, spans = _texts(record, row)
        if row.task == "span":
            answers = _answers(record, row, texts[1], split)
            found.append(Example(record.value("id", str), texts, answers=answers))
            continue
        index = record.values.get("idx", record.values.get(INDEX, len(found)))
        if isinstance(index, dict):  # MultiRC
            index = tuple(index.get(part) for part in ("paragraph", "question", "answer"))
        label = _label(record, row, classes, required=split != "test")
        found.append(Example(index, texts, label, spans))
    return found


def given_example(row: DatasetRow, item: Any, where: str) -> Example:
    """An example without a label, from its texts in the order of the data set or its fields."""
    if not isinstance(item, dict):
        parts = (item.removesuffix("\n"),) if isinstance(item, str) else item
        if not isinstance(parts, tuple | list) or len(parts) != len(row.texts):
            takes = f"takes {len(row.texts)} texts ({', '.join(row.texts)})"
            raise InputError(f"{where} is {item!r:.80}: {takes}")
        item = dict(zip(row.texts, parts, strict=True))
    texts, spans = _texts(Record(where, flat(item)), row)
    return Example(None, texts, spans=spans)


def label_names(data: DataConfig, row: DatasetRow) -> tuple[str, ...]:
    """The names of the classes of a task, () for a regression.

    For `own` examples they are the distinct labels of the training split, sorted.
    """
    if row.labels or row.task in ("regression", "span"):
        return row.labels
    if row.task == "multiple_choice":
        return tuple(map(str, range(len(row.texts) - 1)))
    names = {_class_of(record, row.label) for record in _records(data, row, "train")}
    if len(names) < 2:
        raise InputError(f"data.train: has one label, {min(names)!r}: takes two or more")
    return tuple(sorted(names))


def _records(data: DataConfig, row: DatasetRow, split: str) -> Iterator[Record]:
    cache, sources, count = cache_directory(data.cache_directory), getattr(data, split), 0
    if not sources:
        raise InputError(f"data.{split} is not set: it names the file or data set to read")
    own, named = row.name == "own", f"{row.label}.name"  # of the classes of `datasets`
    for written in sources:
        fields = (*row.texts, row.label) if own else ()
        source = open_records(written, fields, data.directory, cache)
        # The mark of TFDS and of published data sets.
        unknown = row.task != "regression" and (not own or source.form == "tfds")
        for where, values in source.read():
            if count == data.max_examples:
                return
            count += 1
            if own and named in values:
                values[row.label] = values[named]
            if unknown and values.get(row.label) == -1:
                values[row.label] = None
            yield Record(where, values, row)
    if not count:
        raise InputError(f"data.{split}: {', '.join(sources)}: no examples")


def is_missing(value: Any) -> bool:
    """Whether a label is null, NaN or blank."""
    return value is None or str(value).strip().lower() in ("", "nan", "<na>")


def class_name(value: Any) -> str | None:
    """The class that a label of a file names; None if it names none."""
    if is_missing(value) or not isinstance(value, str | int | float | Decimal):
        return None
    name = str(value).lower() if isinstance(value, bool) else str(value).strip()
    whole = _WHOLE.fullmatch(name)
    return whole[1] if whole else name


def _class_of(record: Record, field: str) -> str:
    """The name of a required label."""
    value = record.value(field)
    if (name := class_name(value)) is None:
        raise InputError(f"{record.where}: field {field!r} is {value!r:.80}: takes a label")
    return name


def _label(
    record: Record, row: DatasetRow, classes: dict[str | None, int], required: bool
) -> float | None:
    if not required and is_missing(record.values.get(row.label)):
        return None
    name, value = _class_of(record, row.label), record.value(row.label)
    if row.task == "regression":
        takes = "a number"
        try:
            number = float(name)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    else:
        numbered = row.name != "own" and type(value) is int
        number = value if numbered else classes.get(name)
        if number in range(len(classes)):
            return number
        takes = f"one of {', '.join(map(str, classes))}"
    raise InputError(f"{record.where}: {row.label} is {value!r:.80}: takes {takes}")


def _texts(record: Record, row: DatasetRow) -> tuple[tuple[str, ...], tuple[TextSpan, ...]]:
    """The texts of an example, and its spans."""
    texts = tuple(record.value(name, str) for name in row.texts)
    if row.task == "span" and not texts[1].strip():
        raise InputError(f"{record.where}: has an empty context")
    if row.name == "multirc":
        paragraph, question = texts
        return (paragraph, f"{question} {record.value('answer', str)}"), ()
    if row.name == "copa":
        premise, *choices = texts
        asked = record.value("question", str)
        if asked not in COPA_QUESTIONS:
            raise InputError(f"{record.where}: question is {asked!r}: takes cause or effect")
        return (f"{premise} {COPA_QUESTIONS[asked]}", *choices), ()
    if row.name == "wic":
        ends = [(record.value(f"start{i}", int), record.value(f"end{i}", int)) for i in (1, 2)]
        return texts, tuple((text, *place) for text, place in enumerate(ends))
    if row.name == "wsc":
        return texts, tuple(_words(record, texts[0], i) for i in (1, 2))
    return texts, ()


def _words(record: Record, text: str, number: int) -> TextSpan:
    """The place of the words of a WSC span; words are separated by white space."""
    span = record.value(f"span{number}_text", str)
    words = list(re.finditer(r"\S+", text))
    first = record.value(f"span{number}_index", int)
    last = first + max(len(span.split()), 1) - 1
    start, end = words[min(first, len(words) - 1)].start(), words[min(last, len(words) - 1)].end()
    # Without the punctuation around it, where the text has the span letter by letter.
    exact = text[start:end].lower().find(span.lower().strip())
    return (0, start, end) if exact < 0 else (0, start + exact, start + exact + len(span.strip()))


def _answers(
    record: Record, row: DatasetRow, context: str, split: str
) -> tuple[tuple[str, int], ...]:
    """Those of the training split must be there, and stand in the context."""
    answers = record.values.get("answers") or [] if split == "test" else record.value("answers")
    # TFDS has a list of texts and one of places, a file has one list of both.
    if isinstance(answers, dict) and all(isinstance(side, list) for side in answers.values()):
        answers = [dict(zip(answers, of, strict=True)) for of in zip_longest(*answers.values())]
    if not isinstance(answers, list):
        raise InputError(f"{record.where}: answers is not a list")
    parts = [Record(record.where, part if isinstance(part, dict) else {}) for part in answers]
    found = tuple((part.value("text", str), part.value("answer_start", int)) for part in parts)
    if split == "train":
        if not found and row.name != "squad_v2":
            raise InputError(f"{record.where}: has no answer; data.dataset squad_v2 allows it")
        for text, start in found:
            if not text.strip() or context[start : start + len(text)] != text:
                raise InputError(
                    f"{record.where}: answer {text[:40]!r} is not in the context at {start}"
                )
    return found


def misspelt(examples: Sequence[Example], rate: float, seed: int) -> list[Example]:
    """The examples with each word of their texts misspelt with probability `rate`."""
    generator = np.random.default_rng([Draw.SPELLING, seed])
    return [
        replace(one, texts=tuple(misspell(text, rate, generator) for text in one.texts))
        for one in examples
    ]


def misspell(text: str, rate: float, generator: np.random.Generator) -> str:
    """The text with each word misspelt with probability `rate`, as people in a hurry do.

    A misspelt word has one letter dropped, doubled or replaced by another, or two neighbours
    exchanged, each equally likely if it changes the word.
    """

    def replaced(match: re.Match[str]) -> str:
        word = found = match[0]
        wrong = generator.random() < rate
        while wrong and found == word:
            i, letter = (
                int(generator.integers(len(word))),
                LETTERS[generator.integers(len(LETTERS))],
            )
            found = (
                word[:i] + word[i + 1 :],
                word[:i] + word[i] + word[i:],
                word[:i] + letter + word[i + 1 :],
                word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :],
            )[generator.integers(4)]
        return found

    return _WORD.sub(replaced, text)
