"""What a validation says, from what each of its batches gave."""

import numpy as np
import pytest

from mhe_jax.tasks.sums import criterion, total
from mhe_jax.tasks.task import Task

LOSSES = [
    {"loss": np.float32(6.0), "count": np.float32(3.0), "tokens": np.float32(11.0)},
    {"loss": np.float32(1.0), "count": np.float32(2.0), "tokens": np.float32(7.0)},
]


class Scored(Task):
    """Scores batches by what it is given of them."""

    def __init__(self):
        self.given = []

    def scores(self, batches, outputs):
        self.given.append((batches, outputs))
        return {"score": 83.0}


def test_the_best_has_the_least_loss_or_the_highest_score():
    assert criterion({"loss": 2.0}) < criterion({"loss": 3.0})
    one, other = {"loss": 3.0, "score": 5.0}, {"loss": 2.0, "score": 4.0}
    assert criterion(one) < criterion(other)
    # Of equal scores, the least loss.
    assert criterion({"loss": 2.0, "score": 5.0}) < criterion(one)


def test_a_loss_that_is_no_number_is_never_the_best():
    nan = criterion({"loss": float("nan")})
    assert criterion({"loss": 1e30}) < nan
    assert criterion({"loss": 9.0, "score": -9.0}) < criterion({"loss": 1.0, "score": np.nan})


def test_sums_are_of_all_batches_and_lose_no_digits():
    found = [{"loss": np.float32(1.0), "index": 0}, {"loss": np.float32(2.0**24), "index": 1}]
    assert total(found) == {"loss": 1.0 + 2.0**24}


def test_ratios_are_of_sums():
    assert Scored().measure(LOSSES, "batches") == {"loss": pytest.approx(7 / 5)}


def test_scores_come_where_there_are_outputs_that_are_numbers():
    found = [batch | {"index": i, "outputs": 10 * i} for i, batch in enumerate(LOSSES)]
    task = Scored()
    assert task.measure(found, "batches") == {"loss": pytest.approx(7 / 5), "score": 83.0}
    assert task.given == [("batches", [(0, 0), (1, 10)])]
    broken = [found[0], found[1] | {"loss": np.float32("nan")}]
    assert set(task.measure(broken, "batches")) == {"loss"}
    assert len(task.given) == 1
