"""Hashes of words against published vectors, and against their definition word by word."""

import hmac
import re
from collections import Counter

import numpy as np
import pytest

from mhe_jax.data import Pieces
from mhe_jax.hashformers import LSH, MD, Features, offsets, split

# Word -> digest and bucket of 50,260, counted from 5.
MD_VECTORS = {
    "the": ("b9386d96710ddd52bc49ff0033ead10f", 20664),
    "hello": ("1dec56025892c637efb2601c8e1a3ab4", 46797),
    "world": ("5f293b86db782e0c40b2761be9ad9cd5", 25238),
    "!": ("2e9e7c379d2e38e62a269357c7e4f23f", 41048),
    "...": ("c81ff4efe2e183ce6bf4d6d4a400e8ca", 21207),
    "café": ("860e45acc1cbb5b32a1ec59dc2d4032f", 27832),
}
WORDS = ["baum", "bäume", "läuft", "x", "...", "groß" * 5, "日本", "katze"]


@pytest.fixture(scope="module")
def lsh(tokenizer):
    return LSH(Pieces(tokenizer.model))


def test_md_vectors():
    words = list(MD_VECTORS)
    signatures = MD().signatures(words)
    assert [row.tobytes().hex() for row in signatures] == [d for d, _ in MD_VECTORS.values()]
    assert (MD().buckets(words, 50260) + 5).tolist() == [b for _, b in MD_VECTORS.values()]
    for word in WORDS:
        assert MD().signatures([word]).tobytes() == hmac.digest(b"en", word.encode(), "md5")


def one_feature(*pieces):
    """Words of one feature each."""
    ids = np.array(pieces)
    return Features(np.arange(len(ids) + 1), ids, np.ones(len(ids)))


def test_lsh_vectors(lsh, monkeypatch):
    # Numbers of pieces as of the paper's vocabulary, which has more than ours.
    monkeypatch.setattr(lsh, "_drawn", np.zeros(50001, bool))
    monkeypatch.setattr(lsh, "_normal", np.empty((50001, 128)))
    (signature,) = lsh.signatures_of(one_feature(102))
    assert signature.tobytes().hex() == "ec215cddc6ae65500393272c2b711a6f"
    buckets = lsh.buckets_of(one_feature(102, 1000, 50000), 50260) + 5
    assert buckets.tolist() == [15746, 14848, 16108]


def by_the_word(lsh, word):
    """{piece: weight} straight from the definition."""
    parts = [word]
    parts += [word[:i] for i in range(1, len(word))] + [word[i:] for i in range(1, len(word))]
    counts = Counter(p for part in parts for p in lsh._pieces.encode_batch([part])[0])
    weights = {}
    for p, count in counts.items():
        piece = lsh._pieces._processor.id_to_piece(p)
        length = 1 if re.fullmatch("<0x..>", piece) else len(piece.replace("▁", ""))
        if length:
            weights[p] = count / max(len(word) + 1 - length, 1)
    return weights


def test_lsh_is_its_definition(lsh):
    N = 1009
    ring = np.random.RandomState(42).normal(0, 1, N)
    signs = np.where(np.arange(N) < N / 2, 1, -1)
    bits, buckets = [], []
    for word in WORDS:
        weights = by_the_word(lsh, word)
        drawn = {p: np.random.RandomState(p).normal(0, 1, 128) for p in weights}
        bits.append(sum(w * drawn[p] for p, w in weights.items()) > 0)
        scores = sum(w * ring[(p + np.arange(N)) % N] for p, w in weights.items())
        buckets.append(int((signs * scores).argmax()))
    found = np.unpackbits(lsh.signatures(WORDS), axis=1)
    np.testing.assert_array_equal(found, np.array(bits))
    assert lsh.buckets(WORDS, N).tolist() == buckets
    for family in (lsh, MD()):
        assert family.signatures([]).shape == (0, 16)
        assert family.buckets([], 7).shape == (0,)
    # What is hashed together makes no difference.
    np.testing.assert_array_equal(lsh.signatures(WORDS[3:4]), lsh.signatures(WORDS)[3:4])


def test_a_word_without_end_is_looked_at_from_its_beginning(lsh):
    long = "abc" * 20_000
    np.testing.assert_array_equal(lsh.signatures([long]), lsh.signatures([long[:256]]))
    assert lsh.buckets([long], 1009) == lsh.buckets([long[:256]], 1009)
    assert (MD().signatures([long]) != MD().signatures([long[:256]])).any()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't STOP!", ["don", "'", "t", "stop", "!"]),
        ("a_b @-@ 3.5", ["a_b", "@-@", "3", ".", "5"]),
        ("(<unk>) <UNK>s unk <unk", ["(", "<unk>", ")", "<unk>", "s", "unk", "<", "unk"]),
        (" \t\n", []),
        ("naïve 日本語。", ["naïve", "日本語", "。"]),
    ],
)
def test_split(text, words):
    assert split(text) == words
    assert [text[a:b].lower() for a, b in offsets(text)] == words


def test_places_where_lower_case_is_longer():
    text = "İİ dog İs"
    assert len(text.lower()) > len(text)
    # The dots above are marks of their own.
    assert "dog" in [text[a:b] for a, b in offsets(text)]
    assert offsets(text)[-1].tolist() == [8, 9]
    assert offsets(text).max() == len(text)
