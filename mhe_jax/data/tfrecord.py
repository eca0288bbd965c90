"""Files of TFDS's default format, `tfrecord`, indexed once and then read by number.

    record = u64 length · u32 crc(length) · data · u32 crc(data)        little-endian

crc is CRC-32C, rotated right by 15 bits, plus 0xa282ead8 (TensorFlow, tfrecord guide). The index of
a file is the int64 offset of each record, the file's size, and the SHA-256 of all it holds. All
checksums are verified when it is built; it is cached like that of a text, see `index.py`.
"""

import hashlib
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

from mhe_jax.config import InputError
from mhe_jax.data.cache import DIGEST, VERSION, built_once, identity, key_of
from mhe_jax.data.pieces import read_at


def record_offsets(path: Path, cache: Path) -> tuple[np.ndarray, list[int]]:
    """Where each record begins, and the file's end: int64 [records + 1], mapped from `cache`.

    The second result tells the file's content from any other.

    Raises:
      InputError: no such file, or a record is broken or cut short, named by its number from 1.
    """
    try:
        key = key_of("tfrecord", VERSION, *identity(path.resolve()))
        index = built_once(cache / "index" / f"{key}.int64", lambda index: _index(path, index))
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"{path}: {reason}") from None
    numbers = np.memmap(index, np.int64, "r")
    return numbers[:-DIGEST], numbers[-DIGEST:].tolist()


def read_record(name: str, file: int, start: int, stop: int) -> bytes:
    """The data of the record between two offsets of an open file; `name` is for messages."""
    return read_at(name, file, start + 12, stop - 4)


def _index(path: Path, index: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        offsets = _scan(path, file, path.stat().st_size, digest.update)
    index.write_bytes(offsets.tobytes() + digest.digest())


def _scan(path: Path, file: BinaryIO, size: int, seen: Callable[[bytes], None]) -> array:
    offsets, position = array("q", [0]), 0
    while position < size:
        where = f"{path}: record {len(offsets)}"
        head = file.read(12)
        if len(head) == 12 and _masked_crc(head[:8]) != struct.unpack("<I", head[8:])[0]:
            raise InputError(f"{where} is broken: the checksum of its length is wrong")
        length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else size
        if position + length + 16 > size:
            raise InputError(f"{where} is cut short")
        data = file.read(length)
        seen(head + data)
        if _masked_crc(data) != struct.unpack("<I", file.read(4))[0]:
            raise InputError(f"{where} is broken: its checksum is wrong")
        position += length + 16
        offsets.append(position)
    return offsets


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
