"""Batches of labelled examples: each once an epoch, the same for any number of processes."""

import dataclasses
import random

import numpy as np
import pytest
from labelled_files import write

from mhe_jax.config import Config, DataConfig, EvaluationConfig, ModelConfig, TrainConfig
from mhe_jax.data import pairs
from mhe_jax.tasks import evaluation_batches, resolve, train_batches
from mhe_jax.tasks.labelled import batches as labelled_batches
from mhe_jax.tasks.labelled.submission import submission
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
    return resolve(
        Config(
            task="classification",
            model=ModelConfig(vocabulary_size=300),
            data=DataConfig(
                directory=str(directory),
                train=("a.tsv",),
                validation=("a.tsv",),
                sequence_length=24,
                batch_size=ROWS,
                cache_directory=str(directory / "cache"),
            ),
            train=TrainConfig(seed=3),
            evaluation=EvaluationConfig(batch_size=8),
        )
    )


@pytest.mark.parametrize("dataset", ["rte", "wic", "copa", "squad"])
def test_padding_stands_at_the_end_of_a_row(tmp_path, tokenizer, dataset):
    """The models of all tasks count on it: `right_padded`."""
    first, *_ = write(dataset, tmp_path)
    data = DataConfig(
        directory=str(tmp_path),
        dataset=dataset,
        train=(first,),
        sequence_length=96,
        window_stride=16,
        cache_directory=str(tmp_path / "cache"),
    )
    model = ModelConfig(vocabulary_size=tokenizer.vocabulary_size, max_length=96)
    config = resolve(Config(task=TABLE[dataset].task, model=model, data=data))
    batches = evaluation_batches(config, tokenizer, "train", batch_size=4)
    for step in range(len(batches)):
        exists = batches.batch(step)["tokens"] != 0
        assert (exists[..., :-1] >= exists[..., 1:]).all()
        assert not exists.all()


def test_the_key_of_a_split_is_that_of_its_examples(config, tokenizer):
    """A run goes on only if neither of its splits has another."""
    given = train_batches(config, tokenizer).text
    assert evaluation_batches(config, tokenizer, "validation").text == given


def test_an_epoch_has_each_example_once(config, tokenizer):
    batches = train_batches(config, tokenizer)
    assert batches.steps_per_epoch == 17
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
            assert batch["tokens"].shape[1] in batches.buckets
            shorter = [b for b in batches.buckets if b < batch["tokens"].shape[1]]
            assert lengths.max() > max(shorter, default=0)
            # The label goes with the text.
            labels = (batch["index"][real] % 3 > 0).astype(int)
            assert (batch["labels"][real] == labels).all()
    assert epochs[0] != epochs[1]
    again = train_batches(config, tokenizer).batch(20)
    np.testing.assert_array_equal(again["index"], batches.batch(20)["index"])
    other = dataclasses.replace(config, train=TrainConfig(seed=4))
    assert (train_batches(other, tokenizer).batch(0)["index"] != epochs[0][:ROWS]).any()


def test_batches_hold_texts_of_similar_length(config, tokenizer):
    batches = train_batches(config, tokenizer)
    tokens = padded = 0
    for step in range(17):
        batch = batches.batch(step)["tokens"]
        tokens, padded = tokens + (batch != 0).sum(), padded + batch.size
    assert tokens / padded > 0.8


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

    def spread():
        lengths = [(batch["tokens"] != 0).sum(axis=1) for batch in epoch_of(make())]
        return np.mean([of[of > 0].max() - of[of > 0].min() for of in lengths])

    def make():
        return train_batches(config, tokenizer)

    whole = spread()
    monkeypatch.setattr(labelled_batches, "POOL", 1)
    assert spread() > 3 * whole


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_rows_are_no_longer_than_needed(config, tokenizer, kind, monkeypatch):
    """A batch whose longest text is exactly of a bucket's length is in that bucket."""
    for module in (labelled_batches, pairs):
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


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_processes_split_the_rows(config, tokenizer, kind):
    def make(i=0, n=1):
        if kind == "train":
            return train_batches(config, tokenizer, process_index=i, process_count=n)
        return evaluation_batches(config, tokenizer, kind, process_index=i, process_count=n)

    whole, parts = make(), [make(i, 2) for i in range(2)]
    for step in (0, 5, 11):
        batch = whole.batch(step)
        for i, part in enumerate(parts):
            for name, array in part.batch(step).items():
                np.testing.assert_array_equal(array, np.split(batch[name], 2)[i])


