"""Batches by number, and read ahead.

    global batch = f(seed, step)        process p of P holds its rows pR/P to (p + 1)R/P of R

Nothing else decides what a batch holds. So a run resumes from its step alone, with any number of
processes, and all processes see the same shape at the same step. Their parts, concatenated, are the
batch of a single process, so dropout, which depends on the position of a row, is the same too.

A plan is a data set of Grain: its element `step` says which rows a global batch has, and how one is
made, so that a process makes only its own.
"""

import contextlib
import enum
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

import grain
import numpy as np

from mhe_jax.config import InputError
from mhe_jax.data.cache import key_of
from mhe_jax.data.examples import Row, stack

AHEAD = 4  # batches that are ready or being made: bounds the memory
# On few cores one thread is enough; the other cores are for the model.
THREADS = min(AHEAD, max(1, (os.cpu_count() or 1) // 2))
ENDLESS = 1 << 40


class Planned(NamedTuple):
    """The rows of a global batch: `make(number)` for each of their numbers."""

    make: Callable[[int], Row]
    numbers: Sequence[int] | np.ndarray


class Draw(enum.IntEnum):
    """The first number of the seed of rows of running text and of their masks, and of misspelling.

    So no two share a seed; orders of pairs and of labelled examples draw from (seed, epoch).
    """

    SHIFT = 0
    BLOCK_MASKS = 1
    PACKED_ORDER = 2
    PACKED_MASKS = 3
    SPELLING = 5


class Batches:
    """`batch(step)`, or in order by `iterate`; `text` is a key of the content that they are of."""

    def __init__(
        self, plan: grain.MapDataset, text: str, process_index: int = 0, process_count: int = 1
    ):
        self.plan, self.text = plan, text
        self.process_index, self.process_count = process_index, process_count
        self._own(cast(Planned, plan[0]).numbers)

    def batch(self, step: int) -> Row:
        """The rows that this process holds of global batch `step`."""
        make, numbers = cast(Planned, self.plan[step])
        return stack([make(int(number)) for number in self._own(numbers)])

    def _own(self, numbers: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
        """Those of the rows of a global batch that this process holds."""
        own, left = divmod(len(numbers), self.process_count)
        if left:
            raise InputError(
                f"a batch of {len(numbers)} rows cannot be split over {self.process_count} "
                "processes"
            )
        return numbers[self.process_index * own :][:own]

    def iterate(
        self, start: int = 0, stop: int | None = None
    ) -> contextlib.closing[Generator[Row, None, None]]:
        """In a `with`: batches from `start` on, a few made ahead in threads."""
        return contextlib.closing(self._ahead(start, min(len(self.plan), stop or ENDLESS)))

    def _ahead(self, start: int, stop: int) -> Generator[Row, None, None]:
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
        numbered = grain.MapDataset.range(start, max(start, stop)).map(self.batch)
        iterator = iter(numbered.to_iter_dataset(options))
        try:
            yield from iterator
        finally:
            iterator.close()


class TrainBatches(Batches):
    """Endless batches. `steps_per_epoch` of them, maybe a fraction, see all the text once."""

    def __init__(self, plans: "Part", *process: int):
        super().__init__(plans.rows, plans.text, *process)
        self.steps_per_epoch, self._about = plans.per_epoch, plans.about

    def describe(self) -> str:
        """How much there is, and in which shapes."""
        return f"{self._about}; an epoch is {self.steps_per_epoch:,.1f} steps"


class EvaluationBatches(Batches):
    """Finite: the whole split once, in the same order and with the same masks every time.

    Where too few rows are left to fill a batch, its last rows are padding with weight 0.
    """

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Generator[Row, None, None]:
        return self._ahead(0, len(self))


class Part(NamedTuple):
    """Endless rows, or plans, of one source."""

    rows: grain.MapDataset
    per_epoch: float  # so many see all the text once
    text: str  # a key of the content
    about: str


def mixed(parts: Sequence[Part], weights: Sequence[float]) -> Part:
    """Several parts as one, each as often as its weight says; an epoch sees each whole."""
    if len(parts) == 1:
        return parts[0]
    shares = [weight / sum(weights) for weight in weights]
    told = (f"{share:.2%} {part.about}" for share, part in zip(shares, parts, strict=True))
    return Part(
        grain.MapDataset.mix([part.rows for part in parts], shares),
        max(part.per_epoch / share for share, part in zip(shares, parts, strict=True)),
        key_of(*(part.text for part in parts)),
        "\n".join(told),
    )


def of_rows(part: Part, rows_per_batch: int, *process: int) -> TrainBatches:
    """Batches of rows of one shape: batch s has rows B·s to B·s + B - 1."""

    def plan(step: int) -> Planned:
        first, make = step * rows_per_batch, cast(Any, part.rows.__getitem__)
        return Planned(make, range(first, first + rows_per_batch))

    plans = grain.MapDataset.range(ENDLESS).map(plan)
    steps = part.per_epoch / rows_per_batch
    return TrainBatches(part._replace(rows=plans, per_epoch=steps), *process)


def padded(numbers: np.ndarray, size: int) -> np.ndarray:
    """`numbers`, and -1 up to `size` of them."""
    return np.concatenate([numbers, np.full(size - len(numbers), -1, numbers.dtype)])
