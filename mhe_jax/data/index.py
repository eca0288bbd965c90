"""Files made ready for random access: unpacked once, checked once, their lines indexed once.

The index of a file is the int64 byte offset of each line, the file's size, and the SHA-256 of all
bytes. It is built in the same pass that checks the file, and cached under the file's path, inode,
size and times, so that a second run neither reads nor checks anything. Offsets are
memory-mapped, not loaded. Whatever is made from a text is keyed by its content: a file that was
only touched, moved or repacked is read once more, and is still the same text. A packed file has one
unpacked copy: a new one replaces the old.
"""

import gzip
import hashlib
import json
import lzma
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.config.files import PACKED
from mhe_jax.data.cache import (
    DIGEST,
    VERSION,
    built_once,
    drop_earlier,
    identity,
    key_of,
    local_copy,
)
from mhe_jax.data.published import hint

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK = 8 << 20  # bytes that are unpacked at once


@dataclass(frozen=True)
class Rule:
    """Requirements on each line: UTF-8, with `columns` columns, or JSON with string `fields`."""

    columns: int | None = None
    fields: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LineFile:
    """A checked file: `offsets[i]:offsets[i + 1]` is line i of `path` with its end."""

    name: str  # what the user called it, for messages
    path: Path  # plain bytes: the file itself, or what was unpacked from it
    offsets: np.ndarray  # [lines + 1], int64
    key: str  # of the content, wherever it is stored


def open_lines(path: Path, rule: Rule, cache: Path) -> LineFile:
    """Unpacks, checks and indexes `path`, unless that was done before.

    Raises:
      InputError: one line that names the file, the line where there is one, and the reason.
    """
    # The link's name tells the format; the name of a blob in a content-addressed store does not.
    name, packed = str(path), path.suffix.lower() if path.suffix.lower() in PACKED else ""
    path = real_file(path, cache)
    try:
        known = identity(path)
        if packed:
            unpacked = cache / "unpacked" / key_of(str(path)) / key_of(VERSION, packed, *known)
            copy = built_once(unpacked, lambda temporary: _unpack(name, path, packed, temporary))
            drop_earlier(copy)
            path = copy
        key = key_of(VERSION, packed, *known, rule.columns, rule.fields)
        index = built_once(
            cache / "index" / f"{key}.int64", lambda temporary: _index(name, path, rule, temporary)
        )
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from None
    numbers = np.memmap(index, np.int64, "r")
    content = numbers[-DIGEST:].tolist()
    return LineFile(name, path, numbers[:-DIGEST], key_of(content, rule.columns, rule.fields))


def real_file(path: Path, cache: Path) -> Path:
    """The file that a path leads to, checked to exist and not be empty; of a bucket, its copy.

    Raises:
      InputError: it is not there, is a directory, or is empty.
    """
    name, path = path, local_copy(path, cache)
    try:
        # Path.resolve raises a different error for circular links.
        real = Path(os.path.realpath(path, strict=True))
        size = real.stat().st_size
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = f"no such file{hint(path)}" if missing else error.strerror
        raise InputError(f"{name}: {reason}") from None
    if real.is_dir():
        raise InputError(f"{name}: is a directory, not a file")
    if size == 0:
        raise InputError(f"{name}: is empty")
    return real


