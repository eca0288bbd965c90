"""Hashed words instead of a tokenizer (Xue & Aletras 2022): nothing is out of vocabulary.

`_emb`   ids are buckets of the hash: rows of one table, like the ids of pieces
others   ids number the words that this process has met; they never leave it. A batch has the type
         and the signature of each token, see `HashedWords.inputs`
"""

import itertools
import threading
from collections.abc import Sequence

import numpy as np

from mhe_jax.config import ModelConfig
from mhe_jax.config.data import NUM_SPECIAL, UNK
from mhe_jax.data.cache import key_of
from mhe_jax.data.tokenizer import Pieces, Tokenizer
from mhe_jax.hashformers import BYTES, LSH, MD, UNKNOWN, offsets, split

WORD = NUM_SPECIAL  # the type of an ordinary word; special tokens have their ids as types


class HashedWords:
    """Text to ids of words, each hashed once and kept, and those ids to the inputs of a model."""

    separators = 2  # as in RoBERTa: <s> A </s> </s> B </s>

    def __init__(self, config: ModelConfig, pieces: Pieces | None = None):
        """LSH takes its features from `pieces`; MD has none."""
        assert config.hashing is not None
        self._hash = MD() if pieces is None else LSH(pieces)
        self.name = config.hashing if pieces is None else pieces.name
        # What the signatures of words depend on, and with `vocabulary_size` their ids.
        self.key = key_of(config.hashing, pieces.key if pieces is not None else None)
        self.is_local = not config.has_table  # ids number the words of this process
        self.vocabulary_size = np.iinfo(np.int32).max if self.is_local else config.vocabulary_size
        self._ids = {UNKNOWN: UNK}
        self._signatures = np.zeros((1 << 10, BYTES), np.uint8)
        self._lock = threading.Lock()

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """The id of each word of many texts; `UNK` for a literal `<unk>`."""
        rows = [split(text) for text in texts]
        known = self._ids.__getitem__
        try:
            return [[*map(known, row)] for row in rows]
        except KeyError:
            self._learn(rows)
            return [[*map(known, row)] for row in rows]

    def _learn(self, rows: Sequence[Sequence[str]]) -> None:
        with self._lock:
            words = dict.fromkeys(itertools.chain.from_iterable(rows))
            new = [word for word in words if word not in self._ids]
            if not self.is_local:
                ids = self._hash.buckets(new, self.vocabulary_size - NUM_SPECIAL) + NUM_SPECIAL
                self._ids.update(zip(new, ids.tolist(), strict=True))
                return
            first = NUM_SPECIAL + len(self._ids) - 1
            last = first + len(new)
            if last > len(self._signatures):
                self._signatures = np.pad(self._signatures[:first], ((0, 2 * last - first), (0, 0)))
            self._signatures[first:last] = self._hash.signatures(new)
            # Last, so that a thread that finds a word in `_ids` finds its signature too.
            self._ids.update(zip(new, range(first, last), strict=True))

    def inputs(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of a model for ids [...]: themselves, or without a table as `tokens` their
        types (0 to 4 special tokens, 5 a word), and `signatures` [..., 16], zeros but for words.
        """
        if not self.is_local:
            return {"tokens": ids}
        return {"tokens": np.minimum(ids, WORD), "signatures": self._signatures[ids]}

    def offsets(self, text: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Where each word of a text begins and ends in it, in characters: [n, 2]."""
        return offsets(text)


AnyTokenizer = Tokenizer | HashedWords
