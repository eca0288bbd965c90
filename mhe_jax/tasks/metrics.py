"""Scores of predictions: of translations, classes, numbers and answers.

A metric of labelled examples is a line in `METRICS`. Those of SQuAD compare words, P of the
prediction and G of a right answer: lower case, without ASCII punctuation and the articles a, an,
the. Exact match says whether they are the same in the same order, and as multisets

    F1 = 2 |P ∩ G| / (|P| + |G|)

Of several right answers the best counts. In version 2.0, right answers without words are dropped,
and a question without a right answer has one of no words. Where either side has no words, both
metrics are 1 if neither side has any, else 0.

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

LOWER_IS_BETTER = ("loss", "nats", "seconds", "perplexity")  # words in names of metrics
ZERO: Any = 0.0  # of a share of nothing; scikit-learn would warn

_DROPPED = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def lower_is_better(metric: str) -> bool:
    """Whether lower is better for the metric of this name."""
    return any(word in LOWER_IS_BETTER for word in metric.split("_"))


def perplexity(nats: float, count: float) -> float:
    """`exp(nats / count)`, at most e^700: JSON has no infinity. `count` counts tokens, or words."""
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


def f1(labels: np.ndarray, predictions: np.ndarray, average: Any = "binary") -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average=average, zero_division=ZERO))


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
    "accuracy": lambda labels, predictions: float(np.mean(labels == predictions)),
    "f1": f1,  # of class 1
    "macro_f1": partial(f1, average="macro"),  # the mean over classes
    "mcc": partial(_correlation, by="pearsonr"),  # Matthews correlation, of two classes
    "pearson": partial(_correlation, by="pearsonr"),
    "spearman": partial(_correlation, by="spearmanr"),
}
OF_SKLEARN = {"f1", "macro_f1", "auc"}


def check_sklearn(metrics: Iterable[str]) -> None:
    """Raises InputError if one of these metrics needs scikit-learn, and it is not installed."""
    needing = sorted(OF_SKLEARN & {*metrics})
    if needing and importlib.util.find_spec("sklearn") is None:
        raise not_installed(f"{', '.join(needing)}: scikit-learn", "report")


def answer_scores(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], *, version_2: bool = False
) -> dict[str, np.ndarray]:
    """SQuAD's `exact_match` and `f1` of each question, from 0 to 1."""
    exact, overlap = np.zeros((2, len(predictions)))
    for i, (prediction, right) in enumerate(zip(predictions, answers, strict=True)):
        found, all_right = _words(prediction), [_words(answer) for answer in right]
        if version_2:
            all_right = [words for words in all_right if words] or [[]]
        exact[i] = found in all_right
        overlap[i] = max((_f1(found, words) for words in all_right), default=0.0)
    return {"exact_match": exact, "f1": np.maximum(overlap, exact) if version_2 else overlap}


def _words(text: str) -> list[str]:
    """What is compared of an answer: of "The  U.S. Army" us and army."""
    return _ARTICLES.sub(" ", text.lower().translate(_DROPPED)).split()


def _f1(found: list[str], right: list[str]) -> float:
    common = sum((Counter(found) & Counter(right)).values())
    return 2 * common / (len(found) + len(right)) if common else 0.0
