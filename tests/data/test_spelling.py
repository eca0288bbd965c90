"""Misspelt words: as many as asked for, one slip each, the same for the same seed."""

import numpy as np
import pytest

from mhe_jax.tasks.labelled.spelling import misspell

TEXT = "The quick brown fox, aa 42 jumps over a lazy dog. " * 400


def misspelt(rate, seed=0):
    return misspell(TEXT, rate, np.random.default_rng(seed))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_as_many_words_as_asked_for(rate):
    pairs = list(zip(TEXT.split(" "), misspelt(rate).split(" "), strict=True))
    words = [(a, b) for a, b in pairs if sum(c.isalpha() for c in a) > 1]
    assert np.mean([a != b for a, b in words]) == pytest.approx(rate, abs=0.02)
    # What is no word stays, and what stands at one too.
    assert all(a == b for a, b in pairs if sum(c.isalpha() for c in a) < 2)
    for a, b in words:
        assert abs(len(a) - len(b)) <= 1
        assert (a[-1] in ",.") == (b[-1] in ",.")
        # One slip: all but one letter, or two neighbours exchanged.
        same = next((i for i, (c, d) in enumerate(zip(a, b, strict=False)) if c != d), len(b))
        ends = {a[same:], a[same + 1 :], a[same + 2 :]}
        assert a == b or any(b.endswith(end) for end in ends)


def test_every_slip_happens_and_the_seed_decides():
    lengths = {len(b) - len(a) for a, b in zip(TEXT.split(), misspelt(1.0).split(), strict=True)}
    assert lengths == {-1, 0, 1}
    assert misspelt(0.3) == misspelt(0.3) != misspelt(0.3, seed=1)
