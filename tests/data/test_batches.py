"""A global batch depends on seed and step only; nothing is lost, and little is repeated."""

import dataclasses
import itertools
import threading
import time
from collections import Counter

import numpy as np
import pytest
from text_for_tests import REAL_DATA, equal, experiment, joined, sentences, with_seed, write_lines

from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import set_field
from mhe_jax.data import (
    BOS,
    EOS,
    PAD,
    BatchIterator,
)
from mhe_jax.data.pairs import choose_buckets, token_lengths
from mhe_jax.tasks import check_sources, evaluation_batches, make_tokenizer, train_batches

TASKS = ("mlm", "lm", "translation")
MULTI30K = REAL_DATA / "multi30k-en-de" / "raw"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    pairs = zip(sentences(400), sentences(400, seed=1), strict=True)
    write_lines(path / "train.tsv", ["\t".join(pair) for pair in pairs])
    write_lines(path / "train.txt", sentences(400))
    lines = ["", *sentences(101, seed=2), "", "haus " * 3000 + "hund", ""]
    write_lines(path / "test.txt", lines)
    write_lines(path / "test.tsv", [f"{line}\t{line} x" for line in lines])
    return path


@pytest.fixture(params=TASKS)
def config(request, directory):
    end = "tsv" if request.param == "translation" else "txt"
    return experiment(directory, request.param, train=(f"train.{end}",), test=(f"test.{end}",))


@pytest.mark.parametrize("count", [2, 8])
def test_training_rows_do_not_depend_on_processes(config, tokenizer, count):
    whole = train_batches(config, tokenizer)
    each = [
        train_batches(config, tokenizer, process_index=p, process_count=count) for p in range(count)
    ]
    for step in (0, 1, 5, 57):
        equal(whole.batch(step), joined([batches.batch(step) for batches in each]))


def test_evaluation_rows_do_not_depend_on_processes(config, tokenizer):
    count = 4
    whole = evaluation_batches(config, tokenizer, "test", batch_size=8)
    each = [
        evaluation_batches(
            config, tokenizer, "test", batch_size=8, process_index=p, process_count=count
        )
        for p in range(count)
    ]
    assert {len(batches) for batches in each} == {len(whole)}
    for step in range(len(whole)):
        equal(whole.batch(step), joined([batches.batch(step) for batches in each]))


def test_what_cannot_be_batched_is_refused(config, tokenizer, tmp_path):
    write_lines(tmp_path / "a.tsv", ["haus\t", "\thaus", f"{'haus ' * 50}\thund"])
    unusable = experiment(tmp_path, "translation", train=("a.tsv",))
    with pytest.raises(InputError, match="none of 3 pairs .* 2 have an empty side, 1 are longer"):
        train_batches(unusable, tokenizer)
    with pytest.raises(InputError, match="model.vocabulary_size is 400"):
        train_batches(set_field(config, "model.vocabulary_size", 400), tokenizer)
    with pytest.raises(InputError, match="cannot be split over 3 processes"):
        train_batches(config, tokenizer, process_index=0, process_count=3)


def test_iterating_resumes_exactly(config, tokenizer):
    batches = train_batches(config, tokenizer)
    with batches.iterate() as iterator:
        first = list(itertools.islice(iterator, 12))
    for start in (0, 5, 11):
        with train_batches(config, tokenizer).iterate(start) as iterator:
            for step in range(start, 12):
                batch = next(iterator)
                equal(batch, first[step])
                equal(batch, batches.batch(step))


def test_steps_and_seeds_differ(config, tokenizer):
    name = "source" if config.task == "translation" else "tokens"
    batches = train_batches(config, tokenizer)
    other = train_batches(with_seed(config, 4), tokenizer)
    seen = {batches.batch(step)[name].tobytes() for step in range(40)}
    seen |= {other.batch(step)[name].tobytes() for step in range(40)}
    # A bucket of a few pairs may come round in the same order.
    assert len(seen) == 80 if config.task != "translation" else len(seen) > 70


