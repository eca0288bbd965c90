"""The tokens of a text, made once and kept in the cache, one array a part of the text and a side:

    cache/tokens/KEY/000000.0.npy      [tokens] of part 0, eos after each item; `.1` is the target
    cache/tokens/KEY/parts             how many parts and sides there are, written last

KEY is of the content and the tokenizer. Tokens take two bytes up to a vocabulary of 65,536, else
four. Files are read by memory map. Each appears whole or not at all: who was interrupted goes on
with the next, and several processes make different ones.
"""

import contextlib
import functools
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from mhe_jax.config import InputError
from mhe_jax.config.data import EOS
from mhe_jax.data.cache import built_once, key_of
from mhe_jax.data.text import Item, Text
from mhe_jax.data.tokenizer import pieces
from mhe_jax.data.words import AnyTokenizer, HashedWords

VERSION = 2  # of the files
PART = 16 << 20  # bytes of text in a part, as long as there are at most so many parts:
MOST_PARTS = 128  # a map holds its file open, and a process may have about a thousand
AT_ONCE = 1 << 12  # texts that are tokenized at once


class Tokens:
    """The tokens of one side of all items, one item after the other, each with eos."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self._parts = parts
        self._firsts = np.cumsum([0, *map(len, parts)])
        self.num_tokens = int(self._firsts[-1])

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Where each item ends: [items]."""
        parts = zip(self._parts, self._firsts[:-1], strict=True)
        return np.concatenate([first + 1 + np.flatnonzero(part == EOS) for part, first in parts])

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
            found.append(self._parts[part][start - first : stop - first])
            start, part = first + len(self._parts[part]), part + 1
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

    Process p of P makes parts p, p + P, ... of those that are not there, then any still missing.

    Raises:
      InputError: the cache cannot be written or is damaged, or the text changes meanwhile.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(tokenizer, HashedWords) and tokenizer.is_local:
            # Its numbers mean nothing to another process; a file that is mapped may be deleted.
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache)))
        parts_of = (VERSION, PART, text.key, text.sides, tokenizer.key, tokenizer.vocabulary_size)
        directory = cache / "tokens" / key_of(*parts_of)

        def make(draft: Path) -> None:
            if process_count > 1:
                _make(text, tokenizer, directory, process_index, process_count)
            draft.write_text(json.dumps(_make(text, tokenizer, directory, 0, 1)))

        count, sides = json.loads(built_once(directory / "parts", make).read_text())
        try:
            return [
                Tokens([np.load(_file(directory, i, side), mmap_mode="r") for i in range(count)])
                for side in range(sides)
            ]
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{directory}: is damaged ({error}): delete it") from None


def _file(directory: Path, part: int, side: int) -> Path:
    return directory / f"{part:06}.{side}.npy"


def _make(
    text: Text, tokenizer: AnyTokenizer, directory: Path, first: int, step: int
) -> tuple[int, int]:
    """Makes every `step`-th part from `first` on that is not there; the numbers of `parts`."""
    size = max(PART, text.size // MOST_PARTS)
    shown = text.size > PART and sys.stderr.isatty()
    parts: Iterable[tuple[list[Item], int]] = track(
        _parts(text, size),
        f"tokenizing {text.name}",
        total=text.size // size + 1,
        console=Console(stderr=True),
        transient=True,
        disable=not shown,
    )
    count, sides, items, length = 0, 0, 0, 0
    for count, (part, of_part) in enumerate(parts, 1):
        sides, items, length = len(part[0]), items + len(part), length + of_part
        if (count - 1) % step == first:
            for side, texts in enumerate(zip(*part, strict=True)):
                build = functools.partial(_write, tokenizer, texts)
                built_once(_file(directory, count - 1, side), build)
    if (items, length) != (text.num_items, text.size):
        shutil.rmtree(directory, ignore_errors=True)  # it is of another text than its name says
        raise InputError(f"{text.name}: has changed while it was read")
    return count, sides


def _parts(text: Text, most: int) -> Iterator[tuple[list[Item], int]]:
    """The items, about `most` bytes at a time, and how many bytes."""
    part: list[Item] = []
    size = 0
    for item in text:
        part.append(item)
        size += sum(len(side.encode()) for side in item)
        if size + len(part) > most:
            yield part, size
            part, size = [], 0
    if part:
        yield part, size


def _write(tokenizer: AnyTokenizer, texts: Sequence[str], draft: Path) -> None:
    kind = np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.int32
    chunks = (encode(tokenizer, texts[i : i + AT_ONCE]) for i in range(0, len(texts), AT_ONCE))
    flat = itertools.chain.from_iterable
    ids = np.concatenate([np.fromiter(flat(chunk), kind) for chunk in chunks])
    if np.count_nonzero(ids == EOS) != len(texts):
        raise InputError(f"{tokenizer.name}: makes an eos of something inside a text")
    np.save(draft, ids)
