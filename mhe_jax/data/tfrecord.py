"""Files of TFDS's default format, `tfrecord`, indexed once and then read by number.

    record = u64 length · u32 crc(length) · data · u32 crc(data)        little-endian

The index of a file is the int64 offset of each record, the file's size, and the SHA-256 of all it
holds; it is cached like that of a text, see `index.py`. Checksums are not verified.
"""

import hashlib
import struct
from array import array
from pathlib import Path

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.data.cache import DIGEST, VERSION, built_once, identity, key_of


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


def _index(path: Path, index: Path) -> None:
    offsets, position, digest = array("q", [0]), 0, hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        while head := file.read(12):
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else size
            position += length + 16
            if position > size:
                raise InputError(f"{path}: record {len(offsets)} is broken or cut short")
            digest.update(head + file.read(length))
            file.seek(4, 1)
            offsets.append(position)
    index.write_bytes(offsets.tobytes() + digest.digest())
