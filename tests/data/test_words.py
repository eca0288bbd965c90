"""Hashed words as a tokenizer, rows of them, and what `shuffle_random` does to rows."""

import dataclasses

import numpy as np
import pytest
from labelled_files import write
from text_for_tests import equal, experiment, joined, sentences, write_lines

from mhe_jax import tasks
from mhe_jax.config import Config, ModelConfig
from mhe_jax.data import BOS, EOS, PAD, UNK, HashedWords, Pieces
from mhe_jax.data.examples import begun
from mhe_jax.data.words import WORD
from mhe_jax.hashformers import LSH, MD
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.tasks.metrics import roc_auc
from mhe_jax.tasks.running_text import shuffle_random_row

FAMILIES = ("md", "lsh")


@pytest.fixture(scope="module")
def pieces(tokenizer):
    return Pieces(tokenizer.model)


@pytest.fixture
def hashed(pieces):
    """`hashed(hashing)`: new words of that kind."""

    def make(hashing):
        config = ModelConfig(hashing=hashing, vocabulary_size=1009)
        return HashedWords(config, pieces if hashing.startswith("lsh") else None)

    return make


def family_of(hashing, pieces):
    return LSH(pieces) if hashing.startswith("lsh") else MD()


@pytest.mark.parametrize("hashing", ["md_proj", "lsh_add"])
def test_signatures_of_a_text(hashing, hashed, pieces):
    words = hashed(hashing)
    # Other words first, so that numbers are not those of the text.
    words.encode_batch(["dog cat tree"])
    (ids,) = words.encode_batch(["Das <unk> haus, das"])
    inputs = words.inputs(np.array([BOS, *ids, EOS, PAD]))
    W = WORD
    assert inputs["tokens"].tolist() == [BOS, W, UNK, W, W, W, EOS, PAD]
    right = family_of(hashing, pieces).signatures(["das", "haus", ",", "das"])
    np.testing.assert_array_equal(inputs["signatures"][[1, 3, 4, 5]], right)
    assert not inputs["signatures"][[0, 2, 6, 7]].any()
    assert inputs["signatures"].dtype == np.uint8


@pytest.mark.parametrize("hashing", ["md_emb", "lsh_emb"])
def test_buckets_of_a_text(hashing, hashed, pieces):
    words = hashed(hashing)
    (ids,) = words.encode_batch(["Das <unk> haus"])
    right = family_of(hashing, pieces).buckets(["das", "haus"], 1004) + 5
    assert ids == [right[0], UNK, right[1]]
    assert set(words.inputs(np.array(ids))) == {"tokens"}


def hash_experiment(directory, hashing, **changes) -> Config:
    config = experiment(directory, "shuffle_random", train=("t.txt",), validation=("t.txt",))
    model = dataclasses.replace(config.model, hashing=hashing, vocabulary_size=1009)
    fields = {"lsh_pieces": 300, **changes}
    return dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, **fields))


@pytest.mark.parametrize("hashing", ["md_emb", "md_proj", "lsh_add"])
def test_a_batch_is_a_function_of_seed_and_step(tmp_path, hashing):
    """Whatever was read before, in whichever process, and whatever numbers words got there."""
    write_lines(tmp_path / "t.txt", [f"{line} <unk> ." for line in sentences(200)])
    config = hash_experiment(tmp_path, hashing)
    tasks.check_sources(config)

    def batches(**process):
        tokenizer = tasks.make_tokenizer(config, tmp_path / "tokenizer.model")
        return tasks.train_batches(config, tokenizer, **process)

    first = batches()
    assert (tmp_path / "tokenizer.model").exists() == hashing.startswith("lsh")
    several = [first.batch(step) for step in range(4)]
    equal(batches().batch(3), several[3])
    parts = [batches(process_index=p, process_count=2).batch(2) for p in range(2)]
    equal(joined(parts), several[2])
    names = {"tokens", "labels", "weights"} | ({"signatures"} if hashing != "md_emb" else set())
    assert set(several[0]) == names
    row = several[0]
    assert (row["tokens"][:, 0] == BOS).all()
    # What is special is never touched and never counts.
    special = row["tokens"] < WORD
    assert not row["weights"][special].any()
    assert row["weights"][~special].all()
    assert not row["labels"][special].any()
    assert (row["tokens"] == UNK).any()


@pytest.fixture(scope="module")
def many(pieces):
    """Positions of 3,000 words, as frequent as in a text, by family: codes and labels.

    Codes are the signatures [n, 16]; of `md_emb` the ids [n, 1].
    """
    generator = np.random.default_rng(0)
    letters = list("etaoinshrdlu")
    vocabulary = ["".join(generator.choice(letters, n)) for n in generator.integers(1, 9, 3000)]
    rates = 1 / (np.arange(3000) + 2.7)
    text = " ".join(generator.choice(vocabulary, 252_000, p=rates / rates.sum()).tolist())
    found = {}
    for hashing in ("md_proj", "lsh_proj", "md_emb"):
        config = ModelConfig(hashing=hashing, vocabulary_size=50265)
        words = HashedWords(config, pieces if hashing.startswith("lsh") else None)
        ids = np.array(words.encode_batch([text])[0])
        rows = []
        for start in range(0, len(ids), 126):
            inputs = words.inputs(begun(ids[start : start + 126], 127))
            draw = np.random.default_rng([1, start])
            rows.append(shuffle_random_row(inputs, 50265, 0.1, draw))
        counts = np.stack([row["weights"] for row in rows]) > 0
        assert counts.sum() == len(ids)
        name = "tokens" if hashing == "md_emb" else "signatures"
        codes = np.stack([row[name] for row in rows])[counts].reshape(len(ids), -1)
        found[hashing] = codes, np.stack([row["labels"] for row in rows])[counts]
    return found


