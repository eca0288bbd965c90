"""The content of `.gz` and `.xz` files in parts: all streams to their end, up to a limit."""

import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mhe_jax.config import InputError

CHUNK = 8 << 20
XZ = b"\xfd7zXZ\0"  # how each stream begins
# The environment variable for the most bytes a file may unpack to. If it is not set, the limit
# is `ALWAYS` bytes plus `RATIO` times the file's own, so that no file fills the disk: text packs to
# a fifth or a tenth.
LIMIT = "MHE_JAX_UNPACKED_LIMIT"
RATIO, ALWAYS = 100, 64 << 20


def unpacked_parts(name: str, path: Path, packed: str) -> Iterator[bytes]:
    """The content of a file in one of the `PACKED` formats, in parts.

    Raises:
      InputError: it is not such a file, is cut short, or holds nothing or far too much.
    """
    size = 0
    with path.open("rb") as file:
        try:
            for part in _parts_of_gz(file) if packed == ".gz" else _parts_of_xz(file):
                size += len(part)
                check_limit(name, size, file.tell())
                yield part
        except EOFError:
            raise InputError(f"{name}: is cut short (the {packed} stream has no end)") from None
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise InputError(f"{name}: is not a {packed} file ({error})") from None
    if size == 0:
        raise InputError(f"{name}: is empty once unpacked")


def _parts_of_gz(file: BinaryIO) -> Iterator[bytes]:
    unpacking = gzip.GzipFile(fileobj=file)
    while part := unpacking.read(CHUNK):
        yield part


def _parts_of_xz(file: BinaryIO) -> Iterator[bytes]:
    """All streams of a file; `lzma.open` takes a broken one after the first for the end."""
    data = file.read(CHUNK)
    while data:
        if not XZ.startswith(data[: len(XZ)]):  # liblzma waits for more than there may be
            raise lzma.LZMAError("no stream begins where one should")
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        while not stream.eof:
            if stream.needs_input and not (data := data or file.read(CHUNK)):
                raise EOFError
            yield stream.decompress(data, CHUNK)
            data = b""
        data = stream.unused_data.lstrip(b"\0")  # streams may be padded
        while not data and (data := file.read(CHUNK)):
            data = data.lstrip(b"\0")


def check_limit(name: str, size: int, packed_size: int) -> None:
    """Raises InputError if a file unpacks to so much that it is not text but a trap."""
    given = os.environ.get(LIMIT)
    if given is None:
        if size > ALWAYS + RATIO * packed_size:
            raise InputError(
                f"{name}: unpacks to more than {RATIO} times its size; if it should, set {LIMIT}, "
                "the most bytes that a file may unpack to"
            )
        return
    if not given.isdecimal() or len(given) > 18:
        raise InputError(f"{LIMIT} is {given[:99]!r}: takes a number of bytes, below 10^18")
    if size > int(given):
        raise InputError(f"{name}: unpacks to more than {int(given):,} bytes ({LIMIT})")
