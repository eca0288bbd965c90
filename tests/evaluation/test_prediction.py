"""`run.predict` and `eval.py RUN --predict` against the task's own evaluation."""

import csv
import dataclasses
import io
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhe_jax
from mhe_jax import InputError
from mhe_jax.evaluation import evaluate, predict
from mhe_jax.evaluation.prediction import Prediction
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.tasks.labelled.windows import Answer

ROOT = Path(__file__).parents[2]
WINDOWS = {"sequence_length": 64, "window_stride": 20, "question_length": 20}


@pytest.fixture(scope="module")
def run(labelled_run):
    made = {}

    def of(dataset, **options):
        if dataset not in made:
            made[dataset] = labelled_run(dataset, **WINDOWS if dataset == "squad_v2" else {})
        return mhe_jax.load(made[dataset], devices=jax.devices()[:1], **options)

    return of


def records(run, split="validation"):
    """What the file of a split holds, by name."""
    path = Path(run.config.data.directory, getattr(run.config.data, split)[0])
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    rows = csv.DictReader(io.StringIO(path.read_text()), delimiter="\t", quoting=csv.QUOTE_NONE)
    return list(rows)


def evaluated(run, split="validation"):
    """The result of a split, and the predictions that it leaves."""
    evaluation = dataclasses.replace(run.evaluation, split=split)
    result = evaluate(run.workdir, evaluation, devices=jax.devices()[:1])
    (path,) = run.workdir.glob(f"{split}.predictions.*")
    return result, path.read_text()


@pytest.mark.parametrize("dataset", ["sst2", "mnli", "stsb", "copa", "wic", "wsc"])
def test_predictions_are_those_of_the_evaluation(run, dataset):
    one, given = run(dataset), records(run(dataset))
    found = one.predict(given)
    result, written = evaluated(one)
    if dataset == "stsb":
        expected = [float(line.split("\t")[1]) for line in written.splitlines()[1:]]
        assert np.clip(found, 0, 5).tolist() == pytest.approx(expected, abs=6e-4)
        assert len(set(found)) == 3
        return
    assert all(isinstance(prediction, Prediction) for prediction in found)
    labels = [str(prediction.label).lower() for prediction in found]
    if written.startswith("index"):
        assert labels == [line.split("\t")[1] for line in written.splitlines()[1:]]
    else:
        predicted = [json.loads(line)["label"] for line in written.splitlines()]
        assert labels == [str(label).lower() for label in predicted]
    right = [str(record[TABLE[dataset].label]).lower() for record in given]
    accuracy = 100 * np.mean([a == b for a, b in zip(labels, right, strict=True)])
    assert result.get("accuracy", accuracy) == pytest.approx(accuracy)


def test_probabilities_are_the_softmax_of_the_model(run):
    one = run("rte")
    texts = [("first 0", "second"), ("a", "b longer text than the others"), ("x", "")]
    found, apply = one.predict(texts), jax.jit(one.model.apply)
    for (first, second), prediction in zip(texts, found, strict=True):
        a, b = one.tokenizer.encode(first), one.tokenizer.encode(second)
        tokens = jnp.array([[2, *a, 3, *b, 3]])
        types = jnp.array([[0] * (len(a) + 2) + [1] * (len(b) + 1)])
        marks = jnp.zeros_like(tokens)
        logits = apply({"params": one.params}, tokens, types, marks)[0]
        expected = jax.nn.softmax(logits)
        assert [*prediction.probabilities] == ["entailment", "not_entailment"]
        assert [*prediction.probabilities.values()] == pytest.approx(expected.tolist(), abs=1e-6)
        assert prediction.probability == max(prediction.probabilities.values())
        assert math.fsum(prediction.probabilities.values()) == pytest.approx(1)


