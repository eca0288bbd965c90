"""Sliding windows: what is predicted, from what, and the score that comes of it."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from mhe_jax.data import BOS, EOS
from mhe_jax.tasks import evaluation_batches, of

T = 16


@pytest.fixture
def run(load):
    return load("lm")


@pytest.fixture
def ids(run, texts):
    lines = (texts / "lines.txt").read_text().split("\n")[:-1]
    return [i for line in lines for i in [*run.tokenizer.encode(line), EOS]]


def windows_of(run, config, rows, stride, *process):
    evaluation = dataclasses.replace(config.evaluation, stride=stride)
    config = dataclasses.replace(config, evaluation=evaluation)
    return of(config).evaluation_batches(config, run.tokenizer, "test", rows, *process)


@pytest.mark.parametrize("stride", [1, 5, T - 1, T])
def test_each_token_once_with_its_context(run, ids, stride):
    rows = 3
    windows = windows_of(run, run.config, rows, stride)
    predicted = []
    for batch in windows:
        assert batch["tokens"].shape == (rows, T)
        for tokens, labels, weights in zip(
            batch["tokens"], batch["labels"], batch["weights"], strict=True
        ):
            for place in np.flatnonzero(weights).tolist():
                number = len(predicted)
                context = tokens[: place + 1].tolist()
                assert context == [BOS, *ids[number - place : number]]
                assert place >= min(number, T - stride)
                predicted.append(int(labels[place]))
    assert predicted == ids
    # No batch without anything to predict.
    assert len(windows) == math.ceil((1 + math.ceil((len(ids) - T) / stride)) / rows)


def test_rows_of_processes_are_those_of_one(run):
    count = 3

    def windows(rows, *process):
        return windows_of(run, run.config, rows, 5, *process)

    one = windows(6).batch(1)
    parts = [windows(6, index, count).batch(1) for index in range(count)]
    for name, array in one.items():
        for index, part in enumerate(parts):
            np.testing.assert_array_equal(np.split(array, count)[index], part[name])


def test_a_text_shorter_than_a_window(run, tmp_path):
    tmp_path.joinpath("short.txt").write_text("the cat\n")
    data = dataclasses.replace(run.config.data, directory=str(tmp_path), test=("short.txt",))
    config = dataclasses.replace(run.config, data=data)
    windows = windows_of(run, config, 4, 3)
    assert len(windows) == 1
    tokens = len(run.tokenizer.encode("the cat")) + 1
    assert windows.batch(0)["weights"].sum() == tokens < T


def test_the_stride_of_a_block_gives_the_blocks(run):
    windows = windows_of(run, run.config, 8, T)
    blocks = evaluation_batches(run.config, run.tokenizer, "test", batch_size=8)
    for one, other in zip(windows, blocks, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("stride", [None, 4])
def test_perplexity_by_hand(run, texts, ids, score, stride):
    result = score(run, stride=stride)
    forward = jax.jit(lambda params, row: jax.nn.log_softmax(run.model.apply(params, row)[0]))
    nats = 0.0
    for number, label in enumerate(ids):
        # The window that predicts it.
        step = stride or T
        start = 0 if number < T else (number - T) // step * step + step
        row = np.zeros((1, T), np.int32)
        context = [BOS, *ids[start:number]]
        row[0, : len(context)] = context
        nats -= float(forward({"params": run.params}, row)[len(context) - 1, label])
    lines = (texts / "lines.txt").read_text(encoding="utf-8").splitlines()
    words = sum(len(line.split()) + 1 for line in lines)
    assert (result["stride"], result["tokens"], result["words"]) == (stride, len(ids), words)
    assert result["nats"] == pytest.approx(nats, rel=1e-5)
    assert result["loss"] == pytest.approx(nats / len(ids), rel=1e-5)
    for name, count in (("token", len(ids)), ("word", words)):
        expected = math.exp(nats / count)
        assert result[f"perplexity_per_{name}"] == pytest.approx(expected, rel=1e-5)
