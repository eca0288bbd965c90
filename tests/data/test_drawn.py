"""What chance decides, and which rows a batch has."""

import numpy as np

from mhe_jax.config.data import MASK, NUM_SPECIAL
from mhe_jax.data.batches import TrainRows
from mhe_jax.data.examples import mlm_row
from mhe_jax.data.mixture import BLOCK, Draws


def test_random_pieces_are_all_of_the_ordinary_ones():
    """In place of one in ten masked tokens."""
    V, ids = NUM_SPECIAL + 7, [NUM_SPECIAL] * 30
    put_in = set()
    for seed in range(80):
        row = mlm_row(ids, 31, V, 0.9, np.random.default_rng(seed))
        tokens = row["tokens"][row["positions"][row["weights"] > 0]]
        put_in |= {*tokens[tokens != MASK].tolist()}
    assert put_in == set(range(NUM_SPECIAL, V))


def test_each_block_of_draws_has_an_order_of_its_own():
    draws = Draws((1.0, 1.0), 5)
    one, other = ([draws(block * BLOCK + i)[0] for i in range(101)] for block in range(2))
    assert one != other


class Numbered(TrainRows):
    """Rows that are their numbers."""

    def rows(self, numbers):
        return [{"number": np.asarray(number)} for number in numbers]


def test_batches_follow_each_other_row_by_row():
    for processes in (1, 3):
        parts = [Numbered(6, process, processes) for process in range(processes)]
        found = [part.batch(step)["number"] for step in range(5) for part in parts]
        np.testing.assert_array_equal(np.concatenate(found), np.arange(30))
