"""Files that are built once and kept: where they are, their names, and when they are rebuilt."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mhe_jax.config.files import publish

VERSION = 2  # of an index; part of every key
DIGEST = 4  # numbers at the end of an index: 256 bits
TICK = 0.02  # seconds, at most, between two times that a file system can tell apart


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
    """Values of which at least one changes whenever the file does.

    A modification time can be set back (`cp -p`, `touch -r`, `rsync -t`), the change time of the
    inode cannot. All writes within one tick of the clock get the same time, so a file that new is
    read only after the tick is over.
    """
    stat = path.stat()
    if time.time() - stat.st_ctime < TICK:
        time.sleep(TICK)
    return str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def built_once(path: Path, build: Callable[[Path], None]) -> Path:
    """The file that `build` writes, rebuilt if it is missing or damaged.

    Its name is `path` and its size, so that a truncated file is not taken for a whole one.

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