def test_rows_are_full_and_shaped(config, tokenizer):
    batches = train_batches(config, tokenizer)
    for step in range(60):
        batch = batches.batch(step)
        if config.task != "translation":
            assert batch["tokens"].shape == (8, 24)
            assert (batch["tokens"] != PAD).all()
            assert (batch["tokens"][:, 0] == BOS).all()
            assert batch["weights"].all()
        else:
            length = batch["source"].shape[1]
            assert batch["source"].shape == batch["target"].shape == batch["labels"].shape
            assert length in batches.buckets
            assert (batch["target"][:, 0] == BOS).all()
            assert ((batch["labels"] == EOS).sum(axis=1) == 1).all()
            assert ((batch["source"] == EOS).sum(axis=1) == 1).all()
            np.testing.assert_array_equal(batch["weights"], batch["labels"] != PAD)


@pytest.mark.parametrize("packing", [False, True])
def test_padding_stands_at_the_end_of_a_row(config, tokenizer, packing):
    """The models of all tasks count on it: `right_padded`."""
    data = dataclasses.replace(config.data, packing=packing, length_buckets=())
    config = dataclasses.replace(config, data=data)
    train, test = (
        train_batches(config, tokenizer),
        evaluation_batches(config, tokenizer, "test", batch_size=8),
    )
    found = [train.batch(step) for step in range(20)]
    found += [test.batch(step) for step in range(len(test))]
    padded = 0
    for batch in found:
        for side in {"tokens", "source", "target"} & set(batch):
            exists = batch[side] != PAD
            assert (exists[:, :-1] >= exists[:, 1:]).all()
            padded += (~exists).sum()
    assert padded


def test_each_pair_once_an_epoch(directory, tokenizer):
    config = experiment(directory, "translation", train=("train.tsv",))
    batches = train_batches(config, tokenizer)
    tokens = token_lengths(batches.source, tokenizer, directory / "cache")
    lengths = tokens.max(axis=1) + 1
    usable = np.flatnonzero((lengths <= 24) & (tokens.min(axis=1) > 0))
    assert len(batches.usable) == len(usable)
    assert 0 < batches.usable.num_too_long == (lengths > 24).sum()
    orders = []
    for epoch in range(3):
        numbers = Counter()
        for i in range(batches.steps_per_epoch):
            length, of_batch = batches.pair_numbers(epoch * batches.steps_per_epoch + i)
            assert len(of_batch) == batches.rows[batches.buckets.index(length)]
            assert (lengths[of_batch] <= length).all()
            numbers.update(of_batch.tolist())
        assert sorted(numbers) == usable.tolist()
        repeated = sum(count - 1 for count in numbers.values())
        assert repeated < sum(batches.rows)
        orders.append(tuple(numbers))
    assert (lengths[usable] == 24).any()  # the longest that is used
    assert len(set(orders)) == 3


def test_rows_of_a_translation_batch(directory, tokenizer):
    options = {"train": ("train.tsv",), "length_buckets": (6, 12, 24), "row_multiple": 4}
    for tokens, rows in ((384, (32, 16, 8)), (20, (4, 4, 4))):
        config = experiment(directory, "translation", **options, tokens_per_batch=tokens)
        batches = train_batches(config, tokenizer)
        assert (batches.buckets, batches.rows) == ((6, 12, 24), rows)


@pytest.mark.parametrize("pairs", [10, 12])  # 12 fill three batches of four
def test_what_fills_a_batch_up_are_other_pairs(tmp_path, tokenizer, pairs):
    write_lines(tmp_path / "a.tsv", ["haus\thund"] * pairs)
    options = {"length_buckets": (24,), "tokens_per_batch": 192, "row_multiple": 1}
    config = experiment(tmp_path, "translation", train=("a.tsv",), **options)
    batches = train_batches(config, tokenizer)
    assert (batches.rows, batches.steps_per_epoch) == ((4,), 3)
    numbers = np.concatenate([batches.pair_numbers(step)[1] for step in range(3)])
    counts = np.bincount(numbers, minlength=pairs)
    assert (counts.min(), counts.max()) == (1, 1 + (pairs < 12))