def test_one_by_one_is_all_together(run):
    one = run("sst2")
    texts = ["a", "first 1 naïve", "", "x y z " * 9, "b", "the end", "long " * 60]
    together = one.predict(texts)
    assert len({round(found.probabilities["0"], 5) for found in together}) == len(texts)
    for text, found in zip(texts, together, strict=True):
        (alone,) = one.predict([text])
        assert alone.label == found.label
        assert alone.probabilities == pytest.approx(found.probabilities, abs=1e-6)
    assert one.predict(texts, batch_size=2)[4].probabilities == pytest.approx(
        together[4].probabilities, abs=1e-6
    )
    assert one.predict([]) == []
    assert one.predict("b") == one.predict(["b"])[0]


def test_answers_are_those_of_the_evaluation(run):
    one = run("squad_v2", no_answer_threshold=1000.0)
    path = Path(one.config.data.directory, one.config.data.validation[0])
    (paragraph,) = json.loads(path.read_text())["data"][0]["paragraphs"]
    context = paragraph["context"]
    texts = [(asked["question"], context) for asked in paragraph["qas"]]
    found = one.predict(texts)
    _, written = evaluated(one)
    odds = json.loads((one.workdir / "validation.no_answer.json").read_text())
    assert all(isinstance(answer, Answer) for answer in found)
    assert [answer.text for answer in found] == [*json.loads(written).values()]
    for answer, (_, text) in zip(found, texts, strict=True):
        assert text[answer.start : answer.end] == answer.text != ""
    assert [answer.no_answer for answer in found] == pytest.approx([*odds.values()], abs=1e-5)
    short = one.predict([{"question": "Who?", "context": context}], answer_length=1)
    assert one.predict({"question": "Who?", "context": context}, answer_length=1) == short[0]
    places = one.tokenizer.offsets(context, one.tokenizer.encode(context))
    assert sum(begin < short[0].end and end > short[0].start for begin, end in places) == 1
    # White space around the tokens of an answer is not of it.
    (spaced,) = one.predict([("Who?", "  Rollo   came  ")], answer_length=90)
    assert "  Rollo   came  "[spaced.start : spaced.end] == spaced.text == spaced.text.strip()
    none = one.predict(texts, no_answer_threshold=-1000.0)
    assert [answer.text for answer in none] == [""] * 3


def test_an_endless_iterator(run):
    one, read = run("sst2"), []

    def texts():
        for number in itertools.count():
            read.append(number)
            yield f"text {number % 5}"

    found = one.predict(texts(), batch_size=2)
    assert read == []
    labels = [next(found).label for _ in range(12)]
    assert labels == [
        one.label for one in run("sst2").predict([f"text {n % 5}" for n in range(12)])
    ]
    assert len(read) == 18


def test_the_same_shapes_compile_nothing_again(run, compiled):
    one = run("sst2")
    one.predict(["a", "b b b", "c"])
    assert compiled
    compiled.clear()
    one.predict(["d d", "e", "f", "a"])
    assert compiled == []


@pytest.mark.parametrize(
    ("dataset", "item", "says"),
    [
        ("sst2", 3, r"texts\[1\] is of type int: takes 1 \(sentence\)"),
        ("sst2", ("a", "b"), r"texts\[1\] has 2 texts: takes 1 \(sentence\)"),
        ("sst2", {"text": "a"}, r"texts\[1\]: has no 'sentence'; it has 'text'"),
        ("sst2", {"sentence": 3}, r"texts\[1\]: field 'sentence' is not a string"),
        ("sst2", "\udc00", r"texts\[1\]: field 'sentence' has half a surrogate pair"),
        ("rte", "a", r"texts\[1\] has 1 text: takes 2 \(sentence1, sentence2\)"),
        ("wic", ("a", "b"), r"texts\[1\]: has no 'start1'; it has 'sentence1', 'sentence2'"),
        ("squad_v2", ("a", " "), r"texts\[1\]: has an empty context"),
    ],
)
def test_bad_items(run, compiled, dataset, item, says):
    one = run(dataset)
    good = {"wic": records(run("wic"))[0], "rte": ("a", "b"), "squad_v2": ("a", "b")}
    compiled.clear()
    with pytest.raises(InputError, match=f"^{says}$"):
        one.predict([good.get(dataset, "a"), item])
    assert compiled == []


