"""Objects in buckets as local files: fetched once into the cache, and again if one has changed.

A copy is kept under the object's URL, size and version (the generation of `gs://`, the etag of
`s3://`), so that all that reads a file, its index and its memory map work as for a local file. What
comes must have the size and, from `gs://`, the CRC32C that the store has.
"""

import contextlib
from pathlib import Path

import google_crc32c

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket
from mhe_jax.data.cache import built_once, key_of

BLOCK = 1 << 18  # bytes at once: what a processor's cache holds


def sum_of(path: Path) -> tuple[int, int]:
    """CRC32C and size of a file; of an object of `gs://`, as the store has them."""
    if isinstance(path, Bucket):
        return path.crc32c()
    crc = size = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            crc = google_crc32c.extend(crc, block)
            size += len(block)
    return crc, size


def local_copy(path: Path, cache: Path) -> Path:
    """The local copy of an object; a local file is its own. Copies of older content are deleted.

    Raises:
      InputError: there is no such object, it cannot be read, it changes meanwhile, or what comes
        is not what the store has.
    """
    if not isinstance(path, Bucket):
        return path
    try:
        version = path.version()

        def fetch(draft: Path) -> None:
            path.fetch(draft)
            if path.version() != version:
                raise InputError(f"{path}: changed while it was being read")
            if not path.is_copied_by(sum_of(draft)):
                raise InputError(f"{path}: what came is not what the store has: try again")

        copies = cache / "fetched" / key_of(str(path))
        copy = built_once(copies / key_of(*version), fetch)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    for other in copies.iterdir():
        # Drafts belong to processes that fetch now; one with an earlier copy open keeps it.
        if other != copy and other.suffix != ".tmp":
            with contextlib.suppress(OSError):
                other.unlink()
    return copy
