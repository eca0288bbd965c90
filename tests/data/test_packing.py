"""Each example once an epoch, whole and apart from the others, whatever the number of processes."""

from collections import Counter

import numpy as np
import pytest
from text_for_tests import experiment, joined, sentences, with_seed, write_lines

from mhe_jax.data import BOS, EOS, PAD
from mhe_jax.data.examples import num_predictions
from mhe_jax.data.packing import Plan, fill
from mhe_jax.tasks import train_batches

TASKS = ("mlm", "lm", "translation")
LONG = "haus und hund " * 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    lines = ["", *sentences(200, longest=5), "", LONG, *sentences(7, seed=1, longest=9)]
    write_lines(path / "train.txt", lines)
    other = sentences(len(lines), seed=2, longest=7)
    write_lines(path / "train.tsv", [f"{a}\t{b}" for a, b in zip(lines, other, strict=True)])
    return path


@pytest.fixture(params=TASKS)
def config(request, directory):
    end = "tsv" if request.param == "translation" else "txt"
    return experiment(directory, request.param, train=(f"train.{end}",), packing=True)


def segments(batch):
    """(example's arrays, row, number) of each example in a batch; of mlm with its text restored."""
    sides = {"tokens": "segments", "source": "source_segments", "target": "target_segments"}
    for row in range(len(batch["labels"])):
        last = next(batch[s][row].max() for s in sides.values() if s in batch)
        for number in range(1, last + 1):
            found = {
                name: batch[name][row][batch[of][row] == number]
                for name, of in sides.items()
                if name in batch
            }
            yield found, row, number


