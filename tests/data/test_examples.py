"""Masks follow their law, labels give the text back, special tokens stay out."""

import numpy as np
import pytest

from mhe_jax.data import BOS, EOS, MASK, NUM_SPECIAL, PAD
from mhe_jax.data.examples import lm_row, mlm_row, num_predictions, translation_row

T, V = 64, 211


def rows(count, ids=None, rate=0.15):
    for i in range(count):
        generator = np.random.default_rng([7, i])
        given = generator.integers(NUM_SPECIAL, V, T - 1) if ids is None else ids
        original = np.full(T, PAD)
        original[: len(given) + 1] = [BOS, *given]
        yield original, mlm_row(given, T, V, rate, generator)


def test_masks_80_10_10():
    masked = random = kept = 0
    places = np.zeros(T)
    for original, row in rows(4000):
        chosen = row["positions"]
        places[chosen] += 1
        seen, truth = row["tokens"][chosen], original[chosen]
        masked += (seen == MASK).sum()
        kept += (seen == truth).sum()
        random += ((seen != MASK) & (seen != truth)).sum()
    total = masked + random + kept
    assert total == 4000 * round(0.15 * (T - 1))
    # Five standard deviations; a random piece is the original once in V - NUM_SPECIAL.
    same = 0.1 / (V - NUM_SPECIAL)
    for count, share in ((masked, 0.8), (random, 0.1 - same), (kept, 0.1 + same)):
        assert abs(count / total - share) < 5 * np.sqrt(share * (1 - share) / total)
    # Places are drawn evenly, but for bos.
    assert places[0] == 0
    share = places[1:] / total
    assert np.abs(share - 1 / (T - 1)).max() < 5 * np.sqrt(1 / (T - 1) / total)


def test_random_tokens_are_any_but_special_ones():
    """Each ordinary token comes, the first and the last too, and each by itself."""
    seen, pairs = set(), []
    for original, row in rows(4000):
        tokens = row["tokens"][row["positions"]]
        random = tokens[(tokens != MASK) & (tokens != original[row["positions"]])]
        seen |= set(random.tolist())
        pairs += [random[0] == random[1]] if len(random) > 1 else []
    assert seen == set(range(NUM_SPECIAL, V))
    assert len(pairs) > 300
    assert np.mean(pairs) < 0.05


def test_labels_recover_the_text():
    for original, row in rows(200):
        tokens = row["tokens"].copy()
        tokens[row["positions"]] = row["labels"]
        np.testing.assert_array_equal(tokens, original)
        assert row["weights"].all()
        assert (np.diff(row["positions"]) > 0).all()


def test_special_tokens_are_left_alone():
    ids = [EOS, 9, EOS, EOS, 10, EOS]
    for original, row in rows(300, ids, 0.5):
        tokens, positions = row["tokens"], row["positions"][row["weights"] > 0]
        assert set(positions) <= {2, 5}
        assert len(positions) == 1
        assert set(tokens[[0, 1, 3, 4, 6]]) == {BOS, EOS}
        assert set(tokens[7:]) == {PAD}
        changed = tokens[positions[0]]
        assert changed == MASK or NUM_SPECIAL <= changed < V
        assert (row["weights"] == (np.arange(len(row["weights"])) < 1)).all()
        tokens[positions] = row["labels"][:1]
        np.testing.assert_array_equal(tokens, original)


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.5, 0.99])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 63])
def test_shapes_are_static(rate, length):
    """One mask at least, and none without ordinary tokens."""
    ((_, row),) = rows(1, [*range(5, 5 + length)] or [EOS, EOS], rate)
    assert row["tokens"].shape == (T,)
    for name in ("positions", "labels", "weights"):
        assert row[name].shape == (num_predictions(T, rate),)
    assert row["weights"].sum() == max(length > 0, round(rate * length))
    assert {row[name].dtype.name for name in ("tokens", "positions", "labels")} == {"int32"}
    assert row["weights"].dtype == np.float32


def test_lm_row():
    row = lm_row([7, 8, 9], 5)
    assert row["tokens"].tolist() == [BOS, 7, 8, PAD, PAD]
    assert row["labels"].tolist() == [7, 8, 9, PAD, PAD]
    assert row["weights"].tolist() == [1, 1, 1, 0, 0]
    assert lm_row([7, 8, 9], 3)["labels"].tolist() == [7, 8, 9]


def test_translation_row():
    row = translation_row([7, 8, EOS], [9, 10, 11, EOS], 4)
    assert row["source"].tolist() == [7, 8, EOS, PAD]
    assert row["target"].tolist() == [BOS, 9, 10, 11]
    assert row["labels"].tolist() == [9, 10, 11, EOS]
    assert row["weights"].tolist() == [1, 1, 1, 1]
    cut = translation_row([7, 8, 9, EOS], [9, 10, 11, EOS], 2)
    assert cut["source"].tolist() == [7, EOS]
    assert cut["labels"].tolist() == [9, EOS]
    empty = translation_row([EOS], [EOS], 2)
    assert empty["source"].tolist() == [EOS, PAD]
    assert empty["weights"].tolist() == [1, 0]
