"""Official numbers against scikit-learn and SciPy, and by hand."""

import warnings
from itertools import product

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as sk

from mhe_jax.tasks.labelled.table import TABLE, official_scores
from mhe_jax.tasks.metrics import METRICS

DRAW = np.random.default_rng(0)
CLASSES = [
    *((DRAW.integers(0, n, 60), DRAW.integers(0, n, 60)) for n in (2, 2, 3)),
    *(np.array(pair) for pair in product(product([0, 1], repeat=3), repeat=2)),
]
REFERENCES = {
    "accuracy": sk.accuracy_score,
    "mcc": sk.matthews_corrcoef,
    "macro_f1": lambda y, p: sk.f1_score(y, p, average="macro", zero_division=0),
    "f1": lambda y, p: sk.f1_score(y, p, labels=[0, 1], pos_label=1, zero_division=0),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_classes(name):
    compared = 0
    for labels, predictions in CLASSES:
        if name in ("f1", "mcc") and labels.max() > 1:
            continue
        found = METRICS[name](np.asarray(labels), np.asarray(predictions))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one class only
            assert found == pytest.approx(REFERENCES[name](labels, predictions), abs=1e-12)
        compared += 1
    assert compared > 60


def test_correlations():
    for _ in range(20):
        labels, predictions = DRAW.integers(0, 6, 30).astype(float), DRAW.normal(size=30)
        for name in ("pearson", "spearman"):
            reference = getattr(scipy.stats, f"{name}r")
            found = METRICS[name](labels, predictions)
            assert found == pytest.approx(reference(labels, predictions)[0], abs=1e-12)


def test_what_cannot_be_computed_is_zero():
    some, one = np.array([0.0, 1.0, 1.0]), np.ones(3)
    for metric in map(METRICS.get, ("pearson", "spearman", "mcc")):
        assert metric(some, one) == metric(one, some) == metric(one, one) == 0.0


def test_multirc_by_hand():
    # Two questions, all answers of the second right; F1a: precision 2/3, recall 2/2.
    given = [1, 0, 1, 0], [1, 1, 1, 0], [(0, 0), (0, 0), (0, 1), (0, 1)]
    found = official_scores(TABLE["multirc"], *given)
    assert found == pytest.approx({"f1": 80.0, "exact_match": 50.0, "score": 65.0})


@pytest.mark.parametrize("dataset", [name for name, row in TABLE.items() if row.task != "span"])
def test_every_data_set_has_its_numbers(dataset):
    row = TABLE[dataset]
    labels = [float(i % max(len(row.labels), 2)) for i in range(12)]
    found = official_scores(row, labels, labels, [(i // 3,) for i in range(12)])
    assert set(found) == {*row.metrics, "score"}
    assert all(value == pytest.approx(100.0) for value in found.values())