def test_each_pair_is_in_the_shortest_bucket_that_holds_it(directory, tokenizer):
    """One of exactly a bucket's length is in that bucket."""
    buckets = (11, 13, 24)
    config = experiment(
        directory,
        "translation",
        train=("train.tsv",),
        test=("train.tsv",),
        length_buckets=buckets,
        tokens_per_batch=53,
        row_multiple=1,
    )
    batches = train_batches(config, tokenizer)
    lengths = token_lengths(batches.source, tokenizer, directory / "cache").max(axis=1) + 1
    assert set(buckets) <= set(lengths)
    of_pair = {}
    for step in range(batches.steps_per_epoch):
        length, numbers = batches.pair_numbers(step)
        of_pair |= dict.fromkeys(numbers.tolist(), length)
    for number, bucket in of_pair.items():
        assert bucket == min(b for b in buckets if b >= lengths[number])
    found = evaluation_batches(config, tokenizer, "test", batch_size=8)
    buckets = {batch["source"].shape[1] for batch in found}
    assert buckets <= set(lengths.clip(max=40))
    for batch in found:
        for number in batch["index"][batch["index"] >= 0]:
            longest = min(lengths[number], 40)
            assert batch["source"].shape[1] == min(b for b in buckets if b >= longest)


def test_the_order_of_pairs_is_drawn_anew(directory, tokenizer):
    """Of the pairs of a bucket, and of the batches: for each epoch and seed."""
    options = {"train": ("train.tsv",), "length_buckets": (24,), "tokens_per_batch": 192}
    options |= {"row_multiple": 1}
    config = experiment(directory, "translation", **options)
    batches, other = (train_batches(with_seed(config, seed), tokenizer) for seed in (3, 4))
    steps = batches.steps_per_epoch
    first, second, of_seed = (
        np.concatenate([of.pair_numbers(first + step)[1] for step in range(steps)])
        for of, first in ((batches, 0), (batches, steps), (other, 0))
    )
    for one, two in ((first, second), (first, of_seed), (first, np.sort(first))):
        assert (one == two).mean() < 0.05
    # Which pairs share a batch is drawn too, not only the order of batches.
    rows = batches.rows[0]
    together = [{frozenset(x) for x in order.reshape(-1, rows)} for order in (first, second)]
    assert len(together[0] & together[1]) < 3
    options |= {"length_buckets": (16, 20, 24)}
    batches = train_batches(experiment(directory, "translation", **options), tokenizer)
    lengths = [batches.pair_numbers(step)[0] for step in range(batches.steps_per_epoch)]
    assert lengths != sorted(lengths)


def test_rows_of_the_same_text_are_masked_differently(tmp_path, tokenizer):
    """By number and seed, in training; by number alone, in evaluation."""
    # One line is all: each row has the same text.
    write_lines(tmp_path / "a.txt", ["haus hund katze baum auto und oder nicht sehr dog cat " * 2])
    config = experiment(
        tmp_path, "mlm", train=("a.txt",), test=("a.txt",), sequence_length=113, batch_size=7
    )

    def masked(batches, steps):
        found = [batches.batch(step) for step in steps]
        texts = set()
        for batch in found:
            for i, row in enumerate(batch["tokens"].copy()):
                counted = batch["weights"][i] > 0
                row[batch["positions"][i][counted]] = batch["labels"][i][counted]
                texts.add(row.tobytes())
        assert len(texts) == 1
        return [row.tobytes() for batch in found for row in batch["positions"]]

    one, other = (train_batches(with_seed(config, seed), tokenizer) for seed in (3, 4))
    rows = masked(one, range(9))
    assert len(set(rows)) == 63
    assert not set(rows) & set(masked(other, range(9)))
    # Twenty rows of words that are one token each.
    write_lines(tmp_path / "b.txt", ["haus " * 2300])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, test=("b.txt",)))
    batches = evaluation_batches(config, tokenizer, "test", batch_size=4)
    rows = np.concatenate([batch["positions"] for batch in batches][:5])
    assert len({row.tobytes() for row in rows}) == 20


