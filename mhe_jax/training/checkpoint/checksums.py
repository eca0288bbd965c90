"""Checksums of a checkpoint's files: written before it counts as one, verified when it is read.

    STEP/checksums            of every file of every item
    STEP/ITEM/checksums.P     of the arrays that process P wrote: each reads what it wrote itself

A line is `CRC32C SIZE NAME`; a line with the CRC32C of those lines precedes them. All is written
in Orbax's threads, before the step gets its name (or the file that stands for it): a kill leaves
either no step or one with checksums. The two files that Orbax writes after that, beside the items,
hold the time and the kinds of the items, no numbers, and are not in the list.

For files in a bucket the store itself has the checksum of what it received: nothing is read.

Files that others put there, as file managers and network disks do, are no damage: nothing reads
them. A file that Orbax could take for its own is.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from mhe_jax.config.places import path_of
from mhe_jax.data.remote import sum_of

NAME = "checksums"
# The names that Orbax reads, whoever wrote them.
READ = re.compile(r"[^/]+/(ocdbt\.[^/]+/)?(d/[0-9a-f]+|manifest\.ocdbt)")

Sums = dict[str, tuple[int, int]]  # crc32c and size by the name of a file


class Damaged(ValueError):
    """A file of a checkpoint is not as it was written; the message names it."""


class Seal:
    """Writes the checksums of a step when all its items are there: Orbax calls it.

    It runs in process 0 alone, after the last process has written and before the step counts.
    """

    step: Path  # being written; its name is a temporary one

    def __call__(self) -> None:
        sums: Sums = {}
        for item in sorted(path for path in self.step.iterdir() if path.is_dir()):
            for part in _parts_of(item):
                for name, value in _read(part).items():
                    sums[f"{item.name}/{name}"] = value
            names = [f"{item.name}/{name}" for name in _names(item)]
            sums |= _sums_of(self.step, [name for name in names if name not in sums])
        _check_complete(sums)
        _write(self.step / NAME, sums)


def _check_complete(sums: Sums) -> None:
    """Checks that the parts of all processes were merged, and are where readers look for them."""
    arrays = {name.partition("/")[0] for name in sums if "/ocdbt." in name}
    wanted = [f"{item}/{NAME}.{p}" for item in arrays for p in range(jax.process_count())]
    wanted += [f"{item}/manifest.ocdbt" for item in arrays]
    if missing := sorted({*wanted, "meta/metadata", "params/manifest.ocdbt"} - {*sums}):
        raise Damaged(
            f"there is no {missing[0]}; the directory must be one that all processes share"
        )


class Arrays(ocp.StandardCheckpointHandler):
    """Orbax's handler, but it verifies before it reads, and each process sums what it writes."""

    def __init__(self, seal: Seal):
        super().__init__()
        self._seal = seal

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        self._seal.step = path_of(directory).parent
        futures = await super().async_save(directory, *args, **kwargs)
        return [future.ChainedFuture(futures or [], partial(_write_part, path_of(directory)))]

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        verify(path_of(directory).parent, [directory.name])
        return super().restore(directory, *args, **kwargs)


class Json(ocp.JsonCheckpointHandler):
    """Orbax's handler, but it verifies before it reads."""

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        verify(path_of(directory).parent, [directory.name])
        return super().restore(directory, *args, **kwargs)


def items_of(step: Path) -> set[str]:
    """The items that were saved at a step.

    Raises:
      Damaged: its list of files is.
    """
    return {name.partition("/")[0] for name in _read(step / NAME)}


def verify(step: Path, items: set[str] | list[str]) -> None:
    """Verifies all files of these items by reading them.

    A process does not know which of them hold its share of an array, so it reads all: it need not
    trust what another process, on another host, has read.

    Raises:
      Damaged: a file is missing, or differs from what was written, or Orbax could read one more.
    """
    sums = _read(step / NAME)
    for item in sorted(items):
        listed = {name for name in sums if name.startswith(f"{item}/")}
        there = {f"{item}/{name}" for name in _names(step / item)}
        if not listed or listed - there:
            raise Damaged(f"{min(listed - there, default=item)} is missing")
        if more := sorted(name for name in there - listed if READ.fullmatch(name)):
            raise Damaged(f"{more[0]} is not one of its files")
        for name, found in _sums_of(step, sorted(listed)).items():
            if found[1] != sums[name][1]:
                raise Damaged(f"{name} has {found[1]:,} bytes, not {sums[name][1]:,}")
            if found != sums[name]:
                raise Damaged(f"{name} has a different checksum than when it was written")


def _write_part(item: Path) -> None:
    process = jax.process_index()
    directory = f"ocdbt.process_{process}"
    names = [f"{directory}/{name}" for name in _names(item / directory)]
    item.mkdir(parents=True, exist_ok=True)  # where a disk is not shared; see `_check_complete`
    _write(item / f"{NAME}.{process}", _sums_of(item, names))


def _parts_of(item: Path) -> list[Path]:
    return sorted(path for path in item.iterdir() if re.fullmatch(rf"{NAME}\.\d+", path.name))


def _names(directory: Path) -> Iterator[str]:
    """The names of all files below it, except those of others, which may vanish at any time."""
    names = (str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir())
    return (name for name in names if not re.search(r"(^|/)[.@]", name))


def _sums_of(directory: Path, names: list[str]) -> Sums:
    with ThreadPoolExecutor(4) as pool:
        sums = pool.map(lambda name: sum_of(directory / name), names)
        return dict(zip(names, sums, strict=True))


def _write(path: Path, sums: Sums) -> None:
    lines = "".join(f"{crc:08x} {size} {name}\n" for name, (crc, size) in sorted(sums.items()))
    path.write_bytes(f"{google_crc32c.value(lines.encode()):08x}\n{lines}".encode())


def _read(path: Path) -> Sums:
    if not path.exists():
        raise Damaged(f"{path.name} is missing")
    first, _, lines = path.read_bytes().partition(b"\n")
    if first.decode(errors="replace") != f"{google_crc32c.value(lines):08x}":
        raise Damaged(f"{path.name} has a different checksum than when it was written")
    split = (line.split(" ", 2) for line in lines.decode().splitlines())
    return {name: (int(crc, 16), int(size)) for crc, size, name in split}
