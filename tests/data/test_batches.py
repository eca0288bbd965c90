"""A global batch depends on seed and step only; nothing is lost, and little is repeated."""

import dataclasses
import itertools
import threading
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
from text_for_tests import equal, experiment, joined, sentences, with_seed, write_lines

from mhe_jax.config import DataConfig, InputError
from mhe_jax.config.rules import check
from mhe_jax.data import BOS, EOS, MASK, PAD, open_source
from mhe_jax.data.batches import choose_buckets
from mhe_jax.tasks import evaluation_batches, train_batches

TASKS = ("mlm", "lm", "translation")
PAIRED = [("mlm", False), ("lm", True), ("translation", False)]


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


@pytest.fixture(params=[(task, packing) for task in TASKS for packing in (False, True)], ids=str)
def config(request, directory):
    task, packing = request.param
    end = "tsv" if task == "translation" else "txt"
    files = {"train": (f"train.{end}",), "test": (f"test.{end}",)}
    return experiment(directory, task, packing=packing, **files)


def of_each(make, config, tokenizer, *split, count, **options):
    """The batches of each of so many processes."""
    return [
        make(config, tokenizer, *split, process_index=p, process_count=count, **options)
        for p in range(count)
    ]


@pytest.mark.parametrize("count", [2, 8])
def test_training_rows_do_not_depend_on_processes(config, tokenizer, count):
    whole = train_batches(config, tokenizer)
    each = of_each(train_batches, config, tokenizer, count=count)
    for step in (0, 1, 5, 57):
        equal(whole.batch(step), joined([batches.batch(step) for batches in each]))


def test_evaluation_is_finite_and_the_same_each_time(config, tokenizer):
    """In all numbers of processes."""
    whole = evaluation_batches(config, tokenizer, "test", batch_size=8)
    each = of_each(evaluation_batches, config, tokenizer, "test", count=4, batch_size=8)
    found = list(whole)
    assert {len(batches) for batches in each} == {len(whole)} == {len(found)}
    assert len(whole) > 1
    for step, batch in enumerate(whole):
        equal(batch, found[step])
        equal(batch, joined([batches.batch(step) for batches in each]))
    with whole.iterate(1, 3) as some:
        assert len(list(some)) == 2


def test_what_cannot_be_batched_is_refused(config, tokenizer, tmp_path):
    write_lines(tmp_path / "a.tsv", ["haus\t", "\thaus", f"{'haus ' * 50}\thund"])
    unusable = experiment(tmp_path, "translation", train=("a.tsv",))
    with pytest.raises(
        InputError,
        match="a.tsv.* 0 of them used .1 too long, 2 with an empty side.*sequence_length is 24",
    ):
        train_batches(unusable, tokenizer)

    with pytest.raises(InputError, match="cannot be split over 3 processes"):
        [*map(train_batches(config, tokenizer, process_count=3).batch, range(20))]


def test_iterating_resumes_exactly(config, tokenizer):
    batches = train_batches(config, tokenizer)
    for start in (0, 5, 11):
        with train_batches(config, tokenizer).iterate(start) as iterator:
            for step in range(start, 12):
                equal(next(iterator), batches.batch(step))


def test_steps_and_seeds_differ(config, tokenizer):
    name = "source" if config.task == "translation" else "tokens"
    batches = train_batches(config, tokenizer)
    other = train_batches(with_seed(config, 4), tokenizer)
    seen = {batches.batch(step)[name].tobytes() for step in range(40)}
    seen |= {other.batch(step)[name].tobytes() for step in range(40)}
    assert len(seen) > 70  # a bucket of a few pairs may come round in the same order


def test_padding_stands_at_the_end_of_a_row(config, tokenizer):
    """The models of all tasks count on it: `right_padded`."""
    train = train_batches(config, tokenizer)
    found = [train.batch(step) for step in range(20)]
    found += evaluation_batches(config, tokenizer, "test", batch_size=8)
    padded = 0
    for batch in found:
        for side in {"tokens", "source", "target"} & set(batch):
            exists = batch[side] != PAD
            assert (exists[:, :-1] >= exists[:, 1:]).all()
            padded += (~exists).sum()
    assert padded


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


def epoch_of(batches, number=0):
    """All batches of an epoch of a whole number of steps."""
    steps = int(batches.steps_per_epoch)
    assert steps == batches.steps_per_epoch
    return [batches.batch(number * steps + i) for i in range(steps)]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("task", ["mlm", "lm"])
