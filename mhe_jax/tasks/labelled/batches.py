"""Batches of labelled examples of similar length.

All batches have `batch_size` rows, padded to the shortest of at most six lengths that holds them.
An epoch shuffles the rows, sorts them by length within each `POOL` batches, cuts them into batches
and shuffles these. Each row appears once; the last rows of one batch are padding of weight 0.
"""

import functools

import grain
import numpy as np

from mhe_jax.config import DataConfig
from mhe_jax.data import examples
from mhe_jax.data.batches import (
    ENDLESS,
    EvaluationBatches,
    Part,
    Planned,
    TrainBatches,
    padded,
)
from mhe_jax.data.cache import key_of_all
from mhe_jax.data.examples import Row
from mhe_jax.data.pairs import by_length, choose_buckets
from mhe_jax.tasks.labelled.rows import LabelledRows
from mhe_jax.tasks.labelled.windows import WindowRows

POOL = 50  # batches that are sorted together
Rows = LabelledRows | WindowRows


def _plan(rows: Rows, length: int, numbers: np.ndarray) -> Planned:
    """A batch of the rows with these numbers, in `length`; -1 is padding."""

    def make(number: int) -> Row:
        if number >= 0:
            return rows.row(number, length)
        shortest = rows.row(int(rows.lengths.argmin()), length)  # fits into every batch
        return examples.padding_like(shortest) | {"index": np.array(-1, np.int32)}

    return Planned(make, numbers)


def train_examples(data: DataConfig, seed: int, rows: Rows, *process: int) -> TrainBatches:
    """Endless batches, planned as the module says."""
    size, lengths = data.batch_size, rows.lengths
    buckets = data.length_buckets or choose_buckets(lengths, data.sequence_length)
    steps = -(-len(rows) // size)

    @functools.lru_cache(2)
    def shuffled(epoch: int) -> np.ndarray:
        """The row numbers of each batch of an epoch, -1 for padding."""
        generator = np.random.default_rng([seed, epoch])
        order = generator.permutation(len(rows))
        pool = np.arange(len(order)) // (POOL * size)
        order = order[np.lexsort((lengths[order], pool))]
        return generator.permutation(padded(order, steps * size).reshape(-1, size))

    def plan(step: int) -> Planned:
        epoch, i = divmod(step, steps)
        numbers = shuffled(epoch)[i]
        longest = lengths[numbers[numbers >= 0]].max()
        return _plan(rows, buckets[int(np.searchsorted(buckets, longest))], numbers)

    about = f"{', '.join(data.train)}: {rows.describe()}; {size} rows of length "
    about += ", ".join(map(str, buckets))
    plans = grain.MapDataset.range(ENDLESS).map(plan)
    return TrainBatches(Part(plans, steps, key_of_all(rows.records), about), *process)


class EvaluationExamples(EvaluationBatches):
    """All rows of a split in order of length, none left out.

    `plan` has the length of each batch and the numbers of its rows; None pads rows the least.
    """

    def __init__(
        self,
        rows: Rows,
        longest: int,
        batch_size: int,
        *process: int,
        plan: list[tuple[int, np.ndarray]] | None = None,
    ):
        self.rows = rows
        batches = plan or by_length(rows.lengths, longest, batch_size)

        def planned(step: int) -> Planned:
            length, numbers = batches[step]
            return _plan(rows, length, padded(numbers, batch_size))

        plans = grain.MapDataset.range(len(batches)).map(planned)
        super().__init__(plans, key_of_all(rows.records), *process)
