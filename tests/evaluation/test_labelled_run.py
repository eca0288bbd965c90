"""Runs of every kind of labelled task, from the files of a data set to scores and predictions."""

import dataclasses
import json
import math
import time

import jax
import numpy as np
import pytest

from mhe_jax.config import InputError
from mhe_jax.tasks import TASKS, evaluation_batches, train_batches
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.tasks.metrics import answer_scores


@pytest.fixture
def run(load, labelled_run):
    return lambda dataset: load(labelled_run(dataset))


@pytest.mark.parametrize("dataset", ["stsb", "copa", pytest.param("wic", marks=pytest.mark.rest)])
def test_scores_and_predictions(run, dataset, score):
    one = run(dataset)
    result = score(one, split="validation")
    assert set(TABLE[dataset].metrics) < set(result)
    assert math.isfinite(result["loss"])
    # A test split without labels has predictions but no score.
    result = score(one)
    assert "score" not in result
    assert result["examples"] == result["unlabelled_examples"] == 3
    assert (one.workdir / "test.predictions.tsv").read_text().count("\n") == 4


def test_other_files_of_mnli(run, score):
    """The commands of configs/finetune.py; the diagnostic set has no labels."""
    one = run("mnli")
    directory = one.workdir.parent
    other = (directory / "validation.parquet").read_bytes()
    (directory / "mismatched.parquet").write_bytes(other)
    (directory / "diagnostic.tsv").write_text("index\tpremise\thypothesis\n0\ta\tb\n1\tb\ta\n")
    some = "index\tpremise\thypothesis\tlabel\n0\ta\tb\tneutral\n1\tb\ta\t \n"
    (directory / "some.tsv").write_text(some)
    assert score(one, split="validation", sources=("mismatched.parquet",))["examples"] == 3
    for name, unlabelled in (("diagnostic.tsv", 2), ("some.tsv", 1)):
        found = score(one, split="test", sources=(name,))
        assert "score" not in found
        assert found["unlabelled_examples"] == unlabelled
    lines = (one.workdir / "diagnostic_tsv.predictions.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "0", "1"]
    with pytest.raises(InputError, match="diagnostic.tsv:2: has no 'label'"):
        score(one, split="validation", sources=("diagnostic.tsv",))


def test_no_time_goes_into_compiling(run):
    """Each length is compiled once, and what that takes does not count."""
    one = run("boolq")
    passages = [{"idx": i, "question": "is it", "passage": "a b " * 9 * i} for i in range(9)]
    text = "".join(json.dumps(passage) + "\n" for passage in passages)
    (one.workdir.parent / "long.jsonl").write_text(text)
    data = dataclasses.replace(one.config.data, test=("long.jsonl",))
    config = dataclasses.replace(one.config, data=data)
    one = dataclasses.replace(one, config=config, compiled={}, compile_seconds=[])
    begin = time.perf_counter()
    _, batches, seconds = one.outputs()
    whole, compiling = time.perf_counter() - begin, sum(one.compile_seconds)
    lengths = {batches.batch(step)["tokens"].shape for step in range(len(batches))}
    assert len(one.compile_seconds) == len(lengths) > 2
    assert 0 < seconds < whole - compiling


def test_squad_by_hand(run, score):
    """Answers from plain forward passes over whole contexts, against those of windows."""
    one = run("squad_v2")
    none = score(one, no_answer_threshold=-1000.0)
    # Nothing is answered: right for the one question of three that has no answer.
    assert none["exact_match"] == none["f1"] == none["score"] == pytest.approx(100 / 3)
    result = score(one, no_answer_threshold=1000.0)
    answers = json.loads((one.workdir / "test.predictions.json").read_text())
    odds = json.loads((one.workdir / "test.no_answer.json").read_text())
    right = {"50": ["Rollo", "In 911, Rollo"], "51": ["the 10th century"], "52": [""]}
    assert set(answers) == set(odds) == set(right)
    scored = answer_scores([answers[i] for i in right], [*right.values()], version_2=True)
    for name in ("exact_match", "f1"):
        assert result[name] == pytest.approx(100 * scored[name].mean())
    assert (result["answer_length"], result["no_answer_threshold"]) == (90, 1000.0)

    # By hand: every window through the model, every span tried.
    batches = evaluation_batches(one.config, one.tokenizer, "test", batch_size=4)
    apply, best, least = jax.jit(one.model.apply), {}, {}
    for batch in batches:
        inputs = (batch[name] for name in ("tokens", "token_types", "marks"))
        logits = np.asarray(apply({"params": one.params}, *inputs), np.float64)
        for number, (start, end), marks in zip(batch["index"], logits, batch["marks"], strict=True):
            if number < 0:
                continue
            name = batches.rows.examples[batches.rows._windows[number, 0]].index
            least[name] = min(least.get(name, np.inf), start[0] + end[0])
            places = np.flatnonzero(marks)[1:]
            for i in places:
                for j in places[(places >= i) & (places < i + 90)]:
                    if start[i] + end[j] > best.get(name, (-np.inf,))[0]:
                        best[name] = start[i] + end[j], batches.rows.span(number, i, j)[0]
    for name in right:
        assert answers[name] == best[name][1]
        assert odds[name] == pytest.approx(least[name] - best[name][0], abs=1e-4)


def test_rows_over_devices_change_no_score(run, score):
    one = run("rte")
    single = score(one, split="validation")
    predictions = (one.workdir / "validation.predictions.tsv").read_text()
    many = score(one, devices=4, split="validation")
    assert (one.workdir / "validation.predictions.tsv").read_text() == predictions
    assert many["accuracy"] == single["accuracy"]
    assert many["loss"] == pytest.approx(single["loss"], rel=1e-5)


def test_training_batches_have_no_other_arrays_than_the_step_reads(run):
    one = run("cola")
    batch = train_batches(one.config, one.tokenizer).batch(0)
    assert set(batch) == set(TASKS["classification"].batch_names)
