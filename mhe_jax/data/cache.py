"""Files that are built once and kept, under a name that says what they are of."""

import contextlib
import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError
from mhe_jax.config.files import publish
from mhe_jax.config.places import Bucket


def key_of(*parts: object) -> str:
    """A short name for what `parts` (anything JSON can hold) describe.

    >>> key_of("a", 1) == key_of("a", 1), key_of("a", 1) == key_of("a", 2)
    (True, False)
    """
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def key_of_all(parts: Iterable[object]) -> str:
    """`key_of` for more parts than should be in memory as JSON at once."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest()[:32]


def identity(path: Path) -> tuple[str | int, ...]:
    """Values of which at least one changes whenever the file does."""
    stat = path.stat()  # `cp -p` and others set the modification time back, not the change time
    return str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def built_once(path: Path, build: Callable[[Path], None]) -> Path:
    """`path`, where `build` writes it into a draft unless it is there; InputError if it cannot."""
    if not path.exists():
        with publish(path) as draft:
            build(draft)
    return path


def local_copy(path: Path, cache: Path) -> Path:
    """The copy of an object, fetched once and again if it has changed; a local file is its own.

    It is kept under the object's URL, size and version (the generation of `gs://`, the etag of
    `s3://`). Older ones are deleted. InputError if the object cannot be read.
    """
    if not isinstance(path, Bucket):
        return path
    copies = cache / "fetched" / key_of(str(path))
    try:
        about = path.info()
        version = about["size"], str(about.get("generation") or about["ETag"])
        copy = built_once(copies / key_of(*version), path.fetch)
        for other in copies.iterdir():
            # Drafts belong to processes that write now. On Windows an open file stays.
            if other != copy and other.suffix != ".tmp":
                with contextlib.suppress(OSError):
                    other.unlink()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    return copy


def opened(path: Path) -> Any:
    """The bytes of a file, unpacked; the name of a cached copy does not tell how it is packed."""
    with path.open("rb") as file:
        head = file.read(6)
    unpack: Any = gzip.open if head[:2] == b"\x1f\x8b" else open
    return (lzma.open if head == b"\xfd7zXZ\0" else unpack)(path, "rb")
