"""`run.predict` and `--predict` against the task's own evaluation."""

import csv
import dataclasses
import io
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax import InputError
from mhe_jax.evaluation import evaluate, predict
from mhe_jax.evaluation.prediction import Prediction
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.tasks.labelled.windows import Answer


@pytest.fixture
def run(load, labelled_run):
    return lambda dataset, **settings: load(labelled_run(dataset), **settings)


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


@pytest.mark.parametrize("dataset", ["stsb", "copa", "wic"])
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
    texts = [("first 0", "second"), ("x", "")]
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


def test_one_by_one_is_all_together(run, compiled):
    one = run("sst2")
    texts = ["a", "first 1 naïve", "", "x y z " * 9, "long " * 60]
    together = one.predict(texts)
    assert len({round(found.probabilities["0"], 5) for found in together}) == len(texts)
    for text, found in zip(texts, together, strict=True):
        (alone,) = one.predict([text])
        assert alone.label == found.label
        assert alone.probabilities == pytest.approx(found.probabilities, abs=1e-6)
    assert one.predict([]) == []
    assert one.predict("a") == one.predict(["a"])[0]
    # Lazily, and without another program for the same shapes.
    texts, seen = [f"text {n % 5}" for n in range(100)], []
    expected = [found.label for found in one.predict(texts[:6], batch_size=2)]
    compiled.clear()
    found = one.predict((seen.append(text) or text for text in texts), batch_size=2)
    assert seen == []
    assert [next(found).label for _ in range(6)] == expected
    assert len(seen) == 10
    assert compiled == []


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
    short = one.predict({"question": "Who?", "context": context}, answer_length=1)
    places = one.tokenizer.offsets(context, one.tokenizer.encode(context))
    assert sum(begin < short.end and end > short.start for begin, end in places) == 1
    # White space around the tokens of an answer is not of it.
    (spaced,) = one.predict([("Who?", "  Rollo   came  ")], answer_length=90)
    assert "  Rollo   came  "[spaced.start : spaced.end] == spaced.text == spaced.text.strip()
    none = one.predict(texts, no_answer_threshold=-1000.0)
    assert [answer.text for answer in none] == [""] * 3


@pytest.mark.parametrize(
    ("dataset", "item", "says"),
    [
        ("sst2", 3, r"texts\[1\] is of type int"),
        ("sst2", ("a", "b"), r"texts\[1\] has 2 texts: takes 1"),
        ("sst2", {"text": "a"}, r"texts\[1\]: has no 'sentence'"),
        ("rte", "a", r"texts\[1\] has 1 text: takes 2"),
        ("wic", ("a", "b"), r"texts\[1\]: has no 'start1'"),
        ("squad_v2", ("a", " "), r"texts\[1\]: has an empty context"),
    ],
)
def test_bad_items(run, dataset, item, says):
    one = run(dataset)
    good = {"wic": records(run("wic"))[0], "rte": ("a", "b"), "squad_v2": ("a", "b")}
    with pytest.raises(InputError, match=f"^{says}"):
        one.predict([good.get(dataset, "a"), item])


def test_a_broken_checkpoint_predicts_nothing(load, labelled_run):
    with pytest.raises(InputError, match="NaN or infinite"):
        load(labelled_run("sst2", "not a number")).predict(["a"])


# Lines of standard input


def by_lines(run, lines, written=None, **options):
    written, one = [] if written is None else written, jax.devices()[:1]
    summary = predict(run.workdir, run.evaluation, lines, written.append, devices=one, **options)
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
    written = []
    with pytest.raises(InputError, match="^standard input, line 2 has 3 texts: takes 2"):
        by_lines(one, ["a\tb", "a\tb\tc", "a\tb"], written)
    assert "".join(written).count("\n") == 1


def test_lines_of_numbers_and_answers(run):
    one = run("stsb")
    found, _ = by_lines(one, ["a\tb", "c\td"])
    assert [*map(float, found)] == pytest.approx(one.predict([("a", "b"), ("c", "d")]), abs=6e-5)
    one = run("squad_v2", no_answer_threshold=99.0)
    (answer,) = one.predict([("Who?", "In 911, Rollo came")])
    found, _ = by_lines(one, ["Who?\tIn 911, Rollo came"])
    assert found == [f"{answer.text}\t{answer.score:.4f}\t{answer.start}\t{answer.end}"]


def test_only_runs_on_labelled_examples_predict(load):
    for call in (lambda run: run.predict(["a"]), lambda run: by_lines(run, ["a"])):
        with pytest.raises(InputError, match="is a run of task lm"):
            call(load("lm"))
