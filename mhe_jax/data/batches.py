"""The common part of all batches.

    global batch = f(seed, step)        process p of P holds its rows pR/P to (p + 1)R/P of R

Nothing else decides what a batch holds. So a run resumes from its step alone, with any number of
processes, and all processes see the same shape at the same step. Their parts, concatenated, are the
batch of a single process, so dropout, which depends on the position of a row, is the same too.
"""

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mhe_jax.config import InputError
from mhe_jax.data.examples import Row, stack
from mhe_jax.data.loader import BatchIterator

T = TypeVar("T")


class Batches:
    """Batches by number: `batch(step)`, or prefetched in order by `iterate(start_step)`."""

    def __init__(self, process_index: int = 0, process_count: int = 1):
        self.process_index, self.process_count = process_index, process_count

    def batch(self, step: int) -> Row:
        """The rows that this process holds of global batch `step`."""
        raise NotImplementedError

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> BatchIterator:
        """Batches from `start_step` on, a few prefetched in threads; close it when done."""
        return BatchIterator(self.batch, start_step, stop_step)

    def _own_rows(self, rows: int) -> slice:
        """The rows of a global batch that this process holds; `rows` must divide evenly."""
        if rows % self.process_count:
            raise InputError(
                f"a batch of {rows} rows cannot be split over {self.process_count} processes"
            )
        own = rows // self.process_count
        return slice(self.process_index * own, (self.process_index + 1) * own)


class TrainBatches(Batches):
    """Endless batches. `steps_per_epoch` of them, maybe a fraction, see all the text once.

    `text` is a key of the text's content: the same wherever it is stored and however it is packed.
    """

    steps_per_epoch: float
    text: str

    def describe(self) -> str:
        """One line for the log: how much there is, and in which shapes."""
        raise NotImplementedError


class TrainRows(TrainBatches):
    """Endless rows of one shape, numbered from the first step on: batch s has B·s .. B·s + B - 1.

    `num_rows` rows see all the text once; a batch may span epochs.
    """

    num_rows: int

    def __init__(self, rows_per_batch: int, process_index: int = 0, process_count: int = 1):
        super().__init__(process_index, process_count)
        self.rows_per_batch = rows_per_batch
        self._own = self._own_rows(rows_per_batch)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The rows with these numbers."""
        raise NotImplementedError

    @property
    def steps_per_epoch(self) -> float:
        """Batches in an epoch, not necessarily a whole number."""
        return self.num_rows / self.rows_per_batch

    def batch(self, step: int) -> Row:
        """The rows that this process holds of global batch `step`."""
        first = step * self.rows_per_batch
        return stack(self.rows(range(first, first + self.rows_per_batch)[self._own]))


class EvaluationBatches(Batches):
    """Finite: the whole split once, in the same order and with the same masks every time.

    Where too few rows are left to fill a batch, its last rows are padding with weight 0. `text` is
    a key of the split's content, as that of `TrainBatches`.
    """

    text: str

    def __len__(self) -> int:
        raise NotImplementedError

    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> BatchIterator:
        """Batches from `start_step` on, until the end of the split or just before `stop_step`."""
        stop = len(self) if stop_step is None else min(stop_step, len(self))
        return BatchIterator(self.batch, start_step, stop)

    def __iter__(self) -> BatchIterator:
        return self.iterate()

    def _check(self, step: int) -> None:
        if not 0 <= step < len(self):
            raise IndexError(f"batch {step} of {len(self)}")


class Draw(enum.IntEnum):
    """The first number of a generator's seed, so that no two purposes share one."""

    BLOCK_ORDER = 0
    BLOCK_MASKS = 1
    PACKED_ORDER = 2
    PACKED_MASKS = 3
    SOURCE_ORDER = 4
    SPELLING = 5


class Epochs(Generic[T]):
    """`plan(epoch)`, computed once however many threads ask.

    The last two epochs are kept, since batches straddle them.

    >>> epochs = Epochs(lambda epoch: print("plan", epoch) or 10 * epoch)
    >>> epochs(1), epochs(1)
    plan 1
    (10, 10)
    """

    def __init__(self, plan: Callable[[int], T]):
        self._plan = plan
        self._known: OrderedDict[int, T] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, epoch: int) -> T:
        with self._lock:
            if epoch not in self._known:
                self._known[epoch] = self._plan(epoch)
                if len(self._known) > 2:
                    self._known.popitem(last=False)
            return self._known[epoch]
