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
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import zip_longest
from typing import Any

from mhe_jax.config import DataConfig, InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.data.readers import INDEX, READERS, Values, flat, open_records
from mhe_jax.tasks.labelled.table import DatasetRow

# The number of a text, and where a span begins and ends in it, in characters.
TextSpan = tuple[int, int, int]

# A whole number as pandas writes it where others are missing.
_WHOLE = re.compile(r"(-?\d+)\.0+")

COPA_QUESTIONS = {
    "cause": "What was the cause of this?",
    "effect": "What happened as a result?",
}


@dataclass(frozen=True, slots=True)
class Example:
    """One example; `label` is the number of a class or choice, or a score; None where unknown."""

    index: Any  # as the data set numbers it
    texts: tuple[str, ...]
    label: float | None
    spans: tuple[TextSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context; `answers` has texts and where they begin, () if it has none."""

    index: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]

    @property
    def texts(self) -> tuple[str, str]:
        return self.question, self.context


@dataclass(frozen=True, slots=True)
class Record:
    """Names and values; for messages, `where` they stand."""

    where: str
    values: Values

    def value(self, field: str, kind: type = object) -> Any:
        """A required value: of kind str a text, of kind int a whole number, 0 or more."""
        values = self.values if field in self.values else flat(self.values)
        if field not in values:
            has = ", ".join(map(repr, values)) or "nothing"
            raise InputError(f"{self.where}: has no {field!r}; it has {has}")
        value = values[field]
        count = type(value) is int and value >= 0
        if not (count if kind is int else isinstance(value, kind)):
            takes = "a whole number, 0 or more" if kind is int else "a text"
            raise InputError(f"{self.where}: field {field!r} is {value!r:.80}: takes {takes}")
        return value


def read_examples(data: DataConfig, row: DatasetRow, split: str) -> list[Any]:
    """The examples of a split (for task span, questions).

    Only those of the test split may come without labels.
    """
    if row.task == "span":
        return _questions(data, row, split)
    names = row.labels or tuple(map(str, range(len(row.texts) - 1)))
    classes = {class_name(name): number for number, name in enumerate(names)}
    found, seen = [], set()
    # A submission, and the scores of MultiRC, tell examples apart by their numbers.
    numbered = split == "test" or row.suite == "superglue"
    for record in _records(data, row, split):
        texts, spans = _texts(record, row)
        label = _label(record, row, classes, required=split != "test")
        index = record.values.get(row.index, record.values.get(INDEX, len(found)))
        if isinstance(index, dict):  # MultiRC
            index = tuple(index.get(part) for part in ("paragraph", "question", "answer"))
        if isinstance(index, str) and index.isdecimal():
            index = int(index)
        identity = (re.split(r":(?=[^:]*$)", record.where)[0], str(index))
        if numbered and identity in seen:
            raise InputError(f"{record.where}: {row.index} {index!r} occurs twice")
        seen.add(identity)
        found.append(Example(index, texts, label, spans))
    return found


def _questions(data: DataConfig, row: DatasetRow, split: str) -> list[Question]:
    """The questions of a split; an answer of the training split must stand in its context."""
    found = {}
    for record in _records(data, row, split):
        index, (question, context) = record.value("id", str), _asked(record)
        answers = tuple(_answers(record, required=split != "test"))
        if split == "train":
            if not answers and not row.may_be_unanswered:
                raise InputError(f"{record.where}: has no answer; data.dataset squad_v2 allows it")
            for text, start in answers:
                if not text.strip() or context[start : start + len(text)] != text:
                    raise InputError(
                        f"{record.where}: answer {text[:40]!r} is not in the context at {start}"
                    )
        if index in found:
            raise InputError(f"{record.where} occurs twice in data.{split}")
        found[index] = Question(index, question, context, answers)
    return list(found.values())


def given_example(row: DatasetRow, item: Any, where: str) -> Example | Question:
    """An example without a label, from its texts in the order of the data set or its fields."""
    if not isinstance(item, dict):
        parts = (item.removesuffix("\n"),) if isinstance(item, str) else item
        if not isinstance(parts, tuple | list) or len(parts) != len(row.texts):
            takes = f"takes {len(row.texts)} texts ({', '.join(row.texts)})"
            raise InputError(f"{where} is {item!r:.80}: {takes}")
        item = dict(zip(row.texts, parts, strict=True))
    record = Record(where, item)
    if row.task == "span":
        return Question(where, *_asked(record), ())
    texts, spans = _texts(record, row)
    return Example(None, texts, None, spans)


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
    fields = (*row.texts, row.label) if row.suite == "own" else ()
    for written in sources:
        source = open_records(written, fields, data.directory, cache)
        if source.form not in (*READERS, "tfds"):
            raise InputError(f"{written}: takes {', '.join(READERS)} or tfds:")
        named = f"{row.label}.name"  # of the classes of `datasets`
        # The mark of TFDS and of published data sets.
        unknown = row.task != "regression" and (row.suite != "own" or source.form == "tfds")
        for where, values in source.read():
            if count == data.max_examples:
                return
            count += 1
            if row.suite == "own" and named in values:
                values[row.label] = values[named]
            if unknown and values.get(row.label) == -1:
                values[row.label] = None
            yield Record(where, values)
    if not count:
        raise InputError(f"data.{split}: {', '.join(sources)}: no examples")


def _asked(record: Record) -> tuple[str, str]:
    question, context = (record.value(field, str) for field in ("question", "context"))
    if not context.strip():
        raise InputError(f"{record.where}: has an empty context")
    return question, context


def is_missing(value: Any) -> bool:
    """Whether a label is null, NaN or blank."""
    return value is None or str(value).strip().lower() in ("", "nan", "<na>")


def class_name(value: Any) -> str | None:
    """The class that a label of a file names; None if it names none."""
    if not isinstance(value, str | int | float | Decimal):
        return None
    name = str(value).lower() if isinstance(value, bool) else str(value).strip()
    whole = _WHOLE.fullmatch(name)
    return whole[1] if whole else name


def _class_of(record: Record, field: str) -> str:
    """The name of a required label."""
    value = record.value(field)
    name = class_name(value)
    if name is None or is_missing(value):
        said = "empty" if value is None else f"{value!r:.80}"
        raise InputError(f"{record.where}: field {field!r} is {said}: takes a label")
    return name


def _label(
    record: Record, row: DatasetRow, classes: dict[str | None, int], required: bool
) -> float | None:
    if not required and is_missing(record.values.get(row.label)):
        return None
    value = record.value(row.label)
    if row.task == "regression":
        try:
            number = float(class_name(value) or "")
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{record.where}: {row.label} is {value!r:.80}: takes a number")
        return number
    if row.suite != "own" and type(value) is int:
        if value not in range(len(classes)):
            raise InputError(
                f"{record.where}: {row.label} is {value!r}: takes 0 to {len(classes) - 1}"
            )
        return value
    if (name := _class_of(record, row.label)) not in classes:
        takes = ", ".join(map(str, classes))
        raise InputError(f"{record.where}: {row.label} is {value!r}: takes one of {takes}")
    return classes[name]


def _texts(record: Record, row: DatasetRow) -> tuple[tuple[str, ...], tuple[TextSpan, ...]]:
    """The texts of an example, and its spans."""
    texts = tuple(record.value(name, str) for name in row.texts)
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
        spans = [
            (i - 1, record.value(f"start{i}", int), record.value(f"end{i}", int)) for i in (1, 2)
        ]
        return texts, tuple(spans)
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


def _answers(record: Record, required: bool) -> Iterator[tuple[str, int]]:
    """Texts and offsets; TFDS has a list of each, a file has one list of both."""
    answers = record.value("answers") if required else record.values.get("answers") or []
    if isinstance(answers, dict) and all(isinstance(side, list) for side in answers.values()):
        answers = [dict(zip(answers, of, strict=True)) for of in zip_longest(*answers.values())]
    if not isinstance(answers, list):
        raise InputError(f"{record.where}: answers is not a list")
    for answer in answers:
        part = Record(record.where, answer if isinstance(answer, dict) else {})
        yield part.value("text", str), part.value("answer_start", int)
