"""The steps of a run on disk: which are whole, their checksums, metadata and arrays.

STEP/checksums has a line `CRC32C SIZE NAME` of every file of every item, and before them the
CRC32C of those lines. It is there before the step gets its name, or in a bucket the object that
stands for it: a kill leaves either no step or one with checksums.
"""

import base64
import contextlib
import inspect
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import orbax.checkpoint as ocp

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket
from mhe_jax.tasks.sums import criterion

DIRECTORY, CHECKSUMS = "checkpoints", "checksums"
VALIDATION = "validation"  # in a step: metadata of a validation that came after it was saved
Meta = dict[str, Any]


class NotSaved(OSError):
    """A checkpoint could not be written; the message says which and why."""


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
    """What the operating system says in `error`, else its words in one line."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__cause__ or found.__context__
    return " ".join(str(error).split()) or type(error).__name__


def steps_in(directory: Path) -> dict[int, Path]:
    """The steps that were saved whole, by number; in a bucket those with one more object."""
    if not directory.is_dir():
        return {}
    found = {int(path.name): path for path in directory.iterdir() if path.name.isdecimal()}
    if isinstance(directory, Bucket):
        found = {n: p for n, p in found.items() if (p / "commit_success.txt").exists()}
    return dict(sorted(found.items()))


def read_meta(step: Path) -> Meta:
    """The metadata of a step as they were written; InputError if they are not there."""
    verify(step, ["meta"])
    meta, later = json.loads((step / "meta" / "metadata").read_bytes()), step / VALIDATION
    return meta | (json.loads(without_sum(later)) if later.exists() else {})


def best(metas: Mapping[int, Meta]) -> int | None:
    """The step whose parameters scored best, of equal ones the first; None if none was scored."""
    scored = [n for n, meta in metas.items() if meta.get("validated_step") == n]
    return min(scored, key=lambda n: (criterion(metas[n]["validation"]), n), default=None)


def quiet_orbax() -> None:
    """An error of many reads or writes at once is told once, by us.

    Orbax and asyncio log each, with a traceback; those still under way when the first has ended
    their loop say so by themselves.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = _unraisable


def _unraisable(found: Any, hook: Callable[[Any], Any] = sys.unraisablehook) -> None:
    if not inspect.iscoroutine(found.object) and str(found.exc_value) != "Event loop is closed":
        hook(found)


def read_arrays(step: Path, items: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of a step, laid out as the shapes and shardings given for each item."""
    quiet_orbax()
    with (
        told(InputError, f"{step}: cannot be read"),
        contextlib.closing(ocp.StandardCheckpointer()) as reader,
    ):
        place = step.absolute()
        return {name: reader.restore(str(place / name), item) for name, item in items.items()}


def write_checksums(step: Path) -> None:
    """Writes the checksums of a step whose items are all there."""
    names = (str(path.relative_to(step)) for path in step.rglob("*") if not path.is_dir())
    sums = _sums_of(step, sorted(name for name in names if "/" in name))
    lines = "".join(f"{found} {name}\n" for name, found in sums.items())
    (step / CHECKSUMS).write_bytes(with_sum(lines).encode())


def verify(step: Path, items: Sequence[str] | None = None) -> set[str]:
    """The items of a step; InputError if a file of `items` (None: of any) is not as written."""
    split = (line.split(" ", 2) for line in without_sum(step / CHECKSUMS).splitlines())
    sums = {name: f"{crc} {size}" for crc, size, name in split}
    names = [name for name in sums if items is None or name.partition("/")[0] in items]
    for name, found in _sums_of(step, names).items():
        if found != sums[name]:
            raise _damaged(step / name)
    return {name.partition("/")[0] for name in sums}


def with_sum(text: str) -> str:
    """`text` after a line with its CRC32C."""
    return f"{google_crc32c.value(text.encode()):08x}\n{text}"


def without_sum(path: Path) -> str:
    """The text of a file that `with_sum` made; InputError if it is another."""
    first, _, text = path.read_bytes().partition(b"\n") if path.exists() else (b"", b"", b"")
    if first != f"{google_crc32c.value(text):08x}".encode():
        raise _damaged(path)
    return text.decode()


def _sums_of(step: Path, names: Sequence[str]) -> dict[str, str]:
    """The checksum and the size of each file."""

    def sum_of(name: str) -> str:
        path, crc, size = step / name, 0, 0
        if not path.exists():
            return "missing"
        if isinstance(path, Bucket):
            about = path.info()
            return f"{base64.b64decode(about['crc32c']).hex()} {about['size']}"
        with open(path, "rb", buffering=0) as file:
            while block := file.read(1 << 18):
                crc, size = google_crc32c.extend(crc, block), size + len(block)
        return f"{crc:08x} {size}"

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(sum_of, names), strict=True))


def _damaged(path: Path) -> InputError:
    return InputError(f"{path}: is not as it was written (checksum)")
