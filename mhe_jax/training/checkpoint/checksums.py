"""Checksums of a step's files: written before it counts as one, verified before it is read.

STEP/checksums has a line `CRC32C SIZE NAME` of every file of every item, and before them the
CRC32C of those lines. It is there before the step gets its name, or in a bucket the object that
stands for it: a kill leaves either no step or one with checksums. The files that Orbax writes after
that, beside the items, hold the time and the kinds of the items, no numbers.

Of an object in a bucket the store itself has the checksum: nothing is read. Hidden files and
those whose names begin with `@` are of file managers and network disks, and nobody reads them.
"""

import base64
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c

from mhe_jax.config.places import Bucket

NAME = "checksums"
BLOCK = 1 << 18  # bytes at once: what a processor's cache holds


class Damaged(ValueError):
    """A file of a checkpoint is not as it was written; the message names it."""


def write(step: Path) -> None:
    """Writes the checksums of a step whose items are all there."""
    names = (str(path.relative_to(step)) for path in step.rglob("*") if not path.is_dir())
    kept = [name for name in names if "/" in name and not re.search(r"(^|/)[.@]", name)]
    sums = _sums_of(step, sorted(kept))
    lines = "".join(f"{found} {name}\n" for name, found in sums.items()).encode()
    (step / NAME).write_bytes(f"{google_crc32c.value(lines):08x}\n".encode() + lines)


def verify(step: Path, items: Sequence[str] | None = None) -> set[str]:
    """The items of a step; Damaged if a file of `items`, of any by default, is not as written."""
    if not (step / NAME).exists():
        raise Damaged(f"{NAME} is missing")
    first, _, lines = (step / NAME).read_bytes().partition(b"\n")
    if first.decode(errors="replace") != f"{google_crc32c.value(lines):08x}":
        raise Damaged(f"{NAME} has a different checksum than when it was written")
    split = (line.split(" ", 2) for line in lines.decode().splitlines())
    sums = {name: f"{crc} {size}" for crc, size, name in split}
    names = [name for name in sums if items is None or name.partition("/")[0] in items]
    for name, found in _sums_of(step, names).items():
        if found != sums[name]:
            raise Damaged(f"{name} has a different checksum than when it was written")
    return {name.partition("/")[0] for name in sums}


def _sums_of(step: Path, names: Sequence[str]) -> dict[str, str]:
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda name: _sum_of(step, name), names), strict=True))


def _sum_of(step: Path, name: str) -> str:
    """The checksum and the size of a file."""
    path, crc, size = step / name, 0, 0
    try:
        if isinstance(path, Bucket):
            about = path.info()
            return f"{base64.b64decode(about['crc32c']).hex()} {about['size']}"
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK):
                crc, size = google_crc32c.extend(crc, block), size + len(block)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    return f"{crc:08x} {size}"