def epoch_of(config, tokenizer, number=0):
    """All rows of an epoch, as one batch."""
    batches = train_batches(config, tokenizer)
    size = len(batches.batch(0)["labels"])
    rows = round(batches.steps_per_epoch * size)
    steps = range(number * rows // size, -(-(number + 1) * rows // size))
    found = joined([batches.batch(step) for step in steps])
    first = number * rows - steps[0] * size
    return {name: array[first : first + rows] for name, array in found.items()}


@pytest.mark.parametrize("measures", [1, 2])
def test_a_plan_has_each_example_once(measures):
    generator = np.random.default_rng(measures)
    for _ in range(30):
        capacity = tuple(generator.integers(5, 40, measures).tolist())
        count = int(generator.integers(1, 300))
        sizes = np.stack([generator.integers(1, c + 1, count) for c in capacity], axis=1)
        plan = Plan(sizes, capacity, seed=3)
        orders = []
        for epoch in range(2):
            rows = [plan.row(epoch * plan.num_rows + i) for i in range(plan.num_rows)]
            assert {e for e, _ in rows} == {epoch}
            for _, members in rows:
                assert (sizes[members].sum(axis=0) <= capacity).all()
            order = np.concatenate([members for _, members in rows])
            assert sorted(order.tolist()) == list(range(count))
            orders.append(order.tolist())
        assert orders[0] != orders[1] or count < 5
        assert plan.num_rows >= (sizes.sum(axis=0) / capacity).max()


def test_rows_are_nearly_full():
    """Best fit decreasing takes at most 11/9 of the fewest rows, and of many sizes hardly more."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 100, 20_000)
    least = sizes.sum() / 128
    assert Plan(sizes[:, None], (128,), 0).num_rows < 1.01 * least
    # Three thirds, and a half with a third: the case that first fit of a shuffled order loses.
    patterns = fill(np.array([[50], [33]]), np.array([2, 6]), np.array([100]))
    assert sum(pattern.repeats for pattern in patterns) == 3


def test_padding_has_segment_0_and_counts_for_nothing(config, tokenizer):
    batch = train_batches(config, tokenizer).batch(0)
    for side in {"tokens", "source", "target"} & set(batch):
        of = batch["segments" if side == "tokens" else f"{side}_segments"]
        np.testing.assert_array_equal(batch[side] == PAD, of == 0)
        assert (np.diff(of) * (of[:, 1:] > 0) >= 0).all()
    if config.task == "translation":
        np.testing.assert_array_equal(batch["weights"] == 0, batch["target_segments"] == 0)
        one, other = (batch[f"{side}_segments"].max(axis=1) for side in ("source", "target"))
        np.testing.assert_array_equal(one, other)
        assert len(batch["source"]) == 8  # 384 / 48


def test_each_example_once_an_epoch(directory, config, tokenizer):
    """And whole: its text, from bos on where it is read, to eos."""
    batch = epoch_of(config, tokenizer)
    shapes = {name: array.shape[1:] for name, array in batch.items()}
    predicted = num_predictions(24, 0.15) if config.task == "mlm" else 24
    assert shapes.pop("labels") == shapes.pop("weights") == (predicted,)
    if config.task == "mlm":
        assert shapes.pop("positions") == (predicted,)
    assert set(shapes.values()) == {(24,)}
    found, parts = Counter(), []
    for example, row, number in segments(batch):
        if config.task == "translation":
            source, target = example["source"].tolist(), example["target"].tolist()
            labels = batch["labels"][row][batch["target_segments"][row] == number].tolist()
            assert target == [BOS, *labels[:-1]]
            assert (source[-1], labels[-1]) == (EOS, EOS)
            found[tokenizer.decode(source), tokenizer.decode(labels)] += 1
            continue
        tokens = example["tokens"].copy()
        assert tokens[0] == BOS
        of_row = batch["segments"][row] == number
        if config.task == "lm":
            labels = batch["labels"][row][of_row].tolist()
            assert tokens.tolist() == [BOS, *labels[:-1]]
            assert batch["weights"][row][of_row].all()
        else:
            counted = batch["weights"][row] > 0
            places, truth = batch["positions"][row][counted], batch["labels"][row][counted]
            mine = of_row[places]
            text = len(tokens) - 1
            full = batch["tokens"][row].copy()
            full[places] = truth
            labels = full[of_row][1:].tolist()
            assert mine.sum() == max(1, round(0.15 * (text - (labels[-1] == EOS))))
        parts.append(labels)
        found[tokenizer.decode(labels)] += labels[-1] == EOS
    lines = (directory / config.data.train[0]).read_text().split("\n")[:-1]
    items = [tuple(line.split("\t")) if "\t" in line else line for line in lines]
    if config.task == "translation":
        wanted = [
            pair for pair in items if all(0 < len(tokenizer.encode(text)) <= 23 for text in pair)
        ]
        assert found == Counter(wanted)
    else:
        longest = 24 - (config.task == "mlm")
        wanted = [item for item in items if item and len(tokenizer.encode(item)) < longest]
        assert {found[item] for item in wanted} == {1}
        # What is longer is cut into parts of nearly equal length.
        everything = [i for item in items if item for i in [*tokenizer.encode(item), EOS]]
        assert sorted(i for part in parts for i in part) == sorted(everything)
        text = [*tokenizer.encode(LONG), EOS]
        cut = [part for part in parts if any(text[s : s + len(part)] == part for s in range(99))]
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert len(wanted) > 100


def restored(batch):
    """{text: masked text} of each example of an mlm batch; texts are all different."""
    found = {}
    for example, row, number in segments(batch):
        full, counted = batch["tokens"][row].copy(), batch["weights"][row] > 0
        full[batch["positions"][row][counted]] = batch["labels"][row][counted]
        text = full[batch["segments"][row] == number]
        found[tuple(text.tolist())] = tuple(example["tokens"].tolist())
    return found


def test_masks_do_not_depend_on_the_packing(tmp_path, tokenizer):
    """An example is masked alike in short rows and in long ones, and anew in each epoch."""
    write_lines(tmp_path / "a.txt", [f"{line[:18]} {i}" for i, line in enumerate(sentences(90))])
    masked = []
    for length, size in ((30, 8), (37, 4)):
        options = {"packing": True, "sequence_length": length, "batch_size": size}
        config = experiment(tmp_path, "mlm", train=("a.txt",), **options)
        masked.append([restored(epoch_of(config, tokenizer, epoch)) for epoch in range(2)])
    assert masked[0] == masked[1]
    first, second = masked[0]
    assert len(first) == len(second) == 90
    assert sum(first[text] != second[text] for text in first) > 45


def test_the_same_line_is_masked_differently(tmp_path, tokenizer):
    """By number, epoch and seed."""
    line = "haus hund katze baum auto und oder nicht sehr dog cat " * 2
    write_lines(tmp_path / "a.txt", [line] * 31)
    config = experiment(tmp_path, "mlm", train=("a.txt",), packing=True, sequence_length=113)
    masked = set()
    for seed in (3, 4):
        for epoch in range(2):
            batch = epoch_of(with_seed(config, seed), tokenizer, epoch)
            assert len(batch["positions"]) == 31
            masked |= {row.tobytes() for row in batch["positions"]}
    assert len(masked) == 124


def test_only_what_is_masked_needs_room_for_predictions(tmp_path, tokenizer):
    """Of 9 tokens and an eos, 1 of 3 predictions: 15 % of the eos too would make it 2."""
    line = "q" * 8
    assert len(tokenizer.encode(line)) == 9
    write_lines(tmp_path / "a.txt", [line] * 16)
    batches = train_batches(experiment(tmp_path, "mlm", train=("a.txt",), packing=True), tokenizer)
    assert batches.batch(0)["segments"].max(axis=1).tolist() == [2] * 8
    assert batches.steps_per_epoch == 1


def test_the_order_of_examples_is_drawn_anew():
    """Of rows, and of the examples of a class among its places: for each epoch and seed."""
    sizes = np.array([[7]] * 60 + [[5]] * 53)
    plans = [Plan(sizes, (12,), seed) for seed in (3, 4)]
    rows = plans[0].num_rows
    assert rows == 60
    found = [
        [np.sort(plan.row(first + i)[1]) for i in range(rows)]
        for plan, first in ((plans[0], 0), (plans[0], rows), (plans[1], 0))
    ]
    for one in found:
        # Not in the order of the plan, which has all rows of one pattern together.
        sizes_of_rows = [len(members) for members in one]
        assert sizes_of_rows not in (sorted(sizes_of_rows), sorted(sizes_of_rows)[::-1])
        firsts = [int(members[0]) for members in one]
        assert firsts != sorted(firsts)
    together = [{tuple(members) for members in one if len(members) == 2} for one in found]
    assert len(together[0]) == 53
    assert len(together[0] & together[1]) < 10
    assert len(together[0] & together[2]) < 10
    # Who is with whom: by number it would be i and 60 + i.
    assert len({a - b for a, b in together[0]}) > 20


def test_what_fits_exactly_fits():
    assert Plan(np.array([[7], [5], [12], [6], [6]]), (12,), 0).num_rows == 3
    assert Plan(np.array([[7, 1], [5, 2], [3, 3]]), (12, 3), 0).num_rows == 2
    # 8 goes where it leaves nothing, so that 5 and 4 have room beside 11.
    assert Plan(np.array([[12], [11], [8], [5], [4]]), (20,), 0).num_rows == 2
