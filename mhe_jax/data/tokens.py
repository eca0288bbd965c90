"""All tokens of a source, eos after each item."""

import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mhe_jax.config.data import EOS
from mhe_jax.data.cache import built_once, key_of
from mhe_jax.data.pieces import PIECE, FilePart
from mhe_jax.data.sources import Source, stream
from mhe_jax.data.tokenizer import Tokenizer
from mhe_jax.data.words import AnyTokenizer

CHUNK_BYTES = 16 << 20  # of text tokenized at once, at most
CHUNK_TOKENS = 4 << 20  # searched at once


def tokenize(source: Source, tokenizer: AnyTokenizer) -> Iterator[np.ndarray]:
    """The tokens in order, in chunks, two bytes each up to a vocabulary of 65,536."""
    kind = _kind(tokenizer)
    parts, lasts = [], []

    def encoded() -> np.ndarray:
        rows = tokenizer.encode_batch(parts, num_threads=-1)
        ids = [[*row, EOS] if last else row for row, last in zip(rows, lasts, strict=True)]
        parts.clear()
        lasts.clear()
        return np.concatenate([np.array(row, kind) for row in ids])

    for part, last in stream(source, 0.0, math.inf):
        parts.append(part)
        lasts.append(last)
        if len(parts) * PIECE >= CHUNK_BYTES:
            yield encoded()
    if parts:
        yield encoded()


class TokenFile:
    """Tokens kept in a file, read when sliced; the file is in `cache` and written once."""

    def __init__(self, source: Source, tokenizer: Tokenizer, cache: Path):
        self._kind = _kind(tokenizer)

        def build(temporary: Path) -> None:
            with temporary.open("wb") as out:
                for ids in tokenize(source, tokenizer):
                    ids.tofile(out)

        name = f"{key_of(source.key, tokenizer.key)}.{self._kind.name}"
        path = built_once(cache / "tokens" / name, build)
        file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, file)
        self._bytes = FilePart(file, 0, os.fstat(file).st_size)

    def __len__(self) -> int:
        return len(self._bytes) // self._kind.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        size = self._kind.itemsize
        return np.frombuffer(self._bytes[part.start * size : part.stop * size], self._kind)


def item_ends(tokens: "TokenFile | np.ndarray") -> np.ndarray:
    """Where each item ends, after its eos: text itself never has one.

    >>> item_ends(np.array([7, 8, EOS, EOS, 9, EOS])).tolist()
    [3, 4, 6]
    """
    starts = range(0, len(tokens), CHUNK_TOKENS)
    return np.concatenate(
        [np.flatnonzero(tokens[s : s + CHUNK_TOKENS] == EOS) + s + 1 for s in starts]
    )


def _kind(tokenizer: AnyTokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.int32)
