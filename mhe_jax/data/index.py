"""Files made ready for random access: unpacked once, checked once, their lines indexed once.

The index of a file is the int64 byte offset of each line and, last, the file's size. It is built
in chunks while the same pass checks the file, and remembered under the file's path, size and time
of change, so that a second run neither reads nor checks anything. Offsets are mapped, not loaded.
"""

import codecs
import gzip
import json
import lzma
import os
import shutil
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.data.cache import key_of, publish

CHUNK = 8 << 20
PACKED = (".gz", ".xz")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
VERSION = 1  # of the index; part of every key


@dataclass(frozen=True)
class Rule:
    """What each line must be: UTF-8, with `columns` columns, or JSON with string `fields`."""

    columns: int | None = None
    fields: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LineFile:
    """A checked file: `offsets[i]:offsets[i + 1]` is line i of `path` with its end."""

    name: str  # what the user called it, for messages
    path: Path  # plain bytes: the file itself, or what was unpacked from it
    offsets: np.ndarray  # [lines + 1], int64
    key: str  # changes when the file does


def file_format(path: Path) -> str:
    """`.tsv` for `a.tsv` and `a.tsv.gz`: the suffix that says how to read the text.

    >>> file_format(Path("train.jsonl.xz")), file_format(Path("train.en"))
    ('.jsonl', '.en')
    """
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def file_path(directory: str, name: str) -> Path:
    """The file that a config names: relative to `directory`, in both `~` is the user's home."""
    return Path(os.path.expanduser(directory)) / os.path.expanduser(name)


def open_lines(path: Path, rule: Rule, cache: Path) -> LineFile:
    """Unpacks, checks and indexes `path`, or finds that this was done.

    Raises:
      InputError: one line that names the file, the line where there is one, and the reason.
    """
    # A link's own name says what a file is: that of a blob in a content-addressed store does not.
    name, packed = str(path), path.suffix if path.suffix in PACKED else ""
    try:
        # Path.resolve makes another error of links that go round in circles.
        path = Path(os.path.realpath(path, strict=True))
        stat = path.stat()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"{name}: {reason}") from None
    if path.is_dir():
        raise InputError(f"{name}: is a directory, not a file")
    if stat.st_size == 0:
        raise InputError(f"{name}: is empty")
    file_key = key_of(VERSION, packed, str(path), stat.st_size, stat.st_mtime_ns)
    try:
        if packed:
            path = _unpack(name, path, packed, cache / "unpacked" / file_key)
        key = key_of(file_key, rule.columns, rule.fields)
        index = cache / "index" / f"{key}.int64"
        if not _complete(index, path):
            with publish(index) as temporary, path.open("rb") as file, temporary.open("wb") as out:
                scan = _scan_lines if rule.fields is None else _scan_json
                for offsets in scan(name, file, rule):
                    out.write(offsets)
        return LineFile(name, path, np.memmap(index, np.int64, "r"), key)
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from None


def _complete(index: Path, path: Path) -> bool:
    """Whether an index is there and ends where the file does."""
    if not index.exists() or index.stat().st_size < 16:
        return False
    return int(np.fromfile(index, np.int64, offset=index.stat().st_size - 8)[0]) == (
        path.stat().st_size
    )


def _unpack(name: str, path: Path, packed: str, unpacked: Path) -> Path:
    if unpacked.exists():
        return unpacked
    opener = gzip.open if packed == ".gz" else lzma.open
    with publish(unpacked) as temporary:
        try:
            with opener(path, "rb") as file, temporary.open("wb") as out:
                shutil.copyfileobj(file, out, CHUNK)
        except EOFError:
            raise InputError(f"{name}: is cut short (the {packed} stream has no end)") from None
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise InputError(f"{name}: is not a {packed} file ({error})") from None
        if temporary.stat().st_size == 0:
            raise InputError(f"{name}: is empty once unpacked")
    return unpacked


