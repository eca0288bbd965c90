"""Several training sources: in proportion, each through its own epochs, a function of the step."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from text_for_tests import equal, experiment, joined, sentences, with_seed, write_lines

from mhe_jax.config import Config, DataConfig, InputError
from mhe_jax.config.rules import check, training_sources
from mhe_jax.data import MASK
from mhe_jax.data.mixture import BLOCK, Draws
from mhe_jax.data.tokenizer import NUM_FIXED
from mhe_jax.tasks import check_sources, evaluation_batches, make_tokenizer, train_batches

CASES = [(task, packing) for task in ("mlm", "lm", "translation") for packing in (False, True)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    lines = sentences(60, longest=5)
    write_lines(path / "a.txt", [line for line in lines if line])
    write_lines(path / "a.en", lines)
    write_lines(path / "a.de", lines[::-1])
    write_lines(path / "b.txt", ["katze " * 5] * 20)
    write_lines(path / "b.tsv", ["katze katze\tkatze"] * 90)
    return path


def mixed(directory, task, packing=False, **changes):
    train = ("a.en", "a.de", "b.tsv") if task == "translation" else ("a.txt", "b.txt")
    options = {"train": train, "train_weights": (1.0, 3.0), "packing": packing}
    return experiment(directory, task, **options | changes)


@pytest.mark.parametrize("weights", [(1.0,), (2.0, 1.0), (0.5, 0.25, 0.25), (1.0, 1.0, 1.0, 997)])
def test_draws(weights):
    draws, other = Draws(weights, 5), Draws(weights, 6)
    orders = set()
    for block in range(2):
        drawn = [draws(number) for number in range(block * BLOCK, (block + 1) * BLOCK)]
        counts = Counter(part for part, _ in drawn)
        for part, weight in enumerate(weights):
            assert abs(counts[part] - BLOCK * weight / sum(weights)) < 1
            first = block * counts[part]
            numbers = [number for of, number in drawn if of == part]
            assert numbers == list(range(first, first + counts[part]))
        orders.add(tuple(part for part, _ in drawn))
        if len(weights) > 1:
            assert drawn != [other(number) for number in range(block * BLOCK, (block + 1) * BLOCK)]
    assert len(orders) == (2 if len(weights) > 1 else 1)


@pytest.mark.parametrize(("task", "packing"), CASES)
def test_shares_and_processes(directory, tokenizer, task, packing):
    config = mixed(directory, task, packing)
    batches = train_batches(config, tokenizer)
    each = [train_batches(config, tokenizer, process_index=p, process_count=2) for p in range(2)]
    of_second = [MASK, *tokenizer.encode("katze katze")]
    side = "source" if task == "translation" else "tokens"
    rows = of_b = 0
    for step in range(60):
        batch = batches.batch(step)
        equal(batch, joined([part.batch(step) for part in each]))
        # The second source has one word only.
        text = batch[side] >= MASK
        second = (np.isin(batch[side], of_second) & text).sum(axis=1) > 0.8 * text.sum(axis=1)
        if task == "translation" and not packing:
            assert second.all() or not second.any()
            second = second[:1]
        rows, of_b = rows + len(second), of_b + second.sum()
    assert abs(of_b / rows - 0.75) < 0.2
    other = train_batches(with_seed(config, 9), tokenizer)
    seen = [[of_seed.batch(s)[side].tobytes() for s in range(9)] for of_seed in (batches, other)]
    assert seen[0] != seen[1]


def test_each_source_goes_through_its_own_epochs(directory, tokenizer):
    batches = train_batches(mixed(directory, "lm", packing=True), tokenizer)
    first, second = batches.parts
    drawn = [batches.draws(number) for number in range(BLOCK)]
    numbers = [[k for of, k in drawn if of == part] for part in (0, 1)]
    assert [len(n) for n in numbers] == [BLOCK // 4, 3 * BLOCK // 4]
    for part, of_part in ((first, numbers[0]), (second, numbers[1])):
        epochs = Counter(part.plan.row(number)[0] for number in of_part)
        assert all(epochs[e] == part.num_rows for e in range(len(epochs) - 1))
    for step in (0, 3):
        rows = [batches.parts[p].rows([k])[0] for p, k in drawn[8 * step : 8 * step + 8]]
        equal(
            batches.batch(step), {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        )
    assert batches.steps_per_epoch * 8 >= max(first.num_rows * 4, second.num_rows)
    assert batches.describe().count("\n") == 1


def test_an_epoch_of_batches_shows_each_source_whole(directory, tokenizer):
    """In translation it is batches that are drawn, a quarter of them from the first."""
    batches = train_batches(mixed(directory, "translation", row_multiple=1), tokenizer)
    first, second = (part.steps_per_epoch for part in batches.parts)
    assert first * 4 != second * 4 / 3
    assert batches.steps_per_epoch == pytest.approx(max(first * 4, second * 4 / 3))


def test_which_names_are_one_source():
    """A file of pairs is one by itself; a weight for each name says that no two are one."""
    for form in (".tsv", ".jsonl.gz", ".TAB.xz", ".ndjson"):
        train = ("b.en", "b.de", f"a{form}", "c.en", "c.de")
        data = DataConfig(train=train, train_weights=(1.0,) * 3)
        found = [names for names, _ in training_sources(Config(task="translation", data=data))]
        assert found == [("b.en", "b.de"), (f"a{form}",), ("c.en", "c.de")]
    data = DataConfig(train=("saved/a", "b"), train_weights=(1.0, 2.0))
    found = training_sources(Config(task="translation", data=data))
    assert found == [(("saved/a",), 1.0), (("b",), 2.0)]


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        ("lm", {"train_weights": ()}, "data.train is .*data.train_weights"),
        ("lm", {"train_weights": (1.0,)}, "data.train_weights is .*which has 2"),
        ("lm", {"train_weights": (1.0, 0.0)}, "data.train_weights.1 is 0"),
        ("mlm", {"train_weights": (1.0, float("nan"))}, "data.train_weights.1 is nan"),
        ("lm", {"train_weights": (1.0, 1e6)}, "train_weights is .*less than 1 in 10,000"),
        ("lm", {"train": ("a.txt", "none.txt")}, "none.txt: no such file"),
        ("translation", {"train_weights": (1.0,) * 3}, "data.train_weights is .*which has 2"),
        ("translation", {"train": ("b.tsv", "a.en")}, "data.train=a.en: .*two parallel"),
        ("translation", {"packing": True, "length_buckets": (8, 24)}, "data.length_buckets"),
    ],
)
def test_bad_mixtures_are_one_clear_line(directory, tokenizer, task, changes, said):
    config = mixed(directory, task, **changes)
    with pytest.raises(InputError, match=said):
        check(config) or train_batches(config, tokenizer)
    with pytest.raises(InputError, match="data.train has several sources"):
        evaluation_batches(mixed(directory, "lm"), tokenizer, "train")


def test_the_tokenizer_sees_all_sources(directory, tmp_path):
    config = mixed(directory, "translation")
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocabulary_size=310)
    )
    check_sources(config)
    tokenizer = make_tokenizer(config, tmp_path / "tokenizer.model")
    alone = dataclasses.replace(config.data, train=("a.en", "a.de"), train_weights=())
    first = make_tokenizer(dataclasses.replace(config, data=alone), tmp_path / "first.model")
    assert len(tokenizer.encode("katze")) < len(first.encode("katze"))
    assert min(tokenizer.encode("haus")) >= NUM_FIXED  # pieces, not bytes
