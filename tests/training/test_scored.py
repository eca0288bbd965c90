"""What a validation says, from what each of its batches gave."""

import numpy as np
import pytest

from mhe_jax.training import scored

LOSSES = [
    {"loss": np.float32(6.0), "count": np.float32(3.0), "tokens": np.float32(11.0)},
    {"loss": np.float32(1.0), "count": np.float32(2.0), "tokens": np.float32(7.0)},
]


class Labelled:
    """Scores batches by what it is given of them."""

    def __init__(self):
        self.given = []

    def scores(self, outputs):
        self.given.append(outputs)
        return {"score": 83.0}


def test_the_best_has_the_least_loss_or_the_highest_score():
    assert scored.criterion({"loss": 2.0}) < scored.criterion({"loss": 3.0})
    one, other = {"loss": 3.0, "score": 5.0}, {"loss": 2.0, "score": 4.0}
    assert scored.criterion(one) < scored.criterion(other)


def test_a_loss_that_is_no_number_is_never_the_best():
    nan = scored.criterion({"loss": float("nan")})
    assert scored.criterion({"loss": 1e30}) < nan
    assert scored.criterion({"loss": 1.0, "score": float("nan")}) == nan


def test_sums_are_of_all_batches_and_lose_no_digits():
    found = [{"loss": np.float32(1.0), "index": 0}, {"loss": np.float32(2.0**24), "index": 1}]
    assert scored.total(found) == {"loss": 1.0 + 2.0**24}


def test_ratios_are_of_sums():
    assert scored.summarize(LOSSES, Labelled()) == {"loss": pytest.approx(7 / 5)}


def test_scores_come_where_there_are_outputs_that_are_numbers():
    found = [batch | {"index": i, "outputs": 10 * i} for i, batch in enumerate(LOSSES)]
    batches = Labelled()
    assert scored.summarize(found, batches) == {"loss": pytest.approx(7 / 5), "score": 83.0}
    assert batches.given == [[(0, 0), (1, 10)]]
    broken = [found[0], found[1] | {"loss": np.float32("nan")}]
    assert set(scored.summarize(broken, batches)) == {"loss"}
    assert len(batches.given) == 1
