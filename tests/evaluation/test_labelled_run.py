"""Tuned runs of every kind of task, from the files of a data set to scores and a submission."""

import dataclasses
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from labelled_files import write

from mhe_jax.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    InputError,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from mhe_jax.config.fields import load_json
from mhe_jax.evaluation import evaluate
from mhe_jax.evaluation import run as evaluation_run
from mhe_jax.evaluation.run import Run
from mhe_jax.tasks import TASKS, evaluation_batches, train_batches
from mhe_jax.tasks.labelled.answers import exact_match, word_f1
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.training.loop import train

pytestmark = pytest.mark.whole_run


@pytest.fixture(scope="module")
def run_of_data(tmp_path_factory):
    """`run_of_data(dataset)`: a config of a tiny model and the workdir of its run of two steps."""

    def make(dataset, **data):
        directory = tmp_path_factory.mktemp(dataset)
        first, second, third = write(dataset, directory)
        config = Config(
            task=TABLE[dataset].task,
            workdir=str(directory / "run"),
            model=ModelConfig(
                vocabulary_size=300, features=8, mlp_features=8, num_layers=1, max_length=128
            ),
            data=DataConfig(
                directory=str(directory),
                dataset=dataset,
                train=(first,),
                validation=(second,),
                test=(third,),
                sequence_length=data.pop("sequence_length", 96),
                batch_size=4,
                length_buckets=data.pop("length_buckets", (96,)),
                cache_directory=str(directory / "cache"),
                **data,
            ),
            optimizer=OptimizerConfig(warmup_steps=1),
            train=TrainConfig(num_steps=2, eval_every=1, checkpoint_every=2, log_every=1),
            evaluation=EvaluationConfig(batch_size=4, answer_length=90),
        )
        train(config, jax.devices()[:1])
        return load_json(directory / "run/config.json"), directory / "run"

    return make


@pytest.mark.parametrize(
    ("dataset", "suffix"),
    [("stsb", "tsv"), ("copa", "jsonl"), pytest.param("wic", "jsonl", marks=pytest.mark.rest)],
)
def test_scores_and_submission(run_of_data, dataset, suffix):
    config, workdir = run_of_data(dataset)
    result = evaluate(
        workdir,
        dataclasses.replace(config.evaluation, split="validation"),
        devices=jax.devices()[:1],
    )
    row = TABLE[dataset]
    assert set(row.metrics) < set(result)
    assert math.isfinite(result["loss"])
    # A test split without labels has predictions but no score.
    result = evaluate(workdir, config.evaluation, devices=jax.devices()[:1])
    assert "score" not in result
    assert result["examples"] == result["unlabelled_examples"] == 3
    lines = (workdir / f"test.predictions.{suffix}").read_text().splitlines()
    assert len(lines) == 3 + (suffix == "tsv")


