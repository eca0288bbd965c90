"""Scores of predictions, each a function: of translations, classes, numbers and answers.

A metric of labelled examples is a line in `METRICS`. One for which lower is better has a word of
`LOWER_IS_BETTER` in its name. Nothing else imports sacrebleu, scikit-learn and SciPy.

SQuAD's exact match and F1 compare normalised texts: lower case, no ASCII punctuation, no articles
a, an, the, single spaces. With P and G the words of prediction and of a right answer, as multisets,

    F1 = 2 |P ∩ G| / (|P| + |G|)

and of several right answers the best counts. In version 2.0, right answers that normalise to
nothing are dropped, and a question without a right answer has the right answer "". Where either
side has no words, both metrics are 1 if neither side has any, else 0.

Source: Rajpurkar et al. 2016, section 6.1; 2018, section 4.
"""

import importlib.util
import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import sacrebleu

from mhe_jax.config import InputError, not_installed

# Words in the names of metrics for which lower is better.
LOWER_IS_BETTER = ("loss", "nats", "seconds", "perplexity")
ZERO: Any = 0.0  # of a share of nothing; scikit-learn would warn

_DROPPED = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def lower_is_better(metric: str) -> bool:
    """Whether lower is better for the metric of this name.

    >>> lower_is_better("perplexity_per_word"), lower_is_better("bleu")
    (True, False)
    """
    return any(word in LOWER_IS_BETTER for word in metric.split("_"))


def perplexity(nats: float, count: float) -> float:
    """`exp(nats / count)`, at most e^700: JSON has no infinity. `count` counts tokens, or words.

    >>> round(perplexity(nats=2 * math.log(8), count=2), 6)
    8.0
    """
    return math.exp(min(nats / count, 700.0))


def check_bleu(tokenizer: str) -> None:
    """Raises InputError if sacreBLEU's tokenizer needs a package or a file that is not there."""
    try:
        sacrebleu.BLEU(tokenize=tokenizer)
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"evaluation.bleu_tokenizer is {tokenizer!r}: {reason}") from None


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "13a"
) -> dict[str, float | str]:
    """Corpus BLEU and chrF with signatures, and the share of exact matches, from 0 to 100.

    BLEU cuts texts into words by sacreBLEU's `tokenizer`. Two texts match if they differ only in
    the spaces around them.

    >>> scores = translation_scores(["a small dog runs"], ["a small dog runs"])
    >>> round(scores["bleu"]), round(scores["chrf"]), scores["exact_match"]
    (100, 100, 100.0)
    """
    bleu, chrf = sacrebleu.BLEU(tokenize=tokenizer), sacrebleu.CHRF()
    matches = sum(h.strip() == r.strip() for h, r in zip(hypotheses, references, strict=True))
    return {
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "exact_match": 100.0 * matches / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


# Of labels and predictions [N], from 0 to 1. What cannot be computed, such as a correlation with a
# constant, is 0.


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    return float(np.mean(labels == predictions))


def f1(labels: np.ndarray, predictions: np.ndarray, average: Any = "binary") -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average=average, zero_division=ZERO))


def mcc(labels: np.ndarray, predictions: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    if _constant(labels) or _constant(predictions):
        return 0.0
    return float(matthews_corrcoef(labels, predictions))


def roc_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """How often an example of label 1 outscores one of label 0; 0.5 if either label is missing."""
    from sklearn.metrics import roc_auc_score

    return 0.5 if _constant(labels) else float(roc_auc_score(labels, scores))


def _correlation(labels: np.ndarray, predictions: np.ndarray, *, by: str) -> float:
    from scipy import stats

    if _constant(labels) or _constant(predictions):
        return 0.0
    return float(getattr(stats, by)(labels, predictions).statistic)


def _constant(values: np.ndarray) -> bool:
    return bool((values == values[:1]).all())


METRICS = {
    "accuracy": accuracy,
    "f1": f1,  # of class 1
    "macro_f1": partial(f1, average="macro"),  # the mean over classes
    "mcc": mcc,  # Matthews correlation
    "pearson": partial(_correlation, by="pearsonr"),
    "spearman": partial(_correlation, by="spearmanr"),
}
WITHOUT_SKLEARN = {"accuracy", "pearson", "spearman"}


def check_sklearn(metrics: Iterable[str]) -> None:
    """Raises InputError if one of these metrics needs scikit-learn, and it is not installed."""
    needing = sorted({*metrics} - WITHOUT_SKLEARN)
    if needing and importlib.util.find_spec("sklearn") is None:
        raise not_installed(f"{', '.join(needing)}: scikit-learn", "report")


# SQuAD


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
