"""Batches of labelled examples, their predictions, and misspelt words."""

import dataclasses
import random

import numpy as np
import pytest
from labelled_files import write
from text_for_tests import experiment

from mhe_jax.config import EvaluationConfig, TrainConfig
from mhe_jax.data import batches as all_batches
from mhe_jax.tasks import evaluation_batches, resolve, train_batches
from mhe_jax.tasks.labelled import rows as labelled_rows
from mhe_jax.tasks.labelled.examples import misspell
from mhe_jax.tasks.labelled.table import TABLE

ROWS = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("labelled")
    draw = random.Random(0)
    lines = ["text\tlabel"]
    for i in range(100):
        words = " ".join(draw.choices(["der", "hund", "house", "x"], k=draw.randint(0, 12)))
        lines.append(f"{words} {i}\t{'yes' if i % 3 else 'no'}")
    (directory / "a.tsv").write_text("\n".join(lines) + "\n")
    splits = {"train": ("a.tsv",), "validation": ("a.tsv",)}
    config = experiment(directory, "classification", **splits, batch_size=ROWS)
    return resolve(dataclasses.replace(config, evaluation=EvaluationConfig(batch_size=8)))


@pytest.mark.parametrize("dataset", ["rte", "wic", "copa", "squad"])
def test_padding_stands_at_the_end_of_a_row(tmp_path, tokenizer, dataset):
    """The models of all tasks count on it: `right_padded`."""
    first, *_ = write(dataset, tmp_path)
    of = {"dataset": dataset, "train": (first,), "sequence_length": 96, "window_stride": 16}
    config = resolve(experiment(tmp_path, TABLE[dataset].task, **of))
    batches = evaluation_batches(config, tokenizer, "train", batch_size=4)
    for step in range(len(batches)):
        exists = batches.batch(step)["tokens"] != 0
        assert (exists[..., :-1] >= exists[..., 1:]).all()
        assert not exists.all()


def buckets_of(batches):
    *_, told = batches.describe().partition("rows of length ")
    return [int(length) for length in told.partition(";")[0].split(", ")]


def test_an_epoch_has_each_example_once(config, tokenizer):
    batches = train_batches(config, tokenizer)
    assert batches.steps_per_epoch == 17
    assert batches.text == evaluation_batches(config, tokenizer, "validation").text
    epochs = []
    for epoch in range(2):
        found = [batches.batch(epoch * 17 + i) for i in range(17)]
        numbers = np.concatenate([batch["index"] for batch in found])
        assert sorted(numbers.tolist()) == [-1, -1, *range(100)]
        epochs.append(numbers.tolist())
        for batch in found:
            real = batch["index"] >= 0
            assert (batch["weights"] == real).all()
            assert not batch["tokens"][~real].any()
            lengths = (batch["tokens"] != 0).sum(axis=1)
            assert batch["tokens"].shape[1] in buckets_of(batches)
            shorter = [b for b in buckets_of(batches) if b < batch["tokens"].shape[1]]
            assert lengths.max() > max(shorter, default=0)
            # The label goes with the text.
            labels = (batch["index"][real] % 3 > 0).astype(int)
            assert (batch["labels"][real] == labels).all()
    assert epochs[0] != epochs[1]
    again = train_batches(config, tokenizer).batch(20)
    np.testing.assert_array_equal(again["index"], batches.batch(20)["index"])
    other = dataclasses.replace(config, train=TrainConfig(seed=4))
    assert (train_batches(other, tokenizer).batch(0)["index"] != epochs[0][:ROWS]).any()


def epoch_of(batches, epoch=0):
    return [batches.batch(epoch * 17 + i) for i in range(17)]


def test_each_epoch_has_batches_of_its_own(config, tokenizer):
    """Which rows share a batch is drawn, and in which order the batches come."""
    batches = train_batches(config, tokenizer)
    other = train_batches(dataclasses.replace(config, train=TrainConfig(seed=4)), tokenizer)
    found = [epoch_of(batches), epoch_of(batches, 1), epoch_of(other)]
    together = [{frozenset(batch["index"].tolist()) for batch in of} for of in found]
    assert len(together[0] & together[1]) < 9
    assert len(together[0] & together[2]) < 9
    for of in found:
        lengths = [(batch["tokens"] != 0).sum(axis=1).max() for batch in of]
        assert lengths != sorted(lengths)


def test_only_rows_of_a_pool_are_sorted_together(config, tokenizer, monkeypatch):
    """So that batches are nearly random where there are many examples."""
    spreads = []
    for pool in (labelled_rows.POOL, 1):
        monkeypatch.setattr(labelled_rows, "POOL", pool)
        found = epoch_of(train_batches(config, tokenizer))
        lengths = [(batch["tokens"] != 0).sum(axis=1) for batch in found]
        spreads.append(np.mean([np.ptp(of[of > 0]) for of in lengths]))
    assert spreads[1] > 3 * spreads[0]


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_rows_are_no_longer_than_needed(config, tokenizer, kind, monkeypatch):
    """A batch whose longest text is exactly of a bucket's length is in that bucket."""
    for module in (labelled_rows, all_batches):
        monkeypatch.setattr(module, "choose_buckets", lambda *_: (9, 15, 24))
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=1),
        evaluation=EvaluationConfig(batch_size=1),
    )
    if kind == "train":
        batches = train_batches(config, tokenizer)
    else:
        batches = evaluation_batches(config, tokenizer, kind)
    seen = []
    for step in range(100):
        tokens = batches.batch(step)["tokens"][0]
        seen.append((tokens != 0).sum())
        assert len(tokens) == min(bucket for bucket in (9, 15, 24) if bucket >= seen[-1])
    assert {9, 15, 24} <= set(seen)


