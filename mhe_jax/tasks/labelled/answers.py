"""SQuAD's metrics: exact match and F1 of words, in per cent.

A text is normalised: lower case, no ASCII punctuation, no articles a, an, the, single spaces. With
P and G the words of prediction and of a right answer, as multisets,

    F1 = 2 |P ∩ G| / (|P| + |G|)

and of several right answers the best counts. In version 2.0, right answers that normalise to
nothing are dropped, and a question without a right answer has the right answer "". Where either
side has no words, both metrics are 1 if neither side has any, else 0.

Source: Rajpurkar et al. 2016, section 6.1; 2018, section 4.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_DROPPED = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """The form in which answers are compared: "The  U.S. Army" is "us army"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DROPPED)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 where both are normalised to the same text."""
    return float(normalized(prediction) == normalized(answer))


def word_f1(prediction: str, answer: str, *, empty_matches: bool) -> float:
    """F1 of words; with `empty_matches`, as in version 2.0, texts without words are the same."""
    found, right = normalized(prediction).split(), normalized(answer).split()
    if empty_matches and not (found and right):
        return float(found == right)
    common = sum((Counter(found) & Counter(right)).values())
    return 2 * common / (len(found) + len(right)) if common else 0.0


def answer_scores(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], *, version_2: bool = False
) -> dict[str, np.ndarray]:
    """`exact_match` and `f1` of each question, from 0 to 1."""
    exact, overlap = [], []
    for prediction, right in zip(predictions, answers, strict=True):
        if version_2:
            right = [answer for answer in right if normalized(answer)] or [""]
        exact.append(max((exact_match(prediction, answer) for answer in right), default=0.0))
        found = (word_f1(prediction, answer, empty_matches=version_2) for answer in right)
        overlap.append(max(found, default=0.0))
    return {"exact_match": np.array(exact), "f1": np.array(overlap)}


def best_threshold(
    scores: np.ndarray, no_answer: np.ndarray, answerable: np.ndarray
) -> tuple[float, float]:
    """The highest mean score, and the smallest threshold that reaches it.

    A question keeps its answer, worth `scores`, if `no_answer` <= threshold; else it is left
    unanswered, worth 1 if it is not `answerable`. The least `no_answer` minus 1 keeps none.

    >>> best_threshold(np.array([1.0, 0.0]), np.array([-1.0, 2.0]), np.array([True, False]))
    (1.0, -1.0)
    """
    order = np.argsort(no_answer, kind="stable")
    thresholds = np.concatenate([[no_answer.min() - 1], no_answer[order]])
    kept = np.concatenate([[0.0], np.cumsum(scores[order])])
    unanswerable = ~answerable[order]
    left = unanswerable.sum() - np.concatenate([[0], np.cumsum(unanswerable)])
    means = (kept + left) / len(scores)
    # Of equal thresholds, only the last includes all of its questions.
    means[:-1][thresholds[:-1] == thresholds[1:]] = -np.inf
    best = int(np.argmax(means))
    return float(means[best]), float(thresholds[best])
