"""The tokens of a text, made once and kept in the cache: cache/tokens/KEY/000000 and so on.

KEY is of the content and the tokenizer. Each file has some megabytes of the text: for one side, or
for source and target one after the other,

    [items, tokens] int64 · where each item ends [items] int64 · the tokens [tokens], eos after each
    item, of two bytes up to a vocabulary of 65,536 and else of four, and zeros up to 8 bytes

Files are read by memory map. Each appears whole or not at all: who was interrupted goes on with the
next, and several processes make different ones.
"""

import contextlib
import functools
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.config.data import EOS
from mhe_jax.data.cache import built_once, kept, key_of
from mhe_jax.data.text import Item, Text
from mhe_jax.data.tokenizer import pieces
from mhe_jax.data.words import AnyTokenizer, HashedWords

VERSION = 1  # of the files
PART = 16 << 20  # characters of text in a file
AT_ONCE = 1 << 12  # texts that are tokenized at once


class Tokens:
    """The tokens of one side of all items, one item after the other, each with eos."""

    def __init__(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]):
        """Takes the ids of each part, and where its items end."""
        self._ids, self._ends = zip(*parts, strict=True)
        self._firsts = np.cumsum([0, *map(len, self._ids)])
        self.num_tokens = int(self._firsts[-1])

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Where each item ends: [items]."""
        return np.concatenate(
            [of + int(n) for of, n in zip(self._ends, self._firsts, strict=False)]
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item, eos included: [items]."""
        return np.diff(self.ends, prepend=0)

    def item(self, number: int) -> np.ndarray:
        """The tokens of an item."""
        return self[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]

    def __getitem__(self, of: slice) -> np.ndarray:
        """The tokens from `of.start` up to `of.stop`, as far as there are."""
        start, stop, _ = of.indices(self.num_tokens)
        part = int(np.searchsorted(self._firsts, start, side="right")) - 1
        found = []
        while start < stop:
            first = int(self._firsts[part])
            found.append(self._ids[part][start - first : stop - first])
            start, part = first + len(self._ids[part]), part + 1
        return np.concatenate(found) if found else np.zeros(0, np.int32)


def encode(tokenizer: AnyTokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """The tokens of each text, eos after them."""
    cut = [pieces(text) if tokenizer.takes_pieces else [text] for text in texts]
    rows = iter(tokenizer.encode_batch([*itertools.chain(*cut)], num_threads=-1))
    for parts in cut:
        yield [*itertools.chain.from_iterable(itertools.islice(rows, len(parts))), EOS]


def tokens_of(
    text: Text, tokenizer: AnyTokenizer, cache: Path, process_index: int = 0, process_count: int = 1
) -> list[Tokens]:
    """The tokens of each side of a text: one, or source and target.

    Process p of P makes files p, p + P, ... of those that are not there, then any still missing.

    Raises:
      InputError: the cache cannot be written, or the text changes meanwhile.
    """
    kind = np.dtype(np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.int32)
    with contextlib.ExitStack() as stack:
        if isinstance(tokenizer, HashedWords) and tokenizer.is_local:
            # Its numbers mean nothing to another process; a file that is mapped may be deleted.
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache)))
        parts_of = (VERSION, PART, text.key, tokenizer.key, tokenizer.vocabulary_size)
        directory = cache / "tokens" / key_of(*parts_of)
        count = int((kept(directory / "parts") or Path(os.devnull)).read_text() or 0)
        files = [kept(directory / f"{number:06}") for number in range(count)]
        if not count or None in files:
            if process_count > 1:
                _make(text, tokenizer, directory, kind, process_index, process_count)
            files = _make(text, tokenizer, directory, kind, 0, 1)
            built_once(directory / "parts", functools.partial(_count, len(files)))
        parts = [_read(file, kind) for file in files if file]
    return [Tokens(side) for side in zip(*parts, strict=True)]


def _count(files: int, draft: Path) -> None:
    draft.write_text(str(files))


def _parts(text: Text) -> Iterator[list[Item]]:
    """The items, `PART` bytes at a time."""
    part: list[Item] = []
    size = 0
    for item in text:
        part.append(item)
        size += sum(map(len, item)) + 1
        if size > PART:
            yield part
            part, size = [], 0
    if part:
        yield part


def _make(
    text: Text, tokenizer: AnyTokenizer, directory: Path, kind: np.dtype, first: int, step: int
) -> list[Path | None]:
    """Makes every `step`-th file from `first` on that is not there; returns all there are."""
    files, found = [], np.zeros(2, np.int64)
    with _Progress(text) as progress:
        for number, part in enumerate(_parts(text)):
            path = directory / f"{number:06}"
            mine = number % step == first
            build = functools.partial(_write, tokenizer, part, kind)
            files.append(built_once(path, build) if mine else None)
            size = sum(len(side.encode()) for item in part for side in item)
            found += len(part), size
            progress.advance(size)
    if found.tolist() != [text.num_items, text.size]:
        shutil.rmtree(directory, ignore_errors=True)  # it is of another text than its name says
        raise InputError(f"{text.name}: has changed while it was read")
    return files


def _write(tokenizer: AnyTokenizer, part: list[Item], kind: np.dtype, draft: Path) -> None:
    with draft.open("wb") as file:
        for texts in zip(*part, strict=True):
            rows = [
                np.array(row, kind)
                for start in range(0, len(texts), AT_ONCE)
                for row in encode(tokenizer, texts[start : start + AT_ONCE])
            ]
            ends = np.cumsum([len(row) for row in rows])
            np.array([len(ends), ends[-1]]).tofile(file)
            ends.tofile(file)
            np.concatenate(rows).tofile(file)
            file.write(bytes(-file.tell() % 8))


def _read(file: Path, kind: np.dtype) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids and ends of each side, mapped."""
    data, place, sides = np.memmap(file, np.uint8, "r"), 0, []
    while place < len(data):
        items, tokens = data[place : place + 16].view(np.int64).tolist()
        middle = place + 16 + 8 * items
        end = middle + kind.itemsize * tokens
        sides.append((data[middle:end].view(kind), data[place + 16 : middle].view(np.int64)))
        place = end + -end % 8
    return sides


class _Progress:
    """A bar on a terminal, for a text that takes more than moments."""

    def __init__(self, text: Text):
        self._bar = None
        if text.size > PART and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"tokenizing {text.name}", total=text.size)

    def advance(self, size: int) -> None:
        if self._bar:
            self._bar.advance(self._task, size)

    def __enter__(self) -> "_Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