def test_what_just_fits_is_not_cut(config, tokenizer):
    rows = evaluation_batches(config, tokenizer, "validation").rows
    lengths = [len(tokenizer.encode(example.texts[0])) + 2 for example in rows.examples]
    assert 24 in lengths
    assert rows.num_cut == sum(length > 24 for length in lengths) > 0


def test_outputs_come_back_in_order(config, tokenizer):
    batches = evaluation_batches(config, tokenizer, "validation")
    outputs = []
    for step in range(len(batches)):
        numbers = batches.batch(step)["index"]
        right = (numbers % 3 > 0).astype(int)
        right = np.where(numbers == 50, 1 - right, right)  # one mistake
        outputs.append((numbers, np.eye(2)[right] - 9.0 * (numbers < 0)[:, None]))
    random.Random(0).shuffle(outputs)
    scores = batches.rows.scores(outputs)
    assert scores["accuracy"] == scores["score"] == pytest.approx(99.0)
    (text,) = batches.rows.files(outputs).values()
    lines = text.splitlines()
    assert lines[0] == "index\tprediction"
    expected = ["yes" if i % 3 else "no" for i in range(100)]
    expected[50] = "no"
    assert lines[1:] == [f"{i}\t{name}" for i, name in enumerate(expected)]


# Of the test files, for the predictions below.
PREDICTIONS = {
    "cola": "101",
    "mnli": ["neutral", "entailment", "neutral"],
    "stsb": ["7.000", "-3.000", "2.500"],
    "copa": "101",
    "multirc": "101",
    "wsc": ["true", "false", "true"],
}


@pytest.mark.parametrize("dataset", PREDICTIONS)
def test_files_of_predictions(tokenizer, tmp_path, dataset):
    train, _, test = write(dataset, tmp_path)
    task = TABLE[dataset].task
    fields = {"train": (train,), "test": (test,), "dataset": dataset, "sequence_length": 200}
    given = resolve(experiment(tmp_path, task, **fields))
    batches = evaluation_batches(given, tokenizer, "test")
    assert batches.rows.num_unlabelled == 3
    of_each = np.array([7, -3, 2.5]) if task == "regression" else np.eye(3)[[1, 0, 1]]
    numbers = [batches.batch(step)["index"] for step in range(len(batches))]
    found = batches.rows.files([(of, of_each[of]) for of in numbers])
    names = [str(example.index) for example in batches.rows.examples]
    lines = zip(["index", *names], ["prediction", *PREDICTIONS[dataset]], strict=True)
    assert found == {"predictions.tsv": "".join(f"{a}\t{b}\n" for a, b in lines)}


# Misspelt words

TEXT = "The quick brown fox, aa 42 jumps over a lazy dog. " * 400


def misspelt(rate, seed=0):
    return misspell(TEXT, rate, np.random.default_rng(seed))


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_as_many_words_as_asked_for(rate):
    pairs = list(zip(TEXT.split(" "), misspelt(rate).split(" "), strict=True))
    words = [(a, b) for a, b in pairs if sum(c.isalpha() for c in a) > 1]
    assert np.mean([a != b for a, b in words]) == pytest.approx(rate, abs=0.02)
    # What is no word stays, and what stands at one too.
    assert all(a == b for a, b in pairs if sum(c.isalpha() for c in a) < 2)
    assert {len(b) - len(a) for a, b in words} == ({-1, 0, 1} if rate else {0})
    for a, b in words:
        assert (a[-1] in ",.") == (b[-1] in ",.")
        # One slip: all but one letter, or two neighbours exchanged.
        same = next((i for i, (c, d) in enumerate(zip(a, b, strict=False)) if c != d), len(b))
        ends = {a[same:], a[same + 1 :], a[same + 2 :]}
        assert a == b or any(b.endswith(end) for end in ends)


def test_what_is_scored_may_be_misspelt(config, tokenizer):
    """Texts of an evaluation alone; its seed decides."""

    def texts(rate, seed=2):
        settings = EvaluationConfig(batch_size=8, spelling_noise=rate, seed=seed)
        given = dataclasses.replace(config, evaluation=settings)
        assert train_batches(given, tokenizer).text == train_batches(config, tokenizer).text
        found = evaluation_batches(given, tokenizer, "validation").rows.examples
        return [example.texts for example in found], [example.label for example in found]

    plain, wrong = texts(0.0), texts(1.0)
    assert plain[1] == wrong[1]
    for (before,), (after,) in zip(plain[0], wrong[0], strict=True):
        misspellable = any(len(word) > 1 and word.isalpha() for word in before.split())
        assert (before != after) == misspellable
    assert texts(1.0) == wrong != texts(1.0, seed=3)
