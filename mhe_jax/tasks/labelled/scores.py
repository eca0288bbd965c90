"""Official metrics of the data sets, in per cent; by scikit-learn and SciPy where they have them.

    accuracy, f1 (of class 1), macro_f1 (mean over classes), mcc (Matthews correlation)
    pearson, spearman
    exact_match of MultiRC: questions all of whose answers are right; f1 there is over all answers

A metric that cannot be computed, such as a correlation with a constant, is 0.

Nothing else imports scikit-learn and SciPy.
"""

import importlib.util
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mhe_jax.config import not_installed
from mhe_jax.tasks.labelled.table import DatasetRow

ZERO: Any = 0.0  # of a share of nothing; scikit-learn would warn


def require(dataset: DatasetRow) -> None:
    """Raises InputError if a library that scores this data set is not installed."""
    needed = {"mcc", "f1", "macro_f1"} & set(dataset.metrics) and dataset.suite != "squad"
    if needed:
        require_sklearn(f"{', '.join(sorted(dataset.metrics))} need")


def require_sklearn(what: str) -> None:
    """Raises InputError if scikit-learn is not installed; `what` says what needs it."""
    if importlib.util.find_spec("sklearn") is None:
        raise not_installed(f"{what} scikit-learn", "report")


def official_scores(
    dataset: DatasetRow,
    labels: Sequence[float],
    predictions: Sequence[float],
    groups: Sequence[Hashable] = (),
) -> dict[str, float]:
    """The data set's metrics; `groups` says which examples belong to one question (MultiRC)."""
    right, found = np.asarray(labels), np.asarray(predictions)
    metrics = {}
    for name in dataset.metrics:
        if name == "exact_match":
            wrong = {group for group, r, f in zip(groups, right, found, strict=True) if r != f}
            metrics[name] = 100.0 * (1 - len(wrong) / len(set(groups)))
        else:
            metrics[name] = 100.0 * METRICS[name](right, found)
    return with_score(dataset, metrics)


def with_score(dataset: DatasetRow, metrics: dict[str, float]) -> dict[str, float]:
    names = dataset.scored_by or dataset.metrics
    return {**metrics, "score": float(np.mean([metrics[name] for name in names]))}


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
    return bool((values == values[0]).all())


METRICS = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": partial(f1, average="macro"),
    "mcc": mcc,
    "pearson": partial(_correlation, by="pearsonr"),
    "spearman": partial(_correlation, by="spearmanr"),
}
