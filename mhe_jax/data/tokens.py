"""The tokens of a text, made once and kept in the cache, one array a part of the text and a side:

    cache/tokens/KEY/000000.0.npy      [tokens] of part 0, eos after each item; `.1` is the target
    cache/tokens/KEY/parts             how many parts and sides there are, written last

KEY is of the content and the tokenizer. Tokens take two bytes up to a vocabulary of 65,536, else
four. Files are read by memory map. Each appears whole or not at all: who was interrupted goes on
with the next, and several processes make different ones.
"""

import functools
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from mhe_jax.config import InputError
from mhe_jax.config.data import EOS
from mhe_jax.data.cache import built_once, key_of
from mhe_jax.data.text import Item, Text
from mhe_jax.data.tokenizer import Tokenizer, pieces
from mhe_jax.data.words import AnyTokenizer, HashedWords

VERSION = 3  # of the files
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


def tokens_of(
    text: Text, tokenizer: AnyTokenizer, cache: Path, process_index: int = 0, process_count: int = 1
) -> list[Tokens]:
    """The tokens of each side of a text: one, or source and target.

    Process p of P makes parts p, p + P, ... of those that are not there, then any still missing.
    """
    with tempfile.TemporaryDirectory(dir=cache) as own:
        if isinstance(tokenizer, HashedWords) and tokenizer.is_local:
            # Its numbers mean nothing to another process; a file that is mapped may be deleted.
            cache = Path(own)
        parts_of = (VERSION, PART, text.key, text.sides, tokenizer.key, tokenizer.vocabulary_size)
        directory = cache / "tokens" / key_of(*parts_of)

        def make(draft: Path) -> None:
            if process_count > 1:
                _make(text, tokenizer, directory, process_index, process_count)
            draft.write_text(json.dumps(_make(text, tokenizer, directory)))

        count = json.loads(built_once(directory / "parts", make).read_text())
        names = [[f"{i:06}.{side}.npy" for i in range(count)] for side in range(text.sides)]
        try:
            return [Tokens([np.load(directory / name, "r") for name in of]) for of in names]
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{directory}: is damaged ({error}): delete it") from None


def _make(
    text: Text, tokenizer: AnyTokenizer, directory: Path, first: int = 0, step: int = 1
) -> int:
    """Makes every `step`-th part from `first` on that is not there; how many there are in all."""
    size, length, items, count = max(PART, text.size // MOST_PARTS), 0, 0, 0

    def part_of(item: Item) -> int:
        nonlocal length
        length += sum(len(side.encode()) for side in item)
        return length // size

    shown = track(
        text,
        f"tokenizing {text.name}",
        console=Console(stderr=True),
        transient=True,
        disable=text.size <= PART or not sys.stderr.isatty(),
    )
    for count, (_, group) in enumerate(itertools.groupby(shown, part_of), 1):
        part = [*group]
        items += len(part)
        for side, texts in enumerate(zip(*part, strict=True)):
            if (count - 1) % step == first:
                build = functools.partial(_write, tokenizer, texts)
                built_once(directory / f"{count - 1:06}.{side}.npy", build)
    if (items, length) != (len(text), text.size):
        shutil.rmtree(directory, ignore_errors=True)  # it is of another text than its name says
        raise InputError(f"{text.name}: has changed while it was read")
    return count


def _write(tokenizer: AnyTokenizer, texts: Sequence[str], draft: Path) -> None:
    kind = np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.int32
    flat, chunks = itertools.chain.from_iterable, []
    for start in range(0, len(texts), AT_ONCE):
        some = texts[start : start + AT_ONCE]
        # Only sentencepiece puts a space before each text.
        cut = [[*pieces(text)] if type(tokenizer) is Tokenizer else [text] for text in some]
        rows = iter(tokenizer.encode_batch([*flat(cut)], num_threads=-1))
        ended = ((*flat(itertools.islice(rows, len(parts))), EOS) for parts in cut)
        chunks.append(np.fromiter(flat(ended), kind))
    ids = np.concatenate(chunks)
    if np.count_nonzero(ids == EOS) != len(texts):
        raise InputError(f"{tokenizer.name}: makes an eos of something inside a text")
    np.save(draft, ids)