def test_each_token_once_an_epoch(tmp_path, tokenizer, task, count):
    """Rows are stretches of the text, which goes round; where they are cut is drawn anew."""
    write_lines(tmp_path / "a.txt", sentences(100))
    text = [i for line in sentences(100) for i in [*tokenizer.encode(line), EOS]]
    size = 4
    config = experiment(tmp_path, task, train=("a.txt",), batch_size=size)
    each = of_each(train_batches, config, tokenizer, count=count)
    rows, starts = round(each[0].steps_per_epoch * size), []
    known = defaultdict(lambda: defaultdict(list))
    for length in {24 - (task == "mlm"), len(text) % (24 - (task == "mlm"))}:
        for start in range(len(text)):
            known[length][tuple((text + text)[start : start + length])].append(start)
    steps = range(-(-3 * rows // size))
    batches = [joined([of.batch(step) for of in each]) for step in steps]
    batch = joined(batches)
    for epoch in range(3):
        found = []
        for i in range(epoch * rows, (epoch + 1) * rows):
            ids = (batch["tokens"] if task == "mlm" else batch["labels"])[i].copy()
            if task == "mlm":
                counted = batch["weights"][i] > 0
                ids[batch["positions"][i][counted]] = batch["labels"][i][counted]
                ids = ids[1:]
            found.append(tuple(ids[ids != PAD].tolist()))
        assert Counter(i for row in found for i in row) == Counter(text)
        # Where each row stands, as far as that is known: all are the parts of one cut.
        assert all(row in known[len(row)] for row in found)
        where = {p[0]: len(row) for row in found if len(p := known[len(row)][row]) == 1}
        starts.append(tuple(where))
        taken = sorted(where)
        assert all(a + where[a] <= b for a, b in itertools.pairwise(taken))
        assert len(where) > 0.9 * rows
    assert len({frozenset(of) for of in starts}) == 3  # cut elsewhere
    assert starts[0] != tuple(sorted(starts[0]))  # in another order than in the text


@pytest.fixture(scope="module")
def pairs(directory):
    return list(open_source(["train.tsv"], "pair", DataConfig(directory=str(directory))))


def translation(directory, **options):
    return experiment(directory, "translation", **{"train": ("train.tsv",)} | options)


def lengths_of(tokenizer, pairs):
    """Tokens of the longer side of each pair, with eos; 0 where a side is empty."""
    sides = [[len(tokenizer.encode(text)) + 1 for text in pair] for pair in pairs]
    return np.array([max(both) if min(both) > 1 else 0 for both in sides])


def test_each_pair_once_an_epoch(directory, pairs, tokenizer):
    batches = train_batches(translation(directory), tokenizer)
    lengths = lengths_of(tokenizer, pairs)
    usable = np.flatnonzero((lengths > 0) & (lengths <= 24))
    too_long, empty = (lengths > 24).sum(), (lengths == 0).sum()
    assert too_long > 0
    said = f"{len(usable)} of them used ({too_long} too long, {empty} with an empty side)"
    assert said in batches.describe()
    orders = []
    for epoch in range(3):
        numbers, steps = Counter(), range(int(batches.steps_per_epoch))
        for step in steps:
            planned = batches.plan[epoch * len(steps) + step].numbers
            length = batches.batch(epoch * len(steps) + step)["source"].shape[1]
            assert (lengths[planned] <= length).all()
            numbers.update(planned.tolist())
        assert sorted(numbers) == usable.tolist()
        assert sum(numbers.values()) - len(numbers) < 6 * 48
        orders.append(tuple(numbers))
    assert (lengths[usable] == 24).any()  # the longest that is used
    assert len(set(orders)) == 3


def test_rows_of_a_translation_batch(directory, tokenizer):
    options = {"length_buckets": (6, 12, 24), "row_multiple": 4}
    for tokens, rows in ((384, {6: 32, 12: 16, 24: 8}), (20, {6: 4, 12: 4, 24: 4})):
        config = translation(directory, **options, tokens_per_batch=tokens)
        shapes = {batch["source"].shape for batch in epoch_of(train_batches(config, tokenizer))}
        assert shapes == {(count, length) for length, count in rows.items()}


@pytest.mark.parametrize("count", [10, 12])  # 12 fill three batches of four
def test_what_fills_a_batch_up_are_other_pairs(tmp_path, tokenizer, count):
    write_lines(tmp_path / "a.tsv", ["haus\thund"] * count)
    options = {"length_buckets": (24,), "tokens_per_batch": 192, "row_multiple": 1}
    batches = train_batches(translation(tmp_path, train=("a.tsv",), **options), tokenizer)
    assert batches.steps_per_epoch == 3
    numbers = np.concatenate([batches.plan[step].numbers for step in range(3)])
    counts = np.bincount(numbers, minlength=count)
    assert (counts.min(), counts.max()) == (1, 1 + (count < 12))


def test_each_pair_is_in_the_shortest_bucket_that_holds_it(directory, pairs, tokenizer):
    """One of exactly a bucket's length is in that bucket."""
    buckets = (11, 13, 24)
    options = {"length_buckets": buckets, "tokens_per_batch": 53, "row_multiple": 1}
    config = translation(directory, test=("train.tsv",), **options)
    batches, lengths = train_batches(config, tokenizer), lengths_of(tokenizer, pairs)
    assert {*buckets} <= {*lengths.tolist()}
    for step, batch in enumerate(epoch_of(batches)):
        for number in batches.plan[step].numbers:
            assert batch["source"].shape[1] == min(b for b in buckets if b >= lengths[number])
    found = evaluation_batches(config, tokenizer, "test", batch_size=8)
    buckets = {batch["source"].shape[1] for batch in found}
    longest = np.array([max(len(tokenizer.encode(t)) + 1 for t in pair) for pair in pairs])
    for batch in found:
        for number in batch["index"][batch["index"] >= 0]:
            fits = min(b for b in buckets if b >= min(longest[number], 40))
            assert batch["source"].shape[1] == fits


def test_the_order_of_pairs_is_drawn_anew(directory, tokenizer):
    """Of the pairs of a bucket, and of the batches: for each epoch and seed."""
    options = {"length_buckets": (24,), "tokens_per_batch": 192, "row_multiple": 1}
    config = translation(directory, **options)
    batches, other = (train_batches(with_seed(config, seed), tokenizer) for seed in (3, 4))
    steps = int(batches.steps_per_epoch)
    first, second, of_seed = (
        np.concatenate([of.plan[first + step].numbers for step in range(steps)])
        for of, first in ((batches, 0), (batches, steps), (other, 0))
    )
    for one, two in ((first, second), (first, of_seed), (first, np.sort(first))):
        assert (one == two).mean() < 0.05
    # Which pairs share a batch is drawn too, not only the order of batches.
    together = [{frozenset(x) for x in order.reshape(-1, 4).tolist()} for order in (first, second)]
    assert len(together[0] & together[1]) < 3
    options |= {"length_buckets": (16, 20, 24)}
    batches = epoch_of(train_batches(translation(directory, **options), tokenizer))
    lengths = [batch["source"].shape[1] for batch in batches]
    assert lengths != sorted(lengths)


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


def test_a_file_shorter_than_a_row(tmp_path, tokenizer):
    write_lines(tmp_path / "a.txt", ["haus und", "hund"])
    ids = [*tokenizer.encode("haus und"), EOS, *tokenizer.encode("hund"), EOS]
    row = train_batches(experiment(tmp_path, "lm", train=("a.txt",)), tokenizer).batch(3)
    assert row["labels"][5].tolist() == ids + [PAD] * (24 - len(ids))
    row = train_batches(experiment(tmp_path, "mlm", train=("a.txt",)), tokenizer).batch(3)
    assert (row["tokens"][5] == PAD).sum() == 23 - len(ids)


def ids_of(path, tokenizer):
    """The lines of a text, and its ids."""
    lines = path.read_text().split("\n")[:-1]
    return lines, [i for line in lines for i in [*tokenizer.encode(line), EOS]]


def test_lm_evaluation_covers_each_token_once(directory, tokenizer):
    config = experiment(directory, "lm", train=("train.txt",), test=("test.txt",))
    batches = evaluation_batches(config, tokenizer, "test", batch_size=8)
    text, ids = ids_of(directory / "test.txt", tokenizer)
    labels = np.concatenate([b["labels"].ravel() for b in batches])
    weights = np.concatenate([b["weights"].ravel() for b in batches])
    assert labels[: len(ids)].tolist() == ids
    assert not labels[len(ids) :].any()
    np.testing.assert_array_equal(weights, np.arange(len(labels)) < len(ids))
    assert len(ids) == weights.sum()
    assert batches.num_words == sum(len(line.split()) + 1 for line in text)
    tokens = np.concatenate([b["tokens"] for b in batches])
    assert set(tokens[: len(ids) // 24, 0]) == {BOS}
    assert {len(b["tokens"]) for b in batches} == {8}


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
    _, ids = ids_of(directory / "test.txt", tokenizer)
    assert restored[: len(ids)] == ids
    assert not any(restored[len(ids) :])


def test_translation_evaluation_covers_each_pair_once(directory, tokenizer):
    config = experiment(directory, "translation", train=("train.tsv",), test=("test.tsv",))
    batches = evaluation_batches(config, tokenizer, "test", batch_size=8)
    pairs = list(open_source(["test.tsv"], "pair", DataConfig(directory=str(directory))))
    found = []
    for batch in batches:
        assert len(batch["source"]) == 8
        for row, number in enumerate(batch["index"]):
            if number < 0:
                assert not any(batch[name][row].any() for name in ("source", "labels", "weights"))
                continue
            found.append(int(number))
            source, target = pairs[number]
            for name, text in (("source", source), ("labels", target)):
                ids = [*tokenizer.encode(text)[:39], EOS]
                got = batch[name][row]
                assert got[: len(ids)].tolist() == ids
                assert not got[len(ids) :].any()
    assert sorted(found) == list(range(len(pairs)))
    assert any(len(tokenizer.encode(text)) > 39 for pair in pairs for text in pair)
    lengths = [batch["source"].shape[1] for batch in batches]
    assert lengths == sorted(lengths)


def test_a_thread_brings_its_error_and_ends(config, tokenizer, monkeypatch):
    before, found = set(threading.enumerate()), train_batches(config, tokenizer)
    own = found.batch

    def batch(step):
        if step == 12:
            raise InputError("a.txt:7: went away")
        return own(step)

    monkeypatch.setattr(found, "batch", batch)
    with found.iterate(5) as iterator:
        equal(next(iterator), own(5))
        with pytest.raises(InputError, match="a.txt:7: went away"):
            list(iterator)
    for _ in range(600):
        if not set(threading.enumerate()) - before:
            return
        time.sleep(0.1)
    raise AssertionError("a thread goes on")


# Mixtures


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    lines = sentences(60, longest=5)
    write_lines(path / "a.txt", [line for line in lines if line])
    write_lines(path / "a.en", lines)
    write_lines(path / "a.de", lines[::-1])
    write_lines(path / "b.txt", ["katze " * 5] * 20)
    write_lines(path / "b.tsv", ["katze katze\tkatze"] * 90)
    return path


def mixture(directory, task, packing=False, **changes):
    train = ("a.en", "a.de", "b.tsv") if task == "translation" else ("a.txt", "b.txt")
    options = {"train": train, "train_weights": (1.0, 3.0), "packing": packing}
    return experiment(directory, task, **options | changes)


@pytest.mark.parametrize(
    ("task", "packing"), [("mlm", False), ("lm", True), ("translation", False)]
)
def test_a_mixture(two, tokenizer, task, packing):
    """Each source as often as its weight says, through epochs of its own."""
    config = mixture(two, task, packing)
    found = train_batches(config, tokenizer)
    each = of_each(train_batches, config, tokenizer, count=2)
    of_second = [MASK, *tokenizer.encode("katze katze")]
    side = "source" if task == "translation" else "tokens"
    rows = of_b = 0
    for step in range(60):
        batch = found.batch(step)
        equal(batch, joined([part.batch(step) for part in each]))
        # The second source has one word only.
        text = batch[side] >= MASK
        second = (np.isin(batch[side], of_second) & text).sum(axis=1) > 0.8 * text.sum(axis=1)
        if task == "translation":
            assert second.all() or not second.any()
            second = second[:1]
        rows, of_b = rows + len(second), of_b + second.sum()
    assert abs(of_b / rows - 0.75) < 0.05
    assert found.describe().count("\n") == 1
    parts = []
    for names in (config.data.train[:-1], config.data.train[-1:]):
        alone = dataclasses.replace(config.data, train=names, train_weights=())
        parts.append(train_batches(dataclasses.replace(config, data=alone), tokenizer))
    per_epoch = [part.steps_per_epoch for part in parts]
    assert found.steps_per_epoch == pytest.approx(max(per_epoch[0] * 4, per_epoch[1] * 4 / 3))
    if packing or task == "lm":  # nothing is drawn for the place in the mixture

        def rows_in(batches, steps):
            return Counter(row.tobytes() for s in range(steps) for row in batches.batch(s)[side])

        mixed, of_first = rows_in(found, 24), rows_in(parts[0], 6)
        assert sum((mixed & of_first).values()) >= 47  # 6 · 8 of 24 · 8 rows, in their order


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        ("lm", {"train_weights": ()}, "data.train is .*data.train_weights"),
        ("lm", {"train_weights": (1.0,)}, "data.train_weights is .*which has 2"),
        ("mlm", {"train_weights": (1.0, float("nan"))}, "data.train_weights.1 is nan"),
        ("lm", {"train": ("a.txt", "none.txt")}, "none.txt: no such file"),
        ("translation", {"train_weights": (1.0,) * 3}, "data.train_weights is .*which has 2"),
        ("translation", {"train": ("b.tsv", "a.en")}, "data.train=a.en: .*two parallel"),
        ("translation", {"packing": True, "length_buckets": (8, 24)}, "data.length_buckets"),
    ],
)
def test_bad_mixtures_are_one_clear_line(two, tokenizer, task, changes, said):
    config = mixture(two, task, **changes)
    with pytest.raises(InputError, match=said):
        check(config) or train_batches(config, tokenizer)
    with pytest.raises(InputError, match="data.train has several sources"):
        evaluation_batches(mixture(two, "lm"), tokenizer, "train")