@pytest.mark.parametrize("task", ["mlm", "lm"])
def test_the_order_of_rows_is_drawn_anew(tmp_path, tokenizer, task):
    """Where rows start: in another order for each epoch and seed, and shifted."""
    write_lines(tmp_path / "a.txt", sentences(400))
    config = experiment(tmp_path, task, train=("a.txt",))
    batches, other = (train_batches(with_seed(config, seed), tokenizer) for seed in (3, 4))
    n = batches.num_rows

    def places(batches, epoch):
        return np.array([batches._place(epoch * n + i) for i in range(n)])

    one, two, of_seed = places(batches, 0), places(batches, 1), places(other, 0)
    stride = batches.source.extent / n
    shifts = [found.min() / stride for found in (one, two, of_seed)]
    assert all(0 < shift < 1 for shift in shifts)
    assert len(set(np.round(shifts, 6))) == 3
    orders = [np.argsort(np.argsort(found)) for found in (one, two, of_seed)]
    for a, b in ((0, 1), (0, 2)):
        assert (orders[a] == orders[b]).mean() < 0.05
    assert (orders[0] == np.arange(n)).mean() < 0.05
    for found in (one, two, of_seed):
        np.testing.assert_allclose(np.diff(np.sort(found)), stride)


def test_the_rows_of_steps_follow_each_other(tmp_path, tokenizer):
    write_lines(tmp_path / "a.txt", sentences(97))
    batches = train_batches(experiment(tmp_path, "lm", train=("a.txt",)), tokenizer)
    equal(joined([batches.batch(0), batches.batch(1)]), _stacked(batches.rows(range(16))))


