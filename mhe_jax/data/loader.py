"""Batches ahead of time: Grain computes the next few in threads while a step runs."""

import os
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

Batch = dict[str, np.ndarray]

AHEAD = 4  # batches that are ready or being made: bounds the memory
# On few cores one thread is enough; the other cores are for the model.
THREADS = min(AHEAD, max(1, (os.cpu_count() or 1) // 2))
ENDLESS = 1 << 40


class BatchIterator:
    """Batches `start`, `start + 1`, ... in order; close it, or use it in a `with`.

    Its only state is the number of the next batch: to resume, start there.
    """

    def __init__(self, batch: Callable[[int], Batch], start: int = 0, stop: int | None = None):
        self._stop = ENDLESS if stop is None else stop
        self._iterator = None
        if start < self._stop:
            numbered = grain.MapDataset.source(_Numbered(batch, start, self._stop))
            options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
            self._iterator = iter(numbered.to_iter_dataset(options))

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise StopIteration
        try:
            return next(self._iterator)
        except StopIteration:
            self.close()
            raise

    def close(self) -> None:
        """Stops the threads and ends the iteration."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_iterator", None) is not None:  # a loop that was left early
            self.close()


class _Numbered:
    """`batch(start) .. batch(stop - 1)` as a random-access source for Grain."""

    def __init__(self, batch: Callable[[int], Batch], start: int, stop: int):
        self._batch, self._start, self._stop = batch, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Batch:
        return self._batch(self._start + int(index))
