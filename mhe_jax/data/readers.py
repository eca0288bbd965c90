"""Records of files and data sets: a function for each format, by the library that owns it.

    format                   a record is
    .txt, and any other      a line, as `text`; it ends at a line feed, with or without a carriage
                             return before it
    .jsonl                   the JSON object of a line
    .tsv                     a line between tabs, where quotes mean nothing
    .csv                     a row, quoted as spreadsheets do
    .parquet, .arrow         a row; so it is in a directory that `datasets` has saved
    .json                    a question of a file in SQuAD's format
    tfds:NAME/CONFIG:SPLIT   an example of a data set that TFDS has prepared
    demo:SPLIT               a pair of the built-in phrases

The first row of `.tsv` and `.csv` names the columns. Where nobody has named the fields, a table of
one text, or of a source and a target, may lack it. Text may also be `.gz` or `.xz`. Nested values
also have names that dots join: `translation.en`.

A pattern (`corpus/*.txt.gz`) or a directory is one source of all its files, in the order of their
names or of the `state.json` of `datasets`.

A new format is a function that yields `(number, values)` with at least the wanted `fields`, its
line in `READERS`, and its ending in `TABLES` of `config/files.py`.
"""

import csv
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError
from mhe_jax.config.files import TABLES, file_format, files_of
from mhe_jax.config.places import source_path
from mhe_jax.data.cache import identity, local_copy, opened
from mhe_jax.data.published import hint

Values = dict[str, Any]
Records = Iterator[tuple[int, Values]]

BYTE_ORDER_MARK = "\ufeff"
INDEX = "index"  # a field that numbers the records
# The fields where nobody has named any, and so the columns of a table without names.
NAMELESS = ("text",), ("source", "target")
# Formats that users often have, and that hold no lines of text.
NOT_TEXT = {
    *(".zip", ".bz2", ".zst", ".tar", ".pdf", ".docx", ".html", ".htm", ".xml"),
    *(".feather", ".ipynb", ".sgm", ".tmx", ".xlsx"),
}


@dataclass(frozen=True)
class Source:
    """The records of a source: `read()` gives each place, for messages, and the values by name."""

    name: str
    form: str  # `.jsonl`, `tfds`, ...
    identity: Sequence[Any]  # another whenever a file changes
    read: Callable[[], Iterator[tuple[str, Values]]]


def open_records(written: str, fields: Sequence[str], directory: str, cache: Path) -> Source:
    """What `written` names, relative to `directory`; `fields` are wanted of each record.

    Raises:
      InputError: there is no such source, or of several formats; later, when it is read, that a
        file is not of its format. It names file and place.
    """
    if written.startswith("tfds:"):
        from mhe_jax.data import tfds_source  # slow to import

        identities, read = tfds_source.open_split(written)
        return Source(written, "tfds", identities, lambda: ((at, flat(of)) for at, of in read()))
    if written.startswith("demo:"):
        paths = [Path(__file__).parent / "demo" / f"{written.removeprefix('demo:')}.tsv.xz"]
        if not paths[0].is_file():
            raise InputError(f"{written}: takes demo:train, demo:validation or demo:test")
    else:
        paths = [source_path(directory, name) for name in files_of(directory, written)]
    form = _format(paths)
    files = [(str(path), local_copy(path, cache)) for path in paths]
    identities = []
    for name, file in files:
        try:
            identities.append(identity(file))
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            reason = f"no such file{hint(file)}" if missing else error.strerror
            raise InputError(f"{name}: {reason}") from None

    def read() -> Iterator[tuple[str, Values]]:
        for name, file in files:
            yield from _records(file, name, form, fields)

    return Source(written, form, identities, read)


def _format(paths: Sequence[Path]) -> str:
    """The one format of all files: a suffix in `READERS`, or another for lines of text.

    Texts have one suffix, numbers apart: what lies beside them (a README) may be none.
    """
    forms: dict[str, Path] = {}
    for path in paths:
        form = file_format(path)
        forms.setdefault(form if re.fullmatch(r"\.[a-z]\S*", form) else "", path)
    if len(forms) > 1:
        raise InputError(
            f"{' and '.join(map(str, forms.values()))} have different formats: name those of one "
            "by a pattern, such as *.txt"
        )
    ((form, path),) = forms.items()
    if form in NOT_TEXT:
        raise InputError(
            f"{path}: {form} is not a supported format: takes lines of text, {', '.join(READERS)}"
        )
    return form