def _stacked(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_buckets_pad_the_least():
    generator = np.random.default_rng(0)
    for _ in range(50):
        longest = int(generator.integers(4, 45))
        lengths = generator.integers(1, longest + 1, int(generator.integers(1, 60)))

        def padded(buckets, lengths=lengths):
            return np.array(buckets)[np.searchsorted(buckets, lengths)].sum()

        found = choose_buckets(lengths, longest)
        edges = range(4, longest, 4)
        all_choices = (c for k in range(6) for c in itertools.combinations(edges, k))
        assert padded(found) == min(padded([*choice, longest]) for choice in all_choices)
        assert len(found) <= 6
        assert found[-1] == longest


@pytest.mark.parametrize("task", [pytest.param("mlm", marks=pytest.mark.rest), "lm"])
def test_training_text_is_that_of_the_file(directory, tokenizer, task):
    """Rows are stretches of the text, and epochs show all of it about equally often."""
    config = experiment(directory, task, train=("train.txt",), sequence_length=80)
    batches = train_batches(config, tokenizer)
    text = [i for line in sentences(400) for i in [*tokenizer.encode(line), EOS]]
    # Stretches of 60 tokens, each of which is there once, and where they begin.
    where = {tuple((text + text)[start : start + 60]): start for start in range(len(text))}
    assert len(where) == len(text)
    seen = np.zeros(len(text))
    epochs = 20
    for step in range(round(epochs * batches.steps_per_epoch)):
        batch = batches.batch(step)
        for i, ids in enumerate(batch["tokens"] if task == "mlm" else batch["labels"]):
            ids = ids.copy()
            if task == "mlm":
                ids[batch["positions"][i]] = batch["labels"][i]
                ids = ids[1:]
            places = (where[tuple(ids[:60])] + np.arange(len(ids))) % len(text)
            np.testing.assert_array_equal(ids, np.array(text)[places])
            seen[places] += 1
    assert abs(seen.mean() / epochs - 1) < 0.05
    assert seen.min() > 0.4 * epochs
    assert seen.max() < 1.8 * epochs


def test_a_file_shorter_than_a_row(tmp_path, tokenizer):
    write_lines(tmp_path / "a.txt", ["haus und", "hund"])
    ids = [*tokenizer.encode("haus und"), EOS, *tokenizer.encode("hund"), EOS]
    row = train_batches(experiment(tmp_path, "lm", train=("a.txt",)), tokenizer).batch(3)
    assert row["labels"][5].tolist() == ids + [PAD] * (24 - len(ids))
    row = train_batches(experiment(tmp_path, "mlm", train=("a.txt",)), tokenizer).batch(3)
    assert (row["tokens"][5] == PAD).sum() == 23 - len(ids)


def test_only_the_end_of_a_long_line_is_an_end(tmp_path, tokenizer):
    """It is read and tokenized in parts, after which no eos stands."""
    write_lines(tmp_path / "a.txt", ["haus und hund " * 700])
    batches = train_batches(
        experiment(tmp_path, "lm", train=("a.txt",), sequence_length=1997), tokenizer
    )
    rows = batches.batch(0)["labels"]
    assert ((rows == EOS).sum(axis=1) <= 1).all()
    assert (rows == EOS).any()


def test_lm_evaluation_covers_each_token_once(directory, tokenizer):
    config = experiment(directory, "lm", train=("train.txt",), test=("test.txt",))
    batches = evaluation_batches(config, tokenizer, "test", batch_size=8)
    text = (directory / "test.txt").read_text().split("\n")[:-1]
    ids = [i for line in text for i in [*tokenizer.encode(line), EOS]]
    labels = np.concatenate([b["labels"].ravel() for b in batches])
    weights = np.concatenate([b["weights"].ravel() for b in batches])
    assert labels[: len(ids)].tolist() == ids
    assert not labels[len(ids) :].any()
    np.testing.assert_array_equal(weights, np.arange(len(labels)) < len(ids))
    assert batches.num_tokens == len(ids) == weights.sum()
    assert batches.num_words == sum(len(line.split()) + 1 for line in text)
    tokens = np.concatenate([b["tokens"] for b in batches])
    assert set(tokens[: len(ids) // 24, 0]) == {BOS}
    assert {len(b["tokens"]) for b in batches} == {8}


def test_words_are_those_of_whole_lines(tmp_path, tokenizer):
    """A line is tokenized in parts, and one without blanks is cut inside its words."""
    lines = ["haus " * 500, "häuser" * 900, "a" * 1023 + " bc", f"{'x' * 2000}\t{'y' * 2000}", ""]
    write_lines(tmp_path / "a.txt", lines)
    config = experiment(tmp_path, "lm", train=("a.txt",), test=("a.txt",))
    batches = evaluation_batches(config, tokenizer, "test", batch_size=8)
    assert batches.num_words == 500 + 1 + 2 + 2 + 0 + len(lines)


def test_mlm_evaluation_has_fixed_masks(directory, tokenizer):
    config = experiment(directory, "mlm", train=("train.txt",), test=("test.txt",))
    one = evaluation_batches(config, tokenizer, "test", batch_size=8)
    other = evaluation_batches(with_seed(config, 9), tokenizer, "test", batch_size=4)
    for name in ("tokens", "labels", "positions", "weights"):
        a = np.concatenate([b[name] for b in one])
        b = np.concatenate([b[name] for b in other])
        rows = min(len(a), len(b))
        np.testing.assert_array_equal(a[:rows], b[:rows])
        assert not a[rows:].any()
    restored = []
    for batch in one:
        for i, row in enumerate(batch["tokens"].copy()):
            wanted = batch["weights"][i] > 0
            row[batch["positions"][i][wanted]] = batch["labels"][i][wanted]
            restored += row[1:].tolist()
    text = (directory / "test.txt").read_text().split("\n")[:-1]
    ids = [i for line in text for i in [*tokenizer.encode(line), EOS]]
    assert restored[: len(ids)] == ids
    assert not any(restored[len(ids) :])


def test_translation_evaluation_covers_each_pair_once(directory, tokenizer):
    config = experiment(directory, "translation", train=("train.tsv",), test=("test.tsv",))
    batches = evaluation_batches(config, tokenizer, "test", batch_size=8)
    found = []
    for batch in batches:
        assert len(batch["source"]) == 8
        for row, number in enumerate(batch["index"]):
            if number < 0:
                assert not any(batch[name][row].any() for name in ("source", "labels", "weights"))
                continue
            found.append(int(number))
            source, target = batches.source[number]
            for name, text in (("source", source), ("labels", target)):
                ids = [*tokenizer.encode(text)[:39], EOS]
                got = batch[name][row]
                assert got[: len(ids)].tolist() == ids
                assert not got[len(ids) :].any()
    assert sorted(found) == list(range(len(batches.source)))
    assert any(len(tokenizer.encode(text)) > 39 for pair in batches.source for text in pair)
    lengths = [batch["source"].shape[1] for batch in batches]
    assert lengths == sorted(lengths)


def test_evaluation_is_finite_and_repeatable(config, tokenizer):
    batches = evaluation_batches(config, tokenizer, "test", batch_size=8)
    first, second = list(batches), list(batches)
    assert len(first) == len(second) == len(batches) > 1
    for one, other in zip(first, second, strict=True):
        equal(one, other)
    with pytest.raises(IndexError):
        batches.batch(len(batches))
    with batches.iterate(1, 3) as some:
        assert len(list(some)) == 2


def test_a_thread_brings_its_error_and_ends():
    before = set(threading.enumerate())

    def batch(step):
        if step == 12:
            raise InputError("a.txt:7: went away")
        return {"tokens": np.full(3, step)}

    with BatchIterator(batch, 5) as iterator:
        assert [next(iterator)["tokens"][0] for _ in range(2)] == [5, 6]
        with pytest.raises(InputError, match="a.txt:7: went away"):
            list(iterator)
    for _ in range(600):
        if not set(threading.enumerate()) - before:
            return
        time.sleep(0.1)
    raise AssertionError("a thread goes on")


@pytest.mark.skipif(not MULTI30K.exists(), reason=f"needs the real data: {MULTI30K}")
def test_multi30k(tmp_path):
    train, validation = (
        tuple(f"{split}.{side}.gz" for side in ("en", "de")) for split in ("train", "val")
    )
    options = {"train": train, "validation": validation, "tokens_per_batch": 4096}
    config = experiment(MULTI30K, "translation", sequence_length=64, **options)
    for name, value in {
        "data.cache_directory": str(tmp_path / "cache"),
        "model.vocabulary_size": 4000,
        "model.max_length": 64,
    }.items():
        config = set_field(config, name, value)
    tokenizer = make_tokenizer(config, tmp_path / "tokenizer.model")
    batches = train_batches(config, tokenizer)
    steps = range(batches.steps_per_epoch)
    numbers = {number for step in steps for number in batches.pair_numbers(step)[1].tolist()}
    usable = batches.usable
    assert len(numbers) == len(usable) == 29_000 - usable.num_too_long - usable.num_empty
    batch = batches.batch(0)
    assert 0.7 * 4096 < batch["source"].size + batch["target"].size <= 4096
    found = evaluation_batches(config, tokenizer, "validation")
    assert sum((batch["index"] >= 0).sum() for batch in found) == 1014


def test_check_sources(directory, tokenizer, tmp_path):
    write_lines(tmp_path / "good.txt", ["haus"])
    (tmp_path / "bad.txt").write_bytes(b"haus\n\xff")
    check_sources(experiment(tmp_path, "lm", train=("good.txt",), test=("bad.txt",)))
    for options in ({"validation": ("bad.txt",)}, {"train": ("bad.txt",)}):
        config = experiment(tmp_path, "lm", **({"train": ("good.txt",)} | options))
        with pytest.raises(InputError, match="bad.txt:2: is not UTF-8"):
            check_sources(config)
    with pytest.raises(InputError, match="data.train is not set"):
        check_sources(Config(task="lm"))
    tsv = experiment(directory, "lm", train=("train.tsv",))
    with pytest.raises(InputError, match=r"train.tsv:1: has several columns"):
        check_sources(tsv)
