"""Objects in buckets as local files: fetched once into the cache, and again if one has changed.

A copy is kept under the object's URL, size and version (the generation of `gs://`, the etag of
`s3://`), so that all that reads a file, its index and its memory map work as for a local file.
"""

import contextlib
from pathlib import Path

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket
from mhe_jax.data.cache import built_once, key_of


def local_copy(path: Path, cache: Path) -> Path:
    """The local copy of an object; a local file is its own. Copies of older content are deleted.

    Raises:
      InputError: there is no such object, it cannot be read, or it changes meanwhile.
    """
    if not isinstance(path, Bucket):
        return path
    try:
        version = path.version()

        def fetch(draft: Path) -> None:
            path.fetch(draft)
            if path.version() != version:
                raise InputError(f"{path}: changed while it was being read")

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
