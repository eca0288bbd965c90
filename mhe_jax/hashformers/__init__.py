"""Hashes of whole words, and the words of a text.

    MD     128 bits: HMAC-MD5 of the word in UTF-8, key "en"
    LSH    128 bits: bit_j = [Σ_p w_p g_p[j] > 0], g_p standard normal, from the number of piece p
           bucket of N: arg max_i s_i Σ_p w_p r[(p + i) mod N], s_i = 1 where i < N/2 and else -1

The features p of a word are the pieces of the word itself, of each proper prefix and of each proper
suffix, w_p = count(p) / max(n + 1 - len(p), 1) for a word of n characters. So words that share most
of their letters share most of their bits, and often their bucket; MD gives similar words nothing in
common. The first bit is the highest of the first byte.

Source: Xue & Aletras 2022, "HashFormers", and their code for the constants.
"""

import hmac
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

BITS, BYTES = 128, 16
KEY, RING_SEED = b"en", 42
UNKNOWN = "<unk>"  # stands in texts for an unknown word
CHUNK = 256  # words whose features are computed at once
LONGEST = 256  # characters of a word that LSH reads: its features take the square of that

_WORD = re.compile(rf"{UNKNOWN}|\w+|(?:(?!{UNKNOWN})[^\w\s])+")


def split(text: str) -> list[str]:
    """The words of a text, in lower case: runs of letters and digits, or of other marks.

    >>> split("Don't <unk> @-@ Café...")
    ['don', "'", 't', '<unk>', '@-@', 'café', '...']
    """
    return _WORD.findall(text.lower())


def offsets(text: str) -> np.ndarray:
    """Where each word of `split(text)` begins and ends in `text`: [n, 2]."""
    lower = text.lower()
    found = np.array([match.span() for match in _WORD.finditer(lower)], np.int64).reshape(-1, 2)
    if len(lower) == len(text):
        return found
    # Some letters become two in lower case.
    of = np.repeat(np.arange(len(text)), [len(character.lower()) for character in text])
    of = np.append(of, len(text))
    return np.stack([of[found[:, 0]], of[found[:, 1] - 1] + 1], axis=1)


class MD:
    """HMAC-MD5 of words (RFC 2104): similar letters give unrelated hashes.

    >>> MD().signatures(["the"]).tobytes().hex()
    'b9386d96710ddd52bc49ff0033ead10f'
    """

    def signatures(self, words: Sequence[str]) -> np.ndarray:
        """Bytes [n, 16] of words."""
        digests = (hmac.digest(KEY, word.encode(), "md5") for word in words)
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, BYTES)

    def buckets(self, words: Sequence[str], count: int) -> np.ndarray:
        """Numbers below `count` of words: their 128 bits, modulo `count`."""
        halves = self.signatures(words).view(">u8").astype(object)
        return (((halves[:, 0] << 64) + halves[:, 1]) % count).astype(np.int64)


class Features(NamedTuple):
    """Weighted pieces of words: those of word i are at starts[i] to starts[i + 1]."""

    starts: np.ndarray  # [n + 1]
    ids: np.ndarray  # [m], ascending for each word
    weights: np.ndarray  # [m]


class LSH:
    """Random hyperplanes of the sub-word pieces of a word: similar letters give similar hashes."""

    def __init__(self, pieces: Any):  # a tokenizer
        self._pieces = pieces
        self._drawn = np.zeros(pieces.vocabulary_size, bool)
        self._normal = np.empty((pieces.vocabulary_size, BITS))
        self._ring = np.empty(0)

    def signatures(self, words: Sequence[str]) -> np.ndarray:
        """Bytes [n, 16] of words."""
        found = map(self.signatures_of, self._in_parts(words))
        return np.concatenate([np.empty((0, BYTES), np.uint8), *found])

    def buckets(self, words: Sequence[str], count: int) -> np.ndarray:
        """Numbers below `count` of words."""
        found = [self.buckets_of(part, count) for part in self._in_parts(words)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _in_parts(self, words: Sequence[str]):
        for start in range(0, len(words), CHUNK):
            yield self.features([word[:LONGEST] for word in words[start : start + CHUNK]])

    def features(self, words: Sequence[str]) -> Features:
        """The pieces of each word, and of its prefixes and suffixes, but for marks of beginning."""
        parts = [
            part
            for word in words
            for part in (word, *(w for i in range(1, len(word)) for w in (word[:i], word[i:])))
        ]
        rows = iter(self._pieces.encode_batch(parts, num_threads=-1))
        starts, ids, weights = [0], [], []
        for word in words:
            counts = Counter(next(rows))
            for _ in range(2 * (len(word) - 1)):
                counts.update(next(rows))
            found = sorted(p for p in counts if self._pieces.characters[p])
            ids += found
            weights += [counts[p] for p in found]
            starts.append(len(ids))
        features = np.array(ids, np.int64)
        sizes = np.repeat([len(word) for word in words], np.diff(starts))
        room = np.maximum(sizes + 1 - self._pieces.characters[features], 1)
        return Features(np.array(starts), features, np.array(weights) / room)

    def signatures_of(self, features: Features) -> np.ndarray:
        draw = np.random.RandomState()
        for piece in np.unique(features.ids[~self._drawn[features.ids]]):
            draw.seed(piece)
            self._normal[piece] = draw.normal(0, 1, BITS)
            self._drawn[piece] = True
        weighted = self._normal[features.ids] * features.weights[:, None]
        sums = np.zeros((len(features.starts) - 1, BITS))
        some = np.diff(features.starts) > 0
        if some.any():
            sums[some] = np.add.reduceat(weighted, features.starts[:-1][some])
        return np.packbits(sums > 0, axis=1)

    def buckets_of(self, features: Features, count: int) -> np.ndarray:
        if len(self._ring) != 2 * count:
            self._ring = np.tile(np.random.RandomState(RING_SEED).normal(0, 1, count), 2)
        ring, ids = self._ring, features.ids % count
        found = np.zeros(len(features.starts) - 1, np.int64)
        scores, part, half = np.empty(count), np.empty(count), -(-count // 2)
        for word in range(len(found)):
            scores[:] = 0
            for f in range(features.starts[word], features.starts[word + 1]):
                window = ring[ids[f] : ids[f] + count]
                scores += np.multiply(window, features.weights[f], out=part)
            np.negative(scores[half:], out=scores[half:])
            found[word] = scores.argmax()
        return found
