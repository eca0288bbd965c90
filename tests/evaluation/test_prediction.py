"""`run.predict` and `--predict` against the task's own evaluation."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from labelled_files import ROWS

from mhe_jax import InputError
from mhe_jax.evaluation.forward import Prediction
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.tasks.labelled.windows import Answer


@pytest.fixture
def run(load, labelled_run):
    return lambda dataset, **settings: load(labelled_run(dataset), **settings)


@pytest.fixture
def evaluated(score):
    """The result of the validation split, and the predictions that it leaves."""

    def evaluated(run):
        result = score(run, split="validation")
        (path,) = run.workdir.glob("validation.predictions.*")
        return result, path.read_text()

    return evaluated


@pytest.mark.parametrize("dataset", ["stsb", "copa", "wic"])
def test_predictions_are_those_of_the_evaluation(run, dataset, evaluated):
    one, given = run(dataset), list(ROWS[dataset])
    found = one.predict(given)
    result, text = evaluated(one)
    written = [line.split("\t")[1] for line in text.splitlines()[1:]]
    if dataset == "stsb":
        assert found == pytest.approx([*map(float, written)], abs=6e-4)
        assert len(set(found)) == 3
        return
    assert all(isinstance(prediction, Prediction) for prediction in found)
    labels = [prediction.label for prediction in found]
    assert labels == written
    names = TABLE[dataset].labels
    right = [names[record["label"]] for record in given]
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


def test_one_by_one_is_all_together(run):
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


def test_answers_are_those_of_the_evaluation(run, evaluated):
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
        ("sst2", 3, r"texts\[1\] is 3: takes 1"),
        ("sst2", ("a", "b"), r"texts\[1\] is .*: takes 1"),
        ("sst2", {"text": "a"}, r"texts\[1\]: has no 'sentence'"),
        ("rte", "a", r"texts\[1\] is .*: takes 2"),
        ("wic", ("a", "b"), r"texts\[1\]: has no 'start1'"),
        ("squad_v2", ("a", " "), r"texts\[1\]: has an empty context"),
    ],
)
def test_bad_items(run, dataset, item, says):
    one = run(dataset)
    good = {"wic": ROWS["wic"][0], "rte": ("a", "b"), "squad_v2": ("a", "b")}
    with pytest.raises(InputError, match=f"^{says}"):
        one.predict([good.get(dataset, "a"), item])


# Lines of standard input


def test_a_line_out_for_each_line_in(run, by_lines):
    one = run("mnli")
    lines = ["first\tsecond", "", " \t ", "a\tb", "first 2 \tsecond"]
    text, summary = by_lines("predict", one, lines)
    found = text.split("\n")[:-1]
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
    assert by_lines("predict", one, lines, chunk=1)[0] == text
    written = []
    with pytest.raises(InputError, match="^standard input, line 2 is .*: takes 2"):
        by_lines("predict", one, ["a\tb", "a\tb\tc", "a\tb"], written)
    assert "".join(written).count("\n") == 1


def test_lines_of_numbers_and_answers(run, by_lines):
    one = run("stsb")
    found, _ = by_lines("predict", one, ["a\tb", "c\td"])
    assert [*map(float, found.splitlines())] == pytest.approx(
        one.predict([("a", "b"), ("c", "d")]), abs=6e-5
    )
    one = run("squad_v2", no_answer_threshold=99.0)
    (answer,) = one.predict([("Who?", "In 911, Rollo came")])
    found, _ = by_lines("predict", one, ["Who?\tIn 911, Rollo came"])
    assert found == f"{answer.text}\t{answer.score:.4f}\t{answer.start}\t{answer.end}\n"
