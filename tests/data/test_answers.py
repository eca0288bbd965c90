"""SQuAD's numbers against a scorer written here from the published definition."""

import random
import re
import string

import numpy as np
import pytest

from mhe_jax.tasks.metrics import answer_scores

# Rajpurkar et al. 2016, 6.1: "ignore punctuations and articles"; F1 over bags of words.


def words(text):
    kept = "".join(" " if c.isspace() else c for c in text.lower() if c not in string.punctuation)
    return [w for w in re.split(r"\s+", re.sub(r"\b(?:the|an|a)\b", " ", kept)) if w]


def one(prediction, answer, version_2):
    found, right = words(prediction), words(answer)
    exact = float(found == right)
    if version_2 and (not found or not right):
        return exact, float(not found and not right)
    rest, common = list(right), 0
    for word in found:
        if word in rest:
            rest.remove(word)
            common += 1
    if not common:
        return exact, 0.0
    precision, recall = common / len(found), common / len(right)
    return exact, 2 * precision * recall / (precision + recall)


PARTS = [
    *("the", "The", "a", "An", "cat", "Cat", "cat's", "cats", "U.S.", "us", "-", "–", "1,000"),
    *("1000", "naïve", "naive", "İstanbul", "日本", "日本語", "é", "e\u0301", "\u00a0", "\t", "!?"),
    *("", "theatre", "a.m.", "an-hour", "“quoted”", "ß", "SS"),
]


@pytest.mark.parametrize("version_2", [False, True])
def test_against_an_independent_scorer(version_2):
    draw = random.Random(int(version_2))

    def text():
        return draw.choice([" ", "  "]).join(draw.choices(PARTS, k=draw.randrange(5)))

    predictions = [text() for _ in range(4000)]
    answers = [[text() for _ in range(draw.randint(1, 3))] for _ in predictions]
    for i in range(0, len(predictions), 4):  # many that agree in part
        answers[i][-1] = f"{predictions[i]} {draw.choice(PARTS)}"
    exact, overlap = [], []
    for prediction, right in zip(predictions, answers, strict=True):
        if version_2:
            right = [answer for answer in right if words(answer)] or [""]
        pairs = zip(*(one(prediction, answer, version_2) for answer in right), strict=True)
        for found, scored in zip((exact, overlap), pairs, strict=True):
            found.append(max(scored))
    found = answer_scores(predictions, answers, version_2=version_2)
    assert found["exact_match"].tolist() == exact
    np.testing.assert_allclose(found["f1"], overlap, rtol=1e-12)
    assert 0.05 < np.mean(exact) < 0.8
    assert any(0 < value < 1 for value in overlap)


@pytest.mark.parametrize(
    ("prediction", "answers", "version_1", "version_2"),
    [
        ("", ["x"], (0, 0), (0, 0)),
        ("x", [], (0, 0), (0, 0)),  # 2.0: the right answer is none
        ("", [], (0, 0), (1, 1)),
        ("the", ["The"], (1, 0), (1, 1)),  # 2.0 drops answers without words: the right one is ""
        ("", ["a", "x"], (1, 0), (0, 0)),
    ],
)
def test_edges(prediction, answers, version_1, version_2):
    for version, expected in ((False, version_1), (True, version_2)):
        found = answer_scores([prediction], [answers], version_2=version)
        assert (found["exact_match"][0], found["f1"][0]) == expected
