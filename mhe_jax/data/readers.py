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
import itertools
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mhe_jax.config import InputError
from mhe_jax.config.files import TABLES, file_format, files_of
from mhe_jax.config.places import source_path
from mhe_jax.data.cache import identity, local_copy, opened

Values = dict[str, Any]
Records = Iterator[tuple[int, Values]]

BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error, ValueError, RecursionError)
INDEX = "index"  # a field that numbers the records
# The fields where nobody has named any, and so the columns of a table without names.
NAMELESS = ("text",), ("source", "target")
# What is no example, but names columns: languages, and what pairs are often called.
LIKE_NAMES = re.compile(r"[a-z]{2}(?:[-_][A-Za-z]{2,4})?|src|tgt|trg|input|output", re.IGNORECASE)


class Source(NamedTuple):
    """The records of a source: `read()` gives each place, for messages, and the values by name."""

    name: str
    form: str  # `.jsonl`, `tfds`, ...
    identity: Sequence[Any]  # another whenever a file changes
    read: Callable[[], Iterator[tuple[str, Values]]]


def open_records(written: str, fields: Sequence[str], directory: str, cache: Path) -> Source:
    """What `written` names, relative to `directory`; `fields` are wanted of each record. What is
    wrong inside of a file is an InputError with file and place when it is read.
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
    form, files, identities = _format(paths), [], []
    for path in paths:
        file = local_copy(path, cache)
        try:
            identities.append(identity(file))
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "no such file" if missing else error.strerror
            raise InputError(f"{path}: {reason}") from None
        files.append((path, file))

    def read() -> Iterator[tuple[str, Values]]:
        for name, file in files:
            number = 0
            try:
                for number, values in READERS.get(form, lines)(file, fields):
                    yield f"{name}:{number}", values
            except InputError as error:  # it begins with the number of a record
                raise InputError(f"{name}:{error}") from None
            except BROKEN as error:
                reason = " ".join(str(error).split())[:200]
                place = f"{name}: cannot be read after record {number}"
                raise InputError(f"{place} ({reason})") from None
            if not number:
                raise InputError(f"{name}: is empty")

    return Source(written, form, identities, read)


def _format(paths: Sequence[Path]) -> str:
    """The one suffix of all files, numbers apart: what lies beside them may be no text."""
    forms: dict[str, Path] = {}
    for path in paths:
        form = file_format(path)
        forms.setdefault(form if re.fullmatch(r"\.[a-z]\S*", form) else "", path)
    if len(forms) > 1:
        raise InputError(
            f"{' and '.join(map(str, forms.values()))} have different formats: name those of one "
            "by a pattern, such as *.txt"
        )
    return next(iter(forms))


def lines(path: Path, fields: Sequence[str] = ()) -> Records:
    """Each line without its end."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{number}: is not UTF-8 ({error.reason})") from None
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
                raise InputError(f"{number}: is not JSON ({reason})") from None
            if not isinstance(found, dict):
                raise InputError(f"{number}: is not a JSON object")
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
            raise InputError(f"{reader.line_num}: is not CSV ({error})") from None


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
            if len(cells) == 2 and all(map(LIKE_NAMES.fullmatch, cells)):
                one, other = cells
                raise InputError(
                    f"{number}: '{one}' and '{other}' look like names of columns: --data.fields "
                    "takes that of the source and that of the target; if they are an example, "
                    "begin with a line of 'source' and 'target'"
                )
            names = list(fields)
        if len(cells or [""]) != len(names):
            raise InputError(f"{number}: has {len(cells)} columns, not {len(names)} as before")
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
    """Rows; where `datasets` has stored a class as a number, FIELD.name has its name."""
    try:
        known = flat(json.loads(schema.metadata[b"huggingface"])["info"]["features"])
        fields = [name.removesuffix("._type") for name in known if known[name] == "ClassLabel"]
        classes = {field: known[f"{field}.names"] for field in fields}
    except (KeyError, ValueError, TypeError):
        classes = {}
    numbers = itertools.count(1)
    for batch in batches:
        batch.validate(full=True)  # reading past the end of a buffer would crash the process
        for values in map(flat, batch.to_pylist()):
            for field in classes.keys() & values.keys():
                names, value = classes[field], values[field]
                found = names[value] if value in range(len(names)) else value
                values[f"{field}.name"] = None if value == -1 else found
            yield next(numbers), values


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
        raise InputError(f"question {number + 1}: is not in SQuAD's format ({error})") from None


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
    """All fields, and those inside of them by names that dots join; a field of such a name wins."""
    found = dict(record)
    for name, value in record.items():
        if isinstance(value, dict):
            found = {f"{name}.{part}": of for part, of in flat(value).items()} | found
    return found