@pytest.mark.parametrize("hashing", ["md_proj", "lsh_proj", "md_emb"])
def test_a_place_by_itself_does_not_tell_what_was_moved(many, hashing):
    """Odds of each word, counted on one half, tell nothing on the other."""
    codes, labels = many[hashing]
    shares = np.bincount(labels) / len(labels)
    np.testing.assert_allclose(shares, [0.81, 0.10, 0.09], atol=0.005)
    codes, labels = codes[labels < 2], labels[labels < 2]
    sums = codes.astype(np.uint64) @ 257 ** np.arange(codes.shape[1], dtype=np.uint64)
    _, words = np.unique(sums, return_inverse=True)  # two words with one sum would do no harm
    half = len(words) // 2
    counts = np.stack(
        [np.bincount(words[:half][labels[:half] == k], minlength=words.max() + 1) for k in (0, 1)]
    )
    share = counts[1].sum() / counts.sum()
    odds = (counts[1] + 10 * share) / (counts[0] + 10 * (1 - share))
    assert abs(roc_auc(labels[half:], odds[words[half:]]) - 0.5) < 0.01


@pytest.mark.parametrize("label", [1, 2])
@pytest.mark.parametrize("hashing", ["md_proj", "lsh_proj"])
def test_the_number_of_ones_tells_no_label(many, hashing, label):
    codes, labels = many[hashing]
    told = (labels == 0) | (labels == label)
    ones = np.unpackbits(codes, axis=1).sum(axis=1)
    assert abs(roc_auc(labels[told] == label, ones[told]) - 0.5) < 0.01


@pytest.mark.parametrize("name", ["tokens", "signatures"])
def test_an_equal_replacement_keeps_its_label(name):
    """Words that are all the same cannot be moved; random ones are other than they were."""
    tokens = begun(np.full(40, WORD), 43)
    signatures = np.where(tokens[:, None] == WORD, 0xA3, 0).repeat(16, 1).astype(np.uint8)
    inputs = {"tokens": tokens} | ({"signatures": signatures} if name == "signatures" else {})
    row = shuffle_random_row(inputs, 1000, 0.4, np.random.default_rng(0))
    changed = (row[name] != inputs[name]).reshape(43, -1).any(axis=1)
    np.testing.assert_array_equal(row["labels"], np.where(changed, 2, 0))
    assert changed.any()
    assert row["weights"].sum() == 40


def test_moved_words_come_from_the_row():
    ids = np.arange(100, 160)
    row = shuffle_random_row({"tokens": begun(ids, 64)}, 10_000, 0.3, np.random.default_rng(2))
    moved = row["labels"] == 1
    assert 5 < moved.sum() < 30
    assert set(row["tokens"][moved]) <= set(ids.tolist())
    assert (row["tokens"] != begun(ids, 64))[moved].all()
    np.testing.assert_array_equal(
        row["tokens"][row["labels"] == 0], begun(ids, 64)[row["labels"] == 0]
    )
    # A row without ordinary tokens, such as padding.
    nothing = shuffle_random_row({"tokens": begun([], 8)}, 100, 0.3, np.random.default_rng(2))
    assert not nothing["weights"].any()


@pytest.mark.parametrize("dataset", ["cola", "wic", "copa", "squad"])
def test_labelled_rows(tmp_path, dataset):
    """Texts, pairs, choices and windows of hashed words; between two texts stand two eos."""
    first, second, _ = write(dataset, tmp_path)
    fields = {"question_length": 20, "window_stride": 10, "batch_size": 2, "sequence_length": 60}
    fields |= {"dataset": dataset, "train": (first,), "validation": (second,)}
    config = experiment(tmp_path, TABLE[dataset].task, **fields)
    model = dataclasses.replace(config.model, hashing="md_proj", max_length=60)
    config = dataclasses.replace(config, model=model)
    tokenizer = tasks.make_tokenizer(config, tmp_path / "tokenizer.model")
    batch = tasks.evaluation_batches(config, tokenizer, "validation").batch(0)
    tokens, types = batch["tokens"], batch["token_types"]
    assert batch["signatures"].shape == (*tokens.shape, 16)
    assert (batch["signatures"].any(axis=-1) == (tokens == WORD)).all()
    texts = 1 if dataset == "cola" else 3
    assert ((tokens == EOS).sum(axis=-1)[tokens.any(axis=-1)] == texts).all()
    if texts == 3:
        # The second eos begins the second text.
        begins = (types == 1).argmax(axis=-1)
        both = np.stack([begins - 1, begins], axis=-1)
        rows = (types == 1).any(axis=-1)
        assert (np.take_along_axis(tokens, both, axis=-1)[rows] == EOS).all()
    if dataset == "wic":
        assert (tokens[batch["marks"] > 0] == WORD).all()
        assert (batch["marks"] > 0).any()