def _index(name: str, path: Path, rule: Rule, index: Path) -> None:
    """Checks a file, and writes the offsets of its lines and the SHA-256 of all its bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file, index.open("wb") as out:
        for offsets in _scan(name, file, rule, digest.update):
            out.write(offsets)
        out.write(digest.digest())


def _unpack(name: str, path: Path, packed: str, unpacked: Path) -> None:
    with unpacked.open("wb") as out:
        for part in unpacked_parts(name, path, packed):
            out.write(part)


def unpacked_parts(name: str, path: Path, packed: str) -> Iterator[bytes]:
    """The content of a file in one of the `PACKED` formats, in parts.

    Raises:
      InputError: it is not such a file, is cut short, or holds nothing.
    """
    empty = True
    try:
        with gzip.open(path) if packed == ".gz" else lzma.open(path) as file:
            while part := file.read(CHUNK):
                empty = False
                yield part
    except EOFError:
        raise InputError(f"{name}: is cut short (the {packed} stream has no end)") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{name}: is not a {packed} file ({error})") from None
    if empty:
        raise InputError(f"{name}: is empty once unpacked")


def _scan(name: str, file: BinaryIO, rule: Rule, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    """Line offsets; each line is checked. A blank line among records belongs to that before it."""
    records = rule.fields is not None or rule.columns == 2
    blanks = b" \r\n" if rule.fields is None else None  # not the tab: alone, it makes a pair
    offsets, position, blank = array("q", [0]), 0, True
    for number, line in enumerate(file, 1):
        seen(line)
        position += len(line)
        if number == 1 and line.startswith(BYTE_ORDER_MARK):
            line = line.removeprefix(BYTE_ORDER_MARK)
            offsets[0] = len(BYTE_ORDER_MARK)
        if records:
            if not line.strip(blanks):
                offsets[-1] = position
                continue
            texts = record_texts(f"{name}:{number}", line, rule.fields)
            blank = blank and not any(text.strip() for text in texts)
        else:
            _decoded(f"{name}:{number}", line)
            if rule.columns and b"\t" in line:
                raise InputError(f"{name}:{number}: has several columns, needs 1 (the text)")
            blank = blank and not line.strip()
        offsets.append(position)
        if len(offsets) > 1 << 16:
            yield offsets[:-1].tobytes()
            offsets = offsets[-1:]
    if blank:
        where = f" in {', '.join(rule.fields)}" if rule.fields else ", only blank lines"
        raise InputError(f"{name}: has no text{where}")
    yield offsets.tobytes()


def is_broken(text: str) -> bool:
    """Whether `text` has half a surrogate pair, which no file in UTF-8 can hold.

    >>> is_broken("\\ud83d"), is_broken("😀")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _decoded(where: str, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is not UTF-8 ({error.reason})") from None


def json_object(where: str, line: bytes) -> dict[str, Any]:
    """The object on a line of JSONL; `where` is its place, for messages."""
    text = _decoded(where, line)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error).replace(": line 1 column", ", column")  # the line of `where`
        raise InputError(f"{where}: is not JSON ({reason})") from None
    if "\\u" in text and is_broken(json.dumps(record, ensure_ascii=False)):
        raise InputError(f"{where}: has half a surrogate pair")
    if not isinstance(record, dict):
        raise InputError(f"{where}: is not a JSON object")
    return record


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """All fields, nested ones by names that dots join; a field of just such a name wins.

    >>> flat({"id": 7, "translation": {"en": "yes", "de": "ja"}})
    {'id': 7, 'translation.en': 'yes', 'translation.de': 'ja'}
    """
    found: dict[str, Any] = {}
    for name, value in record.items():
        if hasattr(value, "keys") and value:  # a dict, or features of TFDS
            found |= {f"{name}.{inner}": part for inner, part in flat(value).items()}
        else:
            found[name] = value
    return found | {name: record[name] for name in found if name in record}


def record_texts(where: str, line: bytes, fields: tuple[str, ...] | None) -> tuple[str, ...]:
    """The strings of a line of JSON, at `where`, in `fields`; without, the two around its tab.

    >>> record_texts("a.jsonl:1", b'{"de": "ja", "en": "yes"}', ("de", "en"))
    ('ja', 'yes')
    """
    if fields is None:
        texts = tuple(_decoded(where, line.partition(b"\n")[0].removesuffix(b"\r")).split("\t"))
        if len(texts) != 2:
            found = f"{len(texts)} column" + "s" * (len(texts) != 1)
            raise InputError(f"{where}: has {found}, needs 2 (source, tab, target)")
        return texts
    record = json_object(where, line)
    if not all(isinstance(record.get(field), str) for field in fields):
        record = flat(record)
    for field in fields:
        text = record.get(field)
        if not isinstance(text, str):
            has = f"has no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}"
            wrong = f"field {field!r} is not a string"
            raise InputError(f"{where}: {wrong if field in record else has} (data.fields)")
    return tuple(record[field] for field in fields)
