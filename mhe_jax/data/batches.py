"""Batches by number, and read ahead.

    global batch = f(seed, step)        process p of P holds its rows pR/P to (p + 1)R/P of R

Nothing else decides what a batch holds. So a run resumes from its step alone, with any number of
processes, and all processes see the same shape at the same step. Their parts, concatenated, are the
batch of a single process, so dropout, which depends on the position of a row, is the same too.

Element `step` of a plan says which rows a global batch has, and how one is made, so that a process
makes only its own.
"""

import contextlib
import enum
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from mhe_jax.config import InputError
from mhe_jax.data.cache import key_of
from mhe_jax.data.examples import Row, padding_like, stack

AHEAD = 4  # batches that are ready or being made: bounds the memory
# Half of the cores at most: the others are for the model.
THREADS = min(AHEAD, max(1, (os.cpu_count() or 1) // 2))
ENDLESS = 1 << 40
NUM_BUCKETS = 6  # each is a shape that is compiled
BUCKET_MULTIPLE = 4

# The first number of the seed of each draw for running text, and of misspelling, so that no two
# share a seed; orders of pairs and of labelled examples draw from (seed, epoch).
Draw = enum.IntEnum("Draw", "SHIFT BLOCK_MASKS PACKED_ORDER PACKED_MASKS UNUSED SPELLING", start=0)


class Planned(NamedTuple):
    """The rows of a global batch: `make(number)` for each of their numbers; -1 is padding."""

    make: Callable[[int], Row]
    numbers: Sequence[int] | np.ndarray


class Batches:
    """`batch(step)`, or in order by `iterate`; `text` is a key of the content that they are of."""

    def __init__(self, plan: Any, text: str, process_index: int = 0, process_count: int = 1):
        self.plan, self.text = plan, text
        self.process_index, self.process_count = process_index, process_count
        self._own(plan[0][1])

    def batch(self, step: int) -> Row:
        """The rows that this process holds of global batch `step`."""
        make, numbers = self.plan[step]
        own = map(int, self._own(numbers))
        return stack([make(n) if n >= 0 else padding_like(make(int(numbers[0]))) for n in own])

    def _own(self, numbers: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
        """Those of the rows of a global batch that this process holds."""
        own, left = divmod(len(numbers), self.process_count)
        if left:
            count = self.process_count
            raise InputError(
                f"a batch of {len(numbers)} rows cannot be split over {count} processes"
            )
        return numbers[self.process_index * own :][:own]

    @contextlib.contextmanager
    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Iterator[Row]]:
        """In a `with`: batches from `start` on, a few made ahead in threads."""
        last = min(len(self.plan), stop or ENDLESS)
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
        numbered = grain.MapDataset.range(start, max(start, last)).map(self.batch)
        iterator = iter(numbered.to_iter_dataset(options))
        try:
            yield iterator
        finally:
            iterator.close()


class TrainBatches(Batches):
    """Endless batches. `steps_per_epoch` of them, maybe a fraction, see all the text once."""

    def __init__(self, part: "Part", *process: int):
        super().__init__(part.rows, part.text, *process)
        self.steps_per_epoch, self._about = part.per_epoch, part.about

    def describe(self) -> str:
        """How much there is, and in which shapes."""
        return f"{self._about}; an epoch is {self.steps_per_epoch:,.1f} steps"


class EvaluationBatches(Batches):
    """Finite: the whole split once, in the same order and with the same masks every time."""

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Row]:
        with self.iterate() as iterator:
            yield from iterator


class Part(NamedTuple):
    """Endless rows, or plans of batches, of one source."""

    rows: Any  # a grain.MapDataset
    per_epoch: float  # so many see all the text once
    text: str  # a key of the content
    about: str


def endless(make: Callable[[int], Any]) -> grain.MapDataset:
    """`make(0)`, `make(1)`, ..."""
    return grain.MapDataset.range(ENDLESS).map(make)


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
        first = step * rows_per_batch
        return Planned(part.rows.__getitem__, range(first, first + rows_per_batch))

    steps = part.per_epoch / rows_per_batch
    return TrainBatches(part._replace(rows=endless(plan), per_epoch=steps), *process)


def choose_buckets(lengths: np.ndarray, longest: int) -> tuple[int, ...]:
    """At most `NUM_BUCKETS` lengths that pad `lengths` the least; the last is `longest`."""
    edges = np.array([*range(BUCKET_MULTIPLE, longest, BUCKET_MULTIPLE), longest])
    counts = np.searchsorted(np.sort(lengths), edges, side="right")
    # cost[i, j]: padded length of all that lie above edge i and up to edge j; i = 0 is no edge.
    counts = np.concatenate([[0], counts])
    cost = (counts[None, 1:] - counts[:, None]) * edges.astype(np.float64)
    cost[np.tril_indices(len(edges) + 1, -1, len(edges))] = np.inf
    # The least up to each edge, and its buckets: with one more as long as that pads less.
    best, chosen = cost[0], [(edge,) for edge in edges.tolist()]
    for _ in range(NUM_BUCKETS - 1):
        through = best[:, None] + cost[1:]
        before, least = through.argmin(axis=0).tolist(), through.min(axis=0)
        chosen = [
            (*chosen[before[j]], of[-1]) if least[j] < best[j] else of
            for j, of in enumerate(chosen)
        ]
        best = np.minimum(best, least)
    used = {*np.searchsorted(chosen[-1], lengths).tolist(), len(chosen[-1]) - 1}
    return tuple(bucket for i, bucket in enumerate(chosen[-1]) if i in used)


def by_length(lengths: np.ndarray, longest: int, size: int) -> list[tuple[int, np.ndarray]]:
    """Batches of at most `size` rows: the bucket of each, and the numbers of its rows."""
    buckets = choose_buckets(lengths, longest)
    of_bucket = np.searchsorted(buckets, lengths)
    plan = []
    for b, bucket in enumerate(buckets):
        members = np.flatnonzero(of_bucket == b)
        plan += [(bucket, members[i : i + size]) for i in range(0, len(members), size)]
    return plan


def padded(numbers: np.ndarray, size: int) -> np.ndarray:
    """`numbers`, and -1 up to `size` of them."""
    return np.pad(numbers, (0, size - len(numbers)), constant_values=-1)
