"""Records of labelled examples, from files and data sets as they are distributed.

    suffix      a record is
    .tsv        a line, columns named by the first line; quotes mean nothing
    .csv        a row, quoted as spreadsheets do
    .jsonl      a JSON object a line
    .json       a question of a file in SQuAD's format
    .parquet    a row; so is one of the `.arrow` files that `datasets` saves
    tfds:...    an example of a prepared data set

A pattern or a directory stands for all its files. Text may also be `.gz` or `.xz`. A file without a
header has the columns that its data set's row in `table.py` names.
"""

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.config.files import file_format, files_of
from mhe_jax.config.places import source_path
from mhe_jax.data import columns
from mhe_jax.data.index import LineFile, Rule, flat, json_object, open_lines
from mhe_jax.data.sources import TextLines
from mhe_jax.tasks.labelled.table import DatasetRow

FORMATS = (".tsv", ".csv", ".jsonl")


@dataclass(frozen=True, slots=True)
class Record:
    """Names and values; for messages, `where` they stand.

    `from_tfds`: for a published data set, fields have the names, and classes the numbers, of TFDS
    and the hub of `datasets`.
    """

    where: str
    values: dict[str, Any]
    from_tfds: bool = False

    def text(self, field: str) -> str:
        """A required value, which must be text."""
        value = self.value(field)
        if not isinstance(value, str):
            raise InputError(f"{self.where}: field {field!r} is not a string")
        return value

    def number(self, field: str) -> int:
        """A required value, which must be a whole number, 0 or more."""
        value = self.value(field)
        if type(value) is not int or value < 0:
            raise InputError(
                f"{self.where}: field {field!r} is {value!r}: takes a whole number, 0 or more"
            )
        return value

    def value(self, field: str) -> Any:
        """A required value."""
        if field not in self.values:
            has = ", ".join(map(repr, self.values)) or "nothing"
            raise InputError(f"{self.where}: has no {field!r}; it has {has}")
        return self.values[field]


def read_records(
    written: str, row: DatasetRow, directory: str, cache: Path, left_out: list[str]
) -> Iterator[Record]:
    """The records of one source; `left_out` gets the place of each line that holds none.

    Raises:
      InputError: no such file, or it does not fit its format; names file and line.
    """
    if written.startswith("tfds:"):
        from mhe_jax.data import tfds_source  # slow to import

        for number, example in enumerate(tfds_source.open_rows(written, cache)):
            where = f"{written}: example {number}"
            values = _plain(example)
            yield Record(where, values | flat(values), from_tfds=True)
        return
    for name in files_of(directory, written):
        yield from _records_of(source_path(directory, name), row, cache, left_out)


def _records_of(path: Path, row: DatasetRow, cache: Path, left_out: list[str]) -> Iterator[Record]:
    suffix = file_format(path)
    allowed = (".json",) if row.suite == "squad" else FORMATS
    if suffix not in (*allowed, *columns.SUFFIXES):
        raise InputError(
            f"{path}: takes {', '.join(allowed)} (also as .gz or .xz), "
            f"{', '.join(columns.SUFFIXES)} or tfds:"
        )
    if suffix in columns.SUFFIXES:
        published = row.suite != "own"
        for where, values in columns.rows_of(path, cache, named=not published):
            yield Record(where, values, from_tfds=published)
        return
    file = open_lines(path, Rule(), cache)
    if suffix == ".json":
        yield from _questions(file)
    elif suffix == ".jsonl":
        yield from _objects(str(path), TextLines(file))
    elif suffix == ".csv":
        with file.path.open(encoding="utf-8-sig", newline="") as text:
            yield from _columns(str(path), _quoted(str(path), text), row, left_out)
    else:
        lines = TextLines(file)
        cells = ((i + 1, lines.line(i).decode().split("\t")) for i in range(len(lines)))
        yield from _columns(str(path), cells, row, left_out)


def _quoted(name: str, text: Any) -> Iterator[tuple[int, list[str]]]:
    # Python's own limit is 131,072 characters, less than a long article has.
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(text, strict=True)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise InputError(f"{name}:{reader.line_num}: is not CSV ({error})") from None


def _columns(
    name: str, lines: Iterator[tuple[int, list[str]]], row: DatasetRow, left_out: list[str]
) -> Iterator[Record]:
    """Rows of cells under the names of the first row, or those of a file without a header."""
    number, names = next((line for line in lines if "".join(line[1]).strip()), (1, []))
    if not set(row.texts) & set(names) and len(names) == len(row.headerless):
        yield Record(f"{name}:{number}", dict(zip(row.headerless, names, strict=True)))
        names = list(row.headerless)
    missing = [text for text in row.texts if text not in names]
    if missing:
        has = ", ".join(map(repr, names[:20]))
        raise InputError(f"{name}:{number}: has no column {missing[0]!r}; it has {has}")
    # With lines left out, predictions could not be told apart: only labelled files may skip.
    skips = row.skips_broken_lines and row.label in names
    for number, cells in lines:
        if not cells or (len(cells) == 1 < len(names) and not cells[0].strip()):
            continue  # blank
        if len(cells) == len(names):
            yield Record(f"{name}:{number}", dict(zip(names, cells, strict=True)))
        elif skips and len(cells) < len(names):
            left_out.append(f"{name}:{number}")
        else:
            raise InputError(f"{name}:{number}: has {len(cells)} columns, not {len(names)}")


def _objects(name: str, lines: TextLines) -> Iterator[Record]:
    for i in range(len(lines)):
        if (line := lines.line(i)).strip():
            values = json_object(where := f"{name}:{i + 1}", line)
            yield Record(where, values | flat(values))


def _questions(file: LineFile) -> Iterator[Record]:
    """The questions of a SQuAD file, each with its context."""
    name, data = file.name, file.path.read_text("utf-8-sig")
    try:
        for article in json.loads(data)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    where = f"{name}: question {question.get('id')!r}"
                    yield Record(where, {**question, "context": paragraph.get("context")})
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{name}: is not JSON ({error})") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{name}: is not in SQuAD's format ({error})") from None


def _plain(value: Any) -> Any:
    """A value of TFDS as JSON would give it."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bytes):
        return value.decode()
    return value
