"""Checksums of a step's files, written before it counts as one and verified before it is read; and
errors of all that lies under a checkpoint, each told as one line.

STEP/checksums has a line `CRC32C SIZE NAME` of every file of every item, and before them the
CRC32C of those lines. It is there before the step gets its name, or in a bucket the object that
stands for it: a kill leaves either no step or one with checksums. The files that Orbax writes after
that, beside the items, hold the time and the kinds of the items, no numbers.

Of an object in a bucket the store itself has the checksum: nothing is read. Hidden files and
those whose names begin with `@` are of file managers and network disks, and nobody reads them.
"""

import base64
import contextlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket

NAME = "checksums"
BLOCK = 1 << 18  # bytes at once: what a processor's cache holds


class Damaged(ValueError):
    """A file of a checkpoint is not as it was written; the message names it."""


class NotSaved(OSError):
    """A checkpoint could not be written; the message says which and why."""


def write(step: Path) -> None:
    """Writes the checksums of a step whose items are all there."""
    names = (str(path.relative_to(step)) for path in step.rglob("*") if not path.is_dir())
    kept = [name for name in names if "/" in name and not re.search(r"(^|/)[.@]", name)]
    sums = _sums_of(step, sorted(kept))
    lines = "".join(f"{found} {name}\n" for name, found in sums.items())
    (step / NAME).write_bytes(with_sum(lines).encode())


def verify(step: Path, items: Sequence[str] | None = None) -> set[str]:
    """The items of a step; Damaged if a file of `items`, of any by default, is not as written."""
    lines = without_sum(step / NAME)
    split = (line.split(" ", 2) for line in lines.splitlines())
    sums = {name: f"{crc} {size}" for crc, size, name in split}
    names = [name for name in sums if items is None or name.partition("/")[0] in items]
    for name, found in _sums_of(step, names).items():
        if found != sums[name]:
            raise Damaged(f"{name} has a different checksum than when it was written")
    return {name.partition("/")[0] for name in sums}


def with_sum(text: str) -> str:
    """`text` after a line with its CRC32C."""
    return f"{google_crc32c.value(text.encode()):08x}\n{text}"


def without_sum(path: Path) -> str:
    """The text of a file that `with_sum` made; Damaged if it is another."""
    try:
        first, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    if first != f"{google_crc32c.value(text):08x}".encode():
        raise Damaged(f"{path.name} has a different checksum than when it was written")
    return text.decode()


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


@contextlib.contextmanager
def told(error_type: type[Exception], what: str) -> Iterator[None]:
    """Turns every error inside, which each library on the way has its own of, into one line."""
    try:
        yield
    except (InputError, NotSaved):
        raise
    except Exception as error:
        raise error_type(f"{what}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The message of ours or of the operating system in `error`, else its first words."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, Damaged):
            return str(found)
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        if match := re.search(r": ([^:]+) \[os_error_code=", str(found)):  # tensorstore's way
            return match[1]
        found = found.__cause__ or found.__context__
    words = " ".join(str(error).split())
    if re.match("RESOURCE_EXHAUSTED: .*OCDBT", words):  # of a file, without the system's own word
        return "No space left on device"
    return f"{type(error).__name__}: {words if len(words) <= 200 else words[:200] + ' ...'}"