def _scan_lines(name: str, file: BinaryIO, rule: Rule) -> Iterator[bytes]:
    """Line offsets of a text file; UTF-8 and columns are checked a chunk at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = lines = tabs_before = 0  # bytes, whole lines and tabs before this chunk
    counted = 0  # tabs before the current line
    last, blank = 0, True
    while chunk := file.read(CHUNK):
        values = np.frombuffer(chunk, np.uint8)
        is_end = values == ord("\n")
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk)
        except UnicodeDecodeError as error:
            line = lines + int(np.count_nonzero(is_end[: max(0, error.start - pending)])) + 1
            raise InputError(f"{name}:{line}: is not UTF-8 ({error.reason})") from None
        ends = np.flatnonzero(is_end)
        if rule.columns is not None:
            tabs = np.flatnonzero(values == ord("\t"))
            total = np.searchsorted(tabs, ends) + tabs_before
            columns = np.diff(total, prepend=counted) + 1
            if (wrong := np.flatnonzero(columns != rule.columns)).size:
                raise _wrong_columns(name, lines + int(wrong[0]) + 1, int(columns[wrong[0]]), rule)
            tabs_before += len(tabs)
            counted = int(total[-1]) if len(ends) else counted
        blank = blank and not bool((values > ord(" ")).any())
        if position == 0:
            yield np.int64(3 if chunk.startswith(BYTE_ORDER_MARK) else 0).tobytes()
        if len(ends):
            yield (ends.astype(np.int64) + (position + 1)).tobytes()
            last = position + int(ends[-1]) + 1
        position += len(chunk)
        lines += len(ends)
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InputError(f"{name}:{lines + 1}: is not UTF-8 ({error.reason})") from None
    if blank:
        raise InputError(f"{name}: has no text, only blank lines")
    if last != position:  # the last line has no end
        if rule.columns is not None and tabs_before - counted + 1 != rule.columns:
            raise _wrong_columns(name, lines + 1, tabs_before - counted + 1, rule)
        yield np.int64(position).tobytes()


def _wrong_columns(name: str, line: int, columns: int, rule: Rule) -> InputError:
    wanted = "source, tab, target" if rule.columns == 2 else "the text"
    found = f"{columns} column" + "s" * (columns != 1)
    return InputError(f"{name}:{line}: has {found}, needs {rule.columns} ({wanted})")


def _scan_json(name: str, file: BinaryIO, rule: Rule) -> Iterator[bytes]:
    """Line offsets of a JSONL file; every line is parsed."""
    assert rule.fields is not None
    position, offsets, blank = 0, array("q", [0]), True
    for number, line in enumerate(file, 1):
        texts = json_texts(name, number, line, rule.fields)
        blank = blank and not any(text.strip() for text in texts)
        position += len(line)
        offsets.append(position)
        if len(offsets) >= 1 << 16:
            yield offsets.tobytes()
            offsets = array("q")
    if blank:
        raise InputError(f"{name}: has no text in {', '.join(rule.fields)}")
    yield offsets.tobytes()


def json_texts(name: str, number: int, line: bytes, fields: tuple[str, ...]) -> tuple[str, ...]:
    """The strings that line `number` of a JSONL file has in `fields`.

    >>> json_texts("a.jsonl", 1, b'{"de": "ja", "en": "yes"}', ("de", "en"))
    ('ja', 'yes')
    """
    where = f"{name}:{number}"
    try:
        record = json.loads(line.removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is not UTF-8 ({error.reason})") from None
    except ValueError as error:
        raise InputError(f"{where}: is not JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{where}: is not JSON that can be read (nested too deeply)") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: is not a JSON object")
    for field in fields:
        text = record.get(field)
        if not isinstance(text, str):
            has = f"has no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}"
            wrong = f"field {field!r} is not a string"
            raise InputError(f"{where}: {wrong if field in record else has} (data.fields)")
        if b"\\u" in line and any("\ud800" <= c <= "\udfff" for c in text):
            raise InputError(f"{where}: field {field!r} has half a surrogate pair")
    return tuple(record[field] for field in fields)
