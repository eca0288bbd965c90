"""Text and pairs of text by number, from a file of any size or from a data set.

    what is written in `data.train`          an item is
    a.txt (any other suffix)                 a line
    a.en, a.de                               the pair of lines with the same number
    a.tsv                                    a line; for translation its two columns
    a.jsonl                                  the strings in `data.fields`: one, or two
    tfds:NAME/CONFIG:SPLIT                   likewise
    demo:SPLIT                               a pair of the built-in phrases

Files may also be `.gz` or `.xz`. A line ends at a line feed, with or without a carriage return
before it; an item never contains its line's end.

Reading is by `os.pread`: it needs no lock between threads, and unlike a memory map the pages read
do not count as memory of the process.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mhe_jax.checks import training_sources
from mhe_jax.config import Config, InputError
from mhe_jax.data.cache import cache_directory, key_of
from mhe_jax.data.index import LineFile, Rule, file_format, file_path, json_texts, open_lines

Content = Literal["text", "pair"]
Item = str | tuple[str, str]

PIECE = 1024  # bytes that are read and tokenized at once
WINDOW = 128  # bytes in which a cut looks for a space


class Source:
    """Items by number, and by place: `extent` counts bytes where that is known, else items.

    Places let a reader start anywhere in a text without knowing how it is cut into items.
    """

    name: str
    content: Content
    key: str  # changes when the items may have changed
    extent: int

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Item:
        raise NotImplementedError

    def locate(self, place: float) -> tuple[int, float]:
        """The item at `place` in [0, extent), and how far into the item that is, in [0, 1)."""
        index = min(int(place), len(self) - 1)
        return index, min(place - index, 1.0)

    def size(self, index: int) -> int:
        """How much of `extent` item `index` takes."""
        return 1

    def utf8(self, index: int) -> Sequence["Bytes"]:
        """The one or two texts of an item as bytes, which may be read only when they are cut."""
        item = self[index]
        return [text.encode() for text in ((item,) if isinstance(item, str) else item)]

    def _check(self, index: int) -> int:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: item {index} of {len(self)}")
        return index


class Span:
    """Some bytes of a file, read when sliced."""

    def __init__(self, file: int, start: int, stop: int):
        self._file, self._start, self._stop = file, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        return os.pread(self._file, max(0, stop - start), self._start + start)


Bytes = bytes | Span


class _Lines(Source):
    """The lines of a checked file."""

    def __init__(self, file: LineFile, content: Content):
        self.name, self.key, self.content = file.name, file.key, content
        self._offsets = file.offsets
        self._begin = int(file.offsets[0])
        self.extent = int(file.offsets[-1]) - self._begin
        try:  # that it is checked does not mean that it may be read
            self._file = os.open(file.path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{file.name}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def locate(self, place: float) -> tuple[int, float]:
        offset = min(self._begin + int(place), int(self._offsets[-1]) - 1)
        index = int(np.searchsorted(self._offsets, offset, side="right")) - 1
        return index, (offset - int(self._offsets[index])) / self.size(index)

    def size(self, index: int) -> int:
        return int(self._offsets[index + 1]) - int(self._offsets[index])

    def line(self, index: int) -> bytes:
        """Line `index` without its end."""
        start, stop = self._offsets[self._check(index)], self._offsets[index + 1]
        line = os.pread(self._file, int(stop) - int(start), int(start))
        return line[: len(line) - _end_length(line[-2:])]

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
        return [Span(self._file, start, stop - _end_length(end))]


def _end_length(tail: bytes) -> int:
    return 2 if tail.endswith(b"\r\n") else int(tail.endswith(b"\n"))


class TabLines(_Lines):
    """Each line of a file is two texts with a tab between."""

    def __init__(self, file: LineFile):
        super().__init__(file, "pair")

    def __getitem__(self, index: int) -> Item:
        source, target = self.line(index).decode().split("\t")
        return source, target


class JsonLines(_Lines):
    """Each line of a file is a JSON object with one or two fields of text."""

    def __init__(self, file: LineFile, fields: tuple[str, ...]):
        super().__init__(file, "pair" if len(fields) == 2 else "text")
        self._fields = fields

    def __getitem__(self, index: int) -> Item:
        texts = json_texts(self.name, index + 1, self.line(index), self._fields)
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


class Items(Source):
    """Any sequence of texts or pairs, such as a list or a data set of TFDS."""

    def __init__(self, name: str, items: Sequence[Item], content: Content, key: str):
        if len(items) == 0:
            raise InputError(f"{name}: is empty")
        self.name, self.content, self.key = name, content, key
        self._items = items
        self.extent = len(items)

    def __len__(self) -> int:
        return self.extent

    def __getitem__(self, index: int) -> Item:
        return self._items[self._check(index)]


def open_source(
    written: Sequence[str],
    content: Content,
    *,
    fields: Sequence[str] = ("text",),
    directory: str = ".",
    cache: Path | None = None,
    option: str = "data",
) -> Source:
    """What `data.train`, `data.validation` or `data.test` names, checked from end to end.

    Args:
      written: one name, or two parallel files.
      content: `pair` for translation, else `text`.
      fields: names of the text fields in JSONL and TFDS.
      directory: where relative paths start.
      cache: where indices and unpacked files go; None is `cache_directory()`.
      option: how messages call `written`.

    Raises:
      InputError: one line that names the file, the line where there is one, and the reason.
    """
    written = tuple(written)
    if not written or not all(written):
        raise InputError(f"{option} is not set: it names the file or data set to read")
    if len(written) > (2 if content == "pair" else 1):
        allowed = "one source or two parallel files" if content == "pair" else "one source"
        raise InputError(f"{option} has {len(written)} names, allowed is {allowed}")
    kinds = [name.partition(":")[0] for name in written if name.startswith(("tfds:", "demo:"))]
    paths = [file_path(directory, name) for name in written]
    formats = [file_format(path) for path in paths]
    cache = cache or cache_directory()
    if len(written) == 2:
        if kinds or {".tsv", ".jsonl"} & set(formats):
            raise InputError(f"{option}={','.join(written)}: only two text files can be parallel")
    elif kinds == ["demo"]:
        return _open_demo(written[0], content, option)
    elif kinds == ["tfds"]:
        from mhe_jax.data import tfds_source  # the only file that imports TFDS, and slow to import

        fields = _fields(fields, content, written[0])
        items, key = tfds_source.open_items(written[0], fields, cache)
        return Items(written[0], items, content, key)
    if len(paths) == 2:
        source, target = (TextLines(open_lines(path, Rule(), cache)) for path in paths)
        return ParallelLines(source, target)
    if formats[0] == ".jsonl":
        fields = _fields(fields, content, str(paths[0]))
        return JsonLines(open_lines(paths[0], Rule(fields=fields), cache), fields)
    if formats[0] == ".tsv":
        columns = 2 if content == "pair" else 1
        file = open_lines(paths[0], Rule(columns=columns), cache)
        return TabLines(file) if content == "pair" else TextLines(file)
    if content == "pair":
        raise InputError(
            f"{option}={written[0]}: translation needs two parallel text files, a .tsv, "
            "a .jsonl or a tfds: data set"
        )
    return TextLines(open_lines(paths[0], Rule(), cache))


def open_split(config: Config, split: str) -> Source:
    """The source of `train`, `validation` or `test` of an experiment.

    Raises:
      InputError: see `open_source`; or `train` has several sources, which `open_train` opens.
    """
    if split == "train" and config.data.train_weights:
        raise InputError("data.train has several sources (data.train_weights): name another split")
    return _open(config, split, getattr(config.data, split))


def open_train(config: Config) -> list[tuple[Source, float]]:
    """The training sources of an experiment, each with its weight."""
    return [
        (_open(config, "train", written), weight) for written, weight in training_sources(config)
    ]


def _open(config: Config, split: str, written: Sequence[str]) -> Source:
    return open_source(
        written,
        "pair" if config.task == "translation" else "text",
        fields=config.data.fields,
        directory=config.data.directory,
        cache=cache_directory(config.data.cache_directory),
        option=f"data.{split}",
    )


def _fields(fields: Sequence[str], content: Content, name: str) -> tuple[str, ...]:
    """`fields`, when they are as many as the content has texts."""
    needed = 2 if content == "pair" else 1
    if len(fields) != needed or len(set(fields)) != needed:
        example = "('de', 'en'): source, target" if content == "pair" else "('text',)"
        raise InputError(f"data.fields={tuple(fields)}: {name} needs {needed}, such as {example}")
    return tuple(fields)


def _open_demo(name: str, content: Content, option: str) -> Source:
    if content != "pair":
        raise InputError(f"{option}={name}: holds pairs, for task=translation only")
    from mhe_jax.data import phrases  # needs the extra `demo`

    split: Any = name.partition(":")[2]
    pairs = phrases.pairs(split)
    return Items(name, pairs, "pair", key_of(name, pairs))


def _cut(data: Bytes, near: int, lowest: int) -> tuple[int, int]:
    """Where the bytes before `near` end and those after begin: around a space if one is close.

    The beginning of a text is as good as a space. Without one the cut is between two characters.
    """
    start = max(lowest, near - WINDOW)
    window = data[start : near + 1]
    space = window.rfind(b" ")
    if space >= 0:
        return start + space, start + space + 1
    if start == 0 == lowest:
        return 0, 0
    while near > start and 0x80 <= window[near - start] < 0xC0:
        near -= 1
    return near, near


def pieces(data: Bytes, fraction: float = 0.0) -> Iterator[str]:
    """A text in parts of at most `PIECE` bytes, from about `fraction` of it on.

    Texts are cut at a space, which is dropped since a tokenizer puts one before each text; without
    a space within `WINDOW` bytes they are cut between two characters. No part depends on how many
    others are read.

    >>> list(pieces(b"a b"))
    ['a b']
    """
    start = _cut(data, int(fraction * len(data)), 0)[1] if fraction and len(data) else 0
    while len(data) - start > PIECE:
        stop, following = _cut(data, start + PIECE, start + 1)
        yield data[start:stop].decode()
        start = following
    yield data[start : len(data)].decode()


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
