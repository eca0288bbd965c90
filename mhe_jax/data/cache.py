"""Files that are built once and kept: where they lie, their names, and when they are built anew."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mhe_jax.config.files import publish

VERSION = 2  # of an index; part of every key
DIGEST = 4  # numbers at the end of an index: 256 bits
TICK = 0.02  # seconds between two times that a file system can tell apart, at most


def key_of(*parts: object) -> str:
    """A short name for what `parts` (anything JSON can hold) describe.

    >>> key_of("a", 1) == key_of("a", 1), key_of("a", 1) == key_of("a", 2)
    (True, False)
    """
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def key_of_all(parts: Iterable[object]) -> str:
    """`key_of` of more parts than should be in memory as JSON at once."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest()[:32]


def identity(path: Path) -> tuple[str | int, ...]:
    """Values of which one changes whenever a file does.

    A time of change can be set back (`cp -p`, `touch -r`, `rsync -t`), that of the inode cannot.
    What is written in one tick of the clock has one time: a file that is as new as that is read
    when the tick is over.
    """
    stat = path.stat()
    if time.time() - stat.st_ctime < TICK:
        time.sleep(TICK)
    return str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def built_once(path: Path, build: Callable[[Path], None]) -> Path:
    """The file that `build` writes, built anew where it is not there or damaged.

    Its name is `path` and its size, so that one that lost its end is not taken for whole.

    Raises:
      InputError: it cannot be written.
    """
    for found in path.parent.glob(f"{path.name}.*"):
        if found.name == f"{path.name}.{found.stat().st_size}":
            return found
    with publish(path, with_size=True) as temporary:
        build(temporary)
        size = temporary.stat().st_size
    return path.with_name(f"{path.name}.{size}")