def test_a_broken_checkpoint_predicts_nothing(labelled_run):
    workdir = labelled_run("sst2", lambda params: jax.tree.map(lambda x: x * jnp.nan, params))
    with pytest.raises(InputError, match="NaN or infinite: a broken checkpoint"):
        mhe_jax.load(workdir, devices=jax.devices()[:1]).predict(["a"])


# Lines of standard input


def by_lines(run, lines, **options):
    written = []
    summary = predict(
        run.workdir, run.evaluation, lines, written.append, devices=jax.devices()[:1], **options
    )
    return "".join(written).split("\n")[:-1], summary


def test_a_line_out_for_each_line_in(run):
    one = run("mnli")
    lines = ["first\tsecond", "", " \t ", "a\tb", "first 2 \tsecond"]
    found, summary = by_lines(one, lines)
    assert found[1] == found[2] == ""
    predictions = one.predict([tuple(line.split("\t")) for line in lines if line.strip()])
    for line, prediction in zip([found[0], found[3], found[4]], predictions, strict=True):
        label, *each = line.split("\t")
        assert label == prediction.label
        names, shown = zip(*(part.split("=") for part in each), strict=True)
        assert names == ("entailment", "neutral", "contradiction")
        expected = [*prediction.probabilities.values()]
        assert [*map(float, shown)] == pytest.approx(expected, abs=6e-5)
    assert (summary["lines"], summary["task"], summary["steps"]) == (5, "classification", [7])
    assert by_lines(one, lines, chunk=1)[0] == found


def test_lines_of_numbers_and_answers(run):
    one = run("stsb")
    found, _ = by_lines(one, ["a\tb", "c\td"])
    assert [*map(float, found)] == pytest.approx(one.predict([("a", "b"), ("c", "d")]), abs=6e-5)
    one = run("squad_v2")
    (answer,) = one.predict([("Who?", "In 911, Rollo came")], no_answer_threshold=99.0)
    one = run("squad_v2", no_answer_threshold=99.0)
    found, _ = by_lines(one, ["Who?\tIn 911, Rollo came"])
    assert found == [f"{answer.text}\t{answer.score:.4f}\t{answer.start}\t{answer.end}"]


def test_lines_before_a_bad_one_come_out(run):
    one, written = run("mnli"), []
    with pytest.raises(
        InputError, match=r"^standard input, line 2 has 3 texts: takes 2 \(sentence1, s"
    ):
        predict(
            one.workdir,
            one.evaluation,
            ["a\tb", "a\tb\tc", "a\tb"],
            written.append,
            devices=jax.devices()[:1],
        )
    assert "".join(written).count("\n") == 1


def test_only_runs_on_labelled_examples_predict(run_of):
    workdir = run_of("lm")
    one = mhe_jax.load(workdir, devices=jax.devices()[:1])
    says = "is a run of task lm: only classification, regression, multiple_choice, span predict$"
    with pytest.raises(InputError, match=says):
        one.predict(["a"])
    with pytest.raises(InputError, match=says):
        by_lines(one, ["a"])


@pytest.mark.whole_run
def test_the_command(run):
    one = run("sst2")
    command = [sys.executable, "eval.py", str(one.workdir), "--predict"]
    environment = {**os.environ, "XLA_FLAGS": ""}
    lines = ["first", "", "second 2"]
    done = subprocess.run(
        command,
        input="\n".join(lines) + "\n",
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:-1] == by_lines(one, lines)[0]
    assert json.loads(done.stderr.splitlines()[-1])["lines"] == 3

    read, write = os.pipe()
    with subprocess.Popen(
        [*command, "--batch_size", "1"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=write,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(write)
        os.close(read)
        _, errors = process.communicate(b"first\n" * 8, timeout=300)
    assert process.returncode == 141
    assert errors == b""
