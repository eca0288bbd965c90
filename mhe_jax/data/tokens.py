"""All tokens of a source, eos after each item."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mhe_jax.data.cache import key_of, publish
from mhe_jax.data.sources import PIECE, Source, stream
from mhe_jax.data.tokenizer import EOS, Tokenizer

CHUNK_BYTES = 16 << 20  # of text that is tokenized at once
CHUNK_TOKENS = 16 << 20  # that are looked at at once


def tokenize(source: Source, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The tokens in order, some at a time, two bytes each up to a vocabulary of 65,536."""
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


def open_tokens(source: Source, tokenizer: Tokenizer, cache: Path) -> np.ndarray:
    """The tokens [all of them], mapped from a file in `cache` that is written once."""
    kind = _kind(tokenizer)
    path = cache / "tokens" / f"{key_of(source.key, tokenizer.key)}.{kind.name}"
    if not path.exists():
        with publish(path) as temporary, temporary.open("wb") as out:
            for ids in tokenize(source, tokenizer):
                ids.tofile(out)
    return np.memmap(path, kind, "r")


def item_ends(tokens: np.ndarray) -> np.ndarray:
    """Where each item ends, after its eos: text itself never has one.

    >>> item_ends(np.array([7, 8, EOS, EOS, 9, EOS])).tolist()
    [3, 4, 6]
    """
    return np.concatenate(
        [
            np.flatnonzero(tokens[start : start + CHUNK_TOKENS] == EOS) + start + 1
            for start in range(0, len(tokens), CHUNK_TOKENS)
        ]
    )


def _kind(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.int32)
