"""Texts and pairs of texts by number, from a file of any size or from a sequence.

Files are read by `os.pread`: it needs no lock between threads, and unlike those of a memory map,
the pages read do not count as memory of the process.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.data.cache import key_of
from mhe_jax.data.index import LineFile, record_texts
from mhe_jax.data.pieces import PIECE, Bytes, FilePart, pieces

Content = Literal["text", "pair"]
Item = str | tuple[str, str]


class Source:
    """Items by number, and by place: `extent` counts bytes where they are known, else items.

    Places let a reader start anywhere in a text without knowing how it is cut into items.
    """

    name: str
    content: Content
    key: str  # of the content: another if any item is, the same wherever and whenever it is stored
    extent: int
    _offsets: np.ndarray | None = None  # [items + 1]: where each begins in bytes, and the end

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Item:
        raise NotImplementedError

    def locate(self, place: float) -> tuple[int, float]:
        """The item at `place` in [0, extent), and how far into the item that is, in [0, 1)."""
        if self._offsets is None:
            index = min(int(place), len(self) - 1)
            return index, min(place - index, 1.0)
        offset = min(int(self._offsets[0]) + int(place), int(self._offsets[-1]) - 1)
        index = int(np.searchsorted(self._offsets, offset, side="right")) - 1
        return index, (offset - int(self._offsets[index])) / self.size(index)

    def size(self, index: int) -> int:
        """How much of `extent` item `index` takes."""
        if self._offsets is None:
            return 1
        return int(self._offsets[index + 1]) - int(self._offsets[index])

    def utf8(self, index: int) -> Sequence[Bytes]:
        """The one or two texts of an item as bytes, which may be read only when sliced."""
        item = self[index]
        return [text.encode() for text in ((item,) if isinstance(item, str) else item)]

    def _check(self, index: int) -> int:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: item {index} of {len(self)}")
        return index


def _end_length(tail: bytes) -> int:
    return 2 if tail.endswith(b"\r\n") else int(tail.endswith(b"\n"))


class _Lines(Source):
    """The lines of a checked file."""

    _offsets: np.ndarray
    _end = staticmethod(_end_length)

    def __init__(self, file: LineFile, content: Content):
        self.name, self.key, self.content = file.name, file.key, content
        self._offsets = file.offsets
        self.extent = int(file.offsets[-1]) - int(file.offsets[0])
        self._file = os.open(file.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def line(self, index: int) -> bytes:
        """Line `index` without its end."""
        start, stop = int(self._offsets[self._check(index)]), int(self._offsets[index + 1])
        line = os.pread(self._file, stop - start, start)
        return line[: len(line) - self._end(line[-2:])]

    def __getitem__(self, index: int) -> Item:
        return self.line(index).decode()


class TextLines(_Lines):
    """Each line of a file is an item; a long one is never read whole to get at a part of it."""

    def __init__(self, file: LineFile):
        super().__init__(file, "text")

    def utf8(self, index: int) -> Sequence[Bytes]:
        if self.size(index) <= PIECE:
            return [self.line(index)]
        start, stop = int(self._offsets[index]), int(self._offsets[index + 1])
        end = os.pread(self._file, 2, stop - 2)
        return [FilePart(self._file, start, stop - self._end(end))]


class Column(TextLines):
    """Each text of a column of a table is an item, including any line ends in it."""

    _end = staticmethod(lambda tail: 0)


class Records(_Lines):
    """Each line is a JSON object with one or two texts, or two texts with a tab between them."""

    def __init__(self, file: LineFile, fields: tuple[str, ...] | None):
        super().__init__(file, "text" if fields and len(fields) == 1 else "pair")
        self._fields = fields

    def __getitem__(self, index: int) -> Item:
        texts = record_texts(f"{self.name}: record {index + 1}", self.line(index), self._fields)
        return (texts[0], texts[1]) if len(texts) == 2 else texts[0]


class ParallelLines(Source):
    """Line i of two files; places are those of the first."""

    content: Content = "pair"

    def __init__(self, source: TextLines, target: TextLines):
        if len(source) != len(target):
            raise InputError(
                f"{source.name} has {len(source):,} lines, {target.name} has {len(target):,}; "
                "parallel files have the same number"
            )
        self.name = f"{source.name} and {target.name}"
        self.key = key_of(source.key, target.key)
        self._source, self._target = source, target
        self.extent, self.locate, self.size = source.extent, source.locate, source.size

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Item:
        return self._source.line(index).decode(), self._target.line(index).decode()


class Shards(Source):
    """The items of several sources, one after the other."""

    def __init__(self, name: str, shards: Sequence[Source]):
        self.name, self.content = name, shards[0].content
        self.key = key_of("shards", *(shard.key for shard in shards))
        self._shards = shards
        self._firsts = np.cumsum([0, *map(len, shards)])
        self._places = np.cumsum([0, *(shard.extent for shard in shards)])
        self.extent = int(self._places[-1])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _of(self, index: int) -> tuple[Source, int]:
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._shards[shard], index - int(self._firsts[shard])

    def __getitem__(self, index: int) -> Item:
        shard, index = self._of(self._check(index))
        return shard[index]

    def locate(self, place: float) -> tuple[int, float]:
        last = np.nextafter(self.extent, 0)
        number = int(np.searchsorted(self._places, min(place, last), side="right")) - 1
        index, fraction = self._shards[number].locate(place - int(self._places[number]))
        return int(self._firsts[number]) + index, fraction

    def size(self, index: int) -> int:
        shard, index = self._of(index)
        return shard.size(index)

    def utf8(self, index: int) -> Sequence[Bytes]:
        shard, index = self._of(index)
        return shard.utf8(index)


class Items(Source):
    """Any sequence of texts or pairs, such as a list or a data set of TFDS.

    Rows of running text need `offsets`, the start of each item in bytes and the end: if places
    count items, a long text is read less often than a short one.
    """

    def __init__(
        self,
        name: str,
        items: Sequence[Item],
        content: Content,
        key: str,
        offsets: np.ndarray | None = None,
    ):
        if len(items) == 0:
            raise InputError(f"{name}: is empty")
        self.name, self.content, self.key = name, content, key
        self._items, self._offsets = items, offsets
        self.extent = len(items) if offsets is None else int(offsets[-1]) - int(offsets[0])

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[self._check(index)]


def stream(source: Source, place: float, longest: float) -> Iterator[tuple[str, bool]]:
    """Parts of text from about `place` to the end of the source, and whether each ends an item.

    It starts where the item at `place` starts, or inside it if the item has over `longest` bytes.
    """
    index, fraction = source.locate(place)
    for index in range(index, len(source)):  # noqa: B020
        for data in source.utf8(index):
            parts = pieces(data, fraction if len(data) > longest else 0.0)
            part = next(parts)
            for following in parts:
                yield part, False
                part = following
            yield part, True
        fraction = 0.0
