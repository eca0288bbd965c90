"""Files of TFDS's default format, `tfrecord`, indexed once and then read by number.

    record = u64 length · u32 crc(length) · data · u32 crc(data)        little-endian

crc is CRC-32C, rotated right by 15 bits, plus 0xa282ead8 (TensorFlow, tfrecord guide). The index of
a file is the int64 offset of each record and, last, the file's size. All checksums are checked when
it is built; it is remembered under the file's path, size and time of change.
"""

import os
import struct
from array import array
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

from mhe_jax.config import InputError
from mhe_jax.data.cache import key_of, publish

VERSION = 1  # of the index; part of every key


def record_offsets(path: Path, cache: Path) -> np.ndarray:
    """Where each record of a file begins, and its end: int64 [records + 1], mapped from `cache`.

    Raises:
      InputError: no such file, or a record that is broken or cut short, by its number from 1.
    """
    try:
        stat = path.stat()
        key = key_of("tfrecord", VERSION, str(path.resolve()), stat.st_size, stat.st_mtime_ns)
        index = cache / "index" / f"{key}.int64"
        if not index.exists():
            with publish(index) as temporary, path.open("rb") as file:
                offsets = _scan(path, file, stat.st_size)
                temporary.write_bytes(offsets.tobytes())
        return np.memmap(index, np.int64, "r")
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"{path}: {reason}") from None


def read_record(file: int, start: int, stop: int) -> bytes:
    """The data of the record between two offsets of an open file."""
    return os.pread(file, stop - start - 16, start + 12)


def _scan(path: Path, file: BinaryIO, size: int) -> array:
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
        if _masked_crc(data) != struct.unpack("<I", file.read(4))[0]:
            raise InputError(f"{where} is broken: its checksum is wrong")
        position += length + 16
        offsets.append(position)
    return offsets


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