def test_outputs_come_back_in_order(config, tokenizer):
    batches = evaluation_batches(config, tokenizer, "validation")
    outputs = []
    for step in range(len(batches)):
        numbers = batches.batch(step)["index"]
        right = (numbers % 3 > 0).astype(int)
        right = np.where(numbers == 50, 1 - right, right)  # one mistake
        outputs.append((numbers, np.eye(2)[right] - 9.0 * (numbers < 0)[:, None]))
    random.Random(0).shuffle(outputs)
    scores = batches.scores(outputs)
    assert scores["accuracy"] == scores["score"] == pytest.approx(99.0)
    (text,) = submission(config, batches, outputs).values()
    lines = text.splitlines()
    assert lines[0] == "index\tprediction"
    expected = ["yes" if i % 3 else "no" for i in range(100)]
    expected[50] = "no"
    assert lines[1:] == [f"{i}\t{name}" for i, name in enumerate(expected)]


def glue(*labels):
    return "".join(["index\tprediction\n", *(f"{i}\t{name}\n" for i, name in enumerate(labels))])


def superglue(*labels):
    return "".join(f'{{"idx": {i}, "label": {name}}}\n' for i, name in enumerate(labels))


# What the suites take, of the test files, for the predictions below.
SUBMISSIONS = {
    "cola": glue(1, 0, 1),
    "mnli": glue("neutral", "entailment", "neutral"),
    "qqp": glue(1, 0, 1),
    "stsb": glue("5.000", "0.000", "2.500"),
    "boolq": superglue('"true"', '"false"', '"true"'),
    "cb": superglue('"contradiction"', '"entailment"', '"contradiction"'),
    "copa": superglue(1, 0, 1),
    "multirc": '{"idx": 2, "passage": {"questions": ['
    '{"idx": 4, "answers": [{"idx": 9, "label": 1}, {"idx": 10, "label": 0}]}, '
    '{"idx": 5, "answers": [{"idx": 11, "label": 1}]}]}}\n',
    "wic": superglue('"true"', '"false"', '"true"'),
    "wsc": superglue('"True"', '"False"', '"True"'),
}


@pytest.mark.parametrize("dataset", SUBMISSIONS)
def test_submissions(config, tokenizer, tmp_path, dataset):
    from mhe_jax.tasks.labelled.table import TABLE

    train, dev, test = write(dataset, tmp_path)
    data = dataclasses.replace(
        config.data,
        directory=str(tmp_path),
        dataset=dataset,
        labels=(),
        train=(train,),
        validation=(dev,),
        test=(test,),
        sequence_length=200,
    )
    task = TABLE[dataset].task
    given = resolve(dataclasses.replace(config, task=task, data=data, model=ModelConfig(300)))
    batches = evaluation_batches(given, tokenizer, "test")
    assert not batches.labelled
    outputs = []
    for step in range(len(batches)):
        numbers = batches.batch(step)["index"]
        # 1, 0, 1 as classes; 7, -3 and 2.5 as numbers.
        scores = np.eye(3)[[1, 0, 1]][numbers]
        outputs.append(
            (numbers, np.array([7, -3, 2.5])[numbers] if task == "regression" else scores)
        )
    ((name, text),) = submission(given, batches, outputs).items()
    assert text == SUBMISSIONS[dataset]
    assert name == f"predictions.{'tsv' if text.startswith('index') else 'jsonl'}"
