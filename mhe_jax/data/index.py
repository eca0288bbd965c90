"""Files made ready for random access: unpacked once, checked once, their lines indexed once.

The index of a file is the int64 byte offset of each line, the file's size, and the SHA-256 of all
bytes. It is built in chunks, in the same pass that checks the file, and cached under the file's
path, inode, size and times, so that a second run neither reads nor checks anything. Offsets are
memory-mapped, not loaded. Whatever is made from a text is keyed by its content: a file that was
only touched, moved or repacked is read once more, and is still the same text. A packed file has one
unpacked copy: a new one replaces the old.
"""

import codecs
import contextlib
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.config.files import PACKED
from mhe_jax.config.places import source_path
from mhe_jax.data.cache import DIGEST, VERSION, built_once, identity, key_of
from mhe_jax.data.published import hint
from mhe_jax.data.remote import local_copy
from mhe_jax.data.unpacking import CHUNK, unpacked_parts

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST = 16 << 20  # bytes of a line that is read whole; running text may have longer ones


@dataclass(frozen=True)
class Rule:
    """Requirements on each line: UTF-8, with `columns` columns, or JSON with string `fields`.

    A `whole` line, as a record (JSON, or a pair) always is, has at most `LONGEST` bytes.
    """

    columns: int | None = None
    fields: tuple[str, ...] | None = None
    whole: bool = False


@dataclass(frozen=True)
class LineFile:
    """A checked file: `offsets[i]:offsets[i + 1]` is line i of `path` with its end."""

    name: str  # what the user called it, for messages
    path: Path  # plain bytes: the file itself, or what was unpacked from it
    offsets: np.ndarray  # [lines + 1], int64
    key: str  # of the content, wherever it is stored


def file_path(directory: str, name: str) -> Path:
    """The file that a config names, relative to `directory`; `~` in either is the user's home.

    Raises:
      InputError: the name is not UTF-8; no log or table could show it.
    """
    path = source_path(directory, name)
    if is_broken(str(path)):
        raise InputError(f"{str(path)!r}: the name of this file is not UTF-8")
    return path


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
            drop_earlier(copy, path)
            path = copy
        key = key_of(VERSION, packed, *known, rule.columns, rule.fields, rule.whole)
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
        before = os.fstat(file.fileno())
        scan = _scan_lines if rule.fields is None and rule.columns != 2 else _scan_records
        for offsets in scan(name, file, rule, digest.update):
            out.write(offsets)
        out.write(digest.digest())
        after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise InputError(f"{name}: changed while it was being read")


def drop_earlier(copy: Path, path: Path) -> None:
    """Deletes the copies of what `path` held before; a process that has one open keeps it.

    Copies made since the file last changed stay: they are of another host's file of this path.
    """
    changed = path.stat().st_ctime_ns
    for other in copy.parent.iterdir():
        # Drafts belong to processes that unpack now. On Windows an open file stays.
        if other != copy and other.suffix != ".tmp":
            with contextlib.suppress(OSError):
                if other.stat().st_mtime_ns <= changed:
                    other.unlink()


def _unpack(name: str, path: Path, packed: str, unpacked: Path) -> None:
    with unpacked.open("wb") as out:
        for part in unpacked_parts(name, path, packed):
            out.write(part)


def _scan_lines(
    name: str, file: BinaryIO, rule: Rule, seen: Callable[[bytes], None]
) -> Iterator[bytes]:
    """Line offsets of a text file; UTF-8 and tabs are checked a chunk at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = lines = 0  # bytes and whole lines before this chunk
    last, blank = 0, True
    while chunk := file.read(CHUNK):
        seen(chunk)
        values = np.frombuffer(chunk, np.uint8)
        is_end = values == ord("\n")
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk)
        except UnicodeDecodeError as error:
            line = lines + int(np.count_nonzero(is_end[: max(0, error.start - pending)])) + 1
            raise InputError(f"{name}:{line}: is not UTF-8 ({error.reason})") from None
        ends = np.flatnonzero(is_end)
        if rule.whole:
            sizes = np.diff(ends, prepend=last - position - 1, append=len(chunk) - 1)
            if (long := np.flatnonzero(sizes > LONGEST)).size:
                raise _too_long(name, lines + int(long[0]) + 1)
        if rule.columns is not None and (tab := chunk.find(b"\t")) >= 0:
            line = lines + int(np.count_nonzero(is_end[:tab])) + 1
            raise InputError(f"{name}:{line}: has several columns, needs 1 (the text)")
        mark = 3 if position == 0 and chunk.startswith(BYTE_ORDER_MARK) else 0
        blank = blank and not bool((values[mark:] > ord(" ")).any())
        if position == 0:
            yield np.int64(mark).tobytes()
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
        yield np.int64(position).tobytes()


def _too_long(name: str, line: int) -> InputError:
    return InputError(f"{name}:{line}: has more than {LONGEST >> 20} MiB, too much for one example")


def _scan_records(
    name: str, file: BinaryIO, rule: Rule, seen: Callable[[bytes], None]
) -> Iterator[bytes]:
    """Line offsets of JSON or pairs; each is parsed. A blank line belongs to that before it."""
    blanks = b" \r\n" if rule.fields is None else None  # not the tab: alone, it makes a pair
    position, offsets, blank = 0, array("q", [0]), True
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        if len(line) > LONGEST:
            raise _too_long(name, number)
        seen(line)
        position += len(line)
        if not line.removeprefix(BYTE_ORDER_MARK).strip(blanks):
            offsets[-1] = position
            continue
        texts = record_texts(f"{name}:{number}", line, rule.fields)
        blank = blank and not any(text.strip() for text in texts)
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
    # Given bytes, json would accept halves of surrogate pairs, and other encodings.
    text = _decoded(where, line.removeprefix(BYTE_ORDER_MARK).strip())
    try:
        record = json.loads(text)
    except ValueError as error:
        reason = str(error).replace(": line 1 column", ", column")  # the line of `where`
        raise InputError(f"{where}: is not JSON ({reason})") from None
    except RecursionError:
        raise InputError(f"{where}: is not JSON that can be read (nested too deeply)") from None
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
        line = line.removeprefix(BYTE_ORDER_MARK).partition(b"\n")[0].removesuffix(b"\r")
        texts = tuple(_decoded(where, line).split("\t"))
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
        if b"\\u" in line and is_broken(text):
            raise InputError(f"{where}: field {field!r} has half a surrogate pair")
    return tuple(record[field] for field in fields)