def _records(
    path: Path, name: str, form: str, fields: Sequence[str]
) -> Iterator[tuple[str, Values]]:
    number = 0
    try:
        for number, values in READERS.get(form, lines)(path, fields):
            yield f"{name}:{number}", values
    except _Broken as error:
        raise InputError(f"{name}:{error}") from None
    except (EOFError, OSError, lzma.LZMAError, zlib.error, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{name}: cannot be read after record {number} ({reason})") from None
    if not number:
        raise InputError(f"{name}: is empty")


class _Broken(Exception):
    """A record that is wrong: its number, and the reason."""


def lines(path: Path, fields: Sequence[str] = ()) -> Records:
    """Each line without its end."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise _Broken(f"{number}: is not UTF-8 ({error.reason})") from None
            if number == 1:
                text = text.removeprefix(BYTE_ORDER_MARK)
            yield number, {"text": text.removesuffix("\n").removesuffix("\r")}


def json_lines(path: Path, fields: Sequence[str]) -> Records:
    """The object of each line that is not blank."""
    for number, values in lines(path):
        if text := values["text"].strip():
            try:
                found = json.loads(text)
                if "\\u" in text:
                    json.dumps(found, ensure_ascii=False).encode()  # fails on half a surrogate pair
            except (ValueError, RecursionError) as error:
                reason = str(error).replace("line 1 column", "column")
                raise _Broken(f"{number}: is not JSON ({reason})") from None
            if not isinstance(found, dict):
                raise _Broken(f"{number}: is not a JSON object")
            yield number, flat(found)


def tab_separated(path: Path, fields: Sequence[str]) -> Records:
    """Cells between tabs."""
    return _named(((number, of["text"].split("\t")) for number, of in lines(path)), fields)


def comma_separated(path: Path, fields: Sequence[str]) -> Records:
    """Cells of CSV."""
    # Python's own limit is 131,072 characters, less than a long article has.
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(opened(path), "utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            yield from _named(((reader.line_num, cells) for cells in reader), fields)
        except csv.Error as error:
            raise _Broken(f"{reader.line_num}: is not CSV ({error})") from None


def _named(rows: Iterator[tuple[int, list[str]]], fields: Sequence[str]) -> Records:
    """Cells by the names in the first row; of a table without names, by `fields`."""
    names: list[str] = []
    for number, cells in rows:
        if len(names) != 1 and not "".join(cells).strip() and len(cells) < 2:
            continue  # blank
        if not names:
            names = cells
            named = tuple(fields) not in NAMELESS or {*cells} & {*fields}
            if named or len(cells) != len(fields):
                continue
            names = list(fields)
        if len(cells or [""]) != len(names):
            raise _Broken(f"{number}: has {len(cells)} columns, not {len(names)} as before")
        yield number, dict(zip(names, cells or [""], strict=True))


def parquet(path: Path, fields: Sequence[str]) -> Records:
    """Rows of Parquet; of many columns only the wanted ones, if all are there."""
    from pyarrow import parquet

    # No pre-buffering: it would keep all that was read of the file in memory until the end.
    how: dict[str, Any] = {"pre_buffer": False, "page_checksum_verification": True}
    file = parquet.ParquetFile(path, buffer_size=1 << 20, **how)
    there = {file.schema.column(i).path for i in range(len(file.schema.names))}
    wanted = [*there & {*fields, INDEX}] if fields and {*fields} <= there else None
    yield from _rows(file.schema_arrow, file.iter_batches(1024, columns=wanted, use_threads=False))


def arrow(path: Path, fields: Sequence[str]) -> Records:
    """Rows of an Arrow stream, as `datasets` saves it."""
    from pyarrow import ipc, memory_map

    stream = ipc.open_stream(memory_map(str(path)))
    yield from _rows(stream.schema, stream)


def _rows(schema: Any, batches: Any) -> Records:
    classes, number = _classes(schema), 0
    for batch in batches:
        batch.validate(full=True)  # reading past the end of a buffer would crash the process
        for values in batch.to_pylist():
            number += 1
            values = flat(values)
            for field in classes.keys() & values.keys():
                names, value = classes[field], values[field]
                found = names[value] if value in range(len(names)) else value
                values[f"{field}.name"] = None if value == -1 else found
            yield number, values


def _classes(schema: Any) -> dict[str, list[str]]:
    """Class names in order, for each field that `datasets` knows to hold classes."""
    try:
        known = flat(json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"])
    except (KeyError, ValueError, TypeError):
        return {}
    fields = [name.removesuffix("._type") for name in known if known[name] == "ClassLabel"]
    return {field: known[f"{field}.names"] for field in fields if f"{field}.names" in known}


def questions(path: Path, fields: Sequence[str]) -> Records:
    """The questions of a SQuAD file, each with its context."""
    with opened(path) as file:
        articles, number = json.load(file), 0
    try:
        for article in articles["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    yield number, {**question, "context": paragraph.get("context")}
    except (KeyError, TypeError, AttributeError) as error:
        raise _Broken(f"question {number + 1}: is not in SQuAD's format ({error})") from None


READERS: dict[str, Callable[[Path, Sequence[str]], Records]] = {
    ".jsonl": json_lines,
    ".tsv": tab_separated,
    ".csv": comma_separated,
    ".parquet": parquet,
    ".arrow": arrow,
    ".json": questions,
}
assert READERS.keys() == TABLES  # by which the config knows a source of pairs


def flat(record: Mapping[str, Any]) -> Values:
    """All fields, and those inside of them by names that dots join; a field of such a name wins.

    >>> flat({"id": 7, "translation": {"en": "yes", "de": "ja"}})["translation.de"]
    'ja'
    """
    found = dict(record)
    for name, value in record.items():
        if isinstance(value, dict):
            inner = {f"{name}.{part}": of for part, of in flat(value).items()}
            found = inner | found
    return found