def test_other_files_of_mnli(run_of_data):
    """The commands of configs/glue.py; the diagnostic set has no labels."""
    config, workdir = run_of_data("mnli")
    directory = workdir.parent
    (directory / "dev_mismatched.tsv").write_bytes((directory / "dev.tsv").read_bytes())
    (directory / "diagnostic.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n1\tb\ta\n")

    def score(split, name):
        options = dataclasses.replace(config.evaluation, split=split, sources=(name,))
        return evaluate(workdir, options, devices=jax.devices()[:1])

    assert score("validation", "dev_mismatched.tsv")["examples"] == 3
    assert "score" not in score("test", "diagnostic.tsv")
    some = "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n1\tb\ta\t \n"
    (directory / "some.tsv").write_text(some)
    assert (found := score("test", "some.tsv"))["unlabelled_examples"] == 1
    assert "score" not in found
    lines = (workdir / "diagnostic_tsv.predictions.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "0", "1"]
    with pytest.raises(InputError, match="diagnostic.tsv:2: has no 'gold_label'"):
        score("validation", "diagnostic.tsv")


def test_no_time_goes_into_compiling(run_of_data, monkeypatch):
    """Each length has run once before the clock starts."""
    config, workdir = run_of_data("boolq")
    passages = [{"idx": i, "question": "is it", "passage": "a b " * 9 * i} for i in range(9)]
    text = "".join(json.dumps(passage) + "\n" for passage in passages)
    (Path(config.data.directory) / "long.jsonl").write_text(text)
    seen = []
    make = evaluation_run.make_eval_step

    def clock():
        seen.append("clock")
        return time.perf_counter()

    def make_noting(*arguments):
        step = make(*arguments)

        def noting(params, batch):
            seen.append(batch["tokens"].shape)
            return step(params, batch)

        return noting

    monkeypatch.setattr(evaluation_run, "make_eval_step", make_noting)
    monkeypatch.setattr(evaluation_run, "time", SimpleNamespace(perf_counter=clock))
    evaluation = dataclasses.replace(config.evaluation, sources=("long.jsonl",))
    result = evaluate(workdir, evaluation, devices=jax.devices()[:1])
    assert result["examples"] == 9
    before, timed = seen[: seen.index("clock")], seen[seen.index("clock") + 1 :]
    assert len(set(before)) == len(before) > 2
    assert set(before) == set(timed) - {"clock"}


def test_squad_by_hand(run_of_data):
    """Answers from plain forward passes over whole contexts, against those of windows."""
    config, workdir = run_of_data(
        "squad_v2",
        sequence_length=128,
        length_buckets=(128,),
        window_stride=40,
        question_length=20,
    )
    one = jax.devices()[:1]
    evaluation = dataclasses.replace(config.evaluation, no_answer_threshold=-1000.0)
    none = evaluate(workdir, evaluation, devices=one)
    # Nothing is answered: right for the one question of three that has no answer.
    assert none["exact_match"] == none["f1"] == none["score"] == pytest.approx(100 / 3)
    evaluation = dataclasses.replace(config.evaluation, no_answer_threshold=1000.0)
    result = evaluate(workdir, evaluation, devices=one)
    answers = json.loads((workdir / "test.predictions.json").read_text())
    odds = json.loads((workdir / "test.no_answer.json").read_text())
    right = {"50": ["Rollo", "In 911, Rollo"], "51": ["the 10th century"], "52": [""]}
    assert set(answers) == set(odds) == set(right)
    exact = [max(exact_match(answers[i], text) for text in right[i]) for i in right]
    overlap = [max(word_f1(answers[i], t, empty_matches=True) for t in right[i]) for i in right]
    assert result["exact_match"] == pytest.approx(100 * np.mean(exact))
    assert result["f1"] == pytest.approx(100 * np.mean(overlap))
    assert result["best_f1"] >= max(result["f1"], 100 / 3) - 1e-9

    settings = config.evaluation.answer_length, 1000.0
    assert (result["answer_length"], result["no_answer_threshold"]) == settings

    # By hand: every window through the model, every span tried.
    run = Run.load(workdir, dataclasses.replace(config, evaluation=evaluation), one)
    batches = evaluation_batches(config, run.tokenizer, "test", batch_size=1)
    best, least = {}, {}
    for step in range(len(batches)):
        batch = batches.batch(step)
        inputs = (batch[name] for name in ("tokens", "token_types", "marks"))
        start, end = np.asarray(run.model.apply({"params": run.params}, *inputs), np.float64)[0]
        number = int(batch["index"][0])
        name = batches.rows.questions[batches.rows._windows[number, 0]].index
        least[name] = min(least.get(name, np.inf), start[0] + end[0])
        places = np.flatnonzero(batch["marks"][0])[1:]
        for i in places:
            for j in places[(places >= i) & (places < i + 90)]:
                if start[i] + end[j] > best.get(name, (-np.inf,))[0]:
                    best[name] = start[i] + end[j], batches.rows.span(number, i, j)[0]
    for name in right:
        assert answers[name] == best[name][1]
        assert odds[name] == pytest.approx(least[name] - best[name][0], abs=1e-4)


def test_rows_over_devices_change_no_score(run_of_data):
    config, workdir = run_of_data("rte")
    evaluation = dataclasses.replace(config.evaluation, split="validation")
    one = evaluate(workdir, evaluation, devices=jax.devices()[:1])
    predictions = (workdir / "validation.predictions.tsv").read_text()
    many = evaluate(workdir, evaluation, devices=jax.devices()[:4])
    assert (workdir / "validation.predictions.tsv").read_text() == predictions
    assert many["accuracy"] == one["accuracy"]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_training_batches_have_no_other_arrays_than_the_step_reads(run_of_data):
    config, workdir = run_of_data("cola")
    run = Run.load(workdir, config, jax.devices()[:1])
    batch = train_batches(config, run.tokenizer).batch(0)
    assert set(batch) == set(TASKS["classification"].batch_names)
