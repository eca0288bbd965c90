"""A plan of which examples share a row, in which any step can be looked up.

An example takes up some of a row's room, in one or more measures (tokens; source and target; tokens
and predictions). Examples of the same sizes form a class. One plan, by best fit from large to
small, says how many examples of which classes make up each row. It takes seconds for millions of
examples and serves all epochs, each of which has each example once:

    epoch = a random order of the rows, and a random order within each class
"""

import functools
from typing import NamedTuple

import numpy as np

from mhe_jax.data.batches import Draw


class Pattern(NamedTuple):
    """The contents of `repeats` rows: `copies` examples of each of `classes`."""

    repeats: int
    classes: np.ndarray
    copies: np.ndarray


def fill(sizes: np.ndarray, counts: np.ndarray, capacity: np.ndarray) -> list[Pattern]:
    """Best fit decreasing, over classes of size [C, D] with `counts` [C] members each; rows that
    look alike are one group.
    """
    smallest = sizes.min(axis=0)
    left = np.empty((64, len(capacity)), np.int64)  # room in the rows of each open group
    groups: list[tuple[int, list[tuple[int, int]]]] = []  # (repeats, [(class, copies)])
    done: list[tuple[int, list[tuple[int, int]]]] = []

    def keep(repeats: int, content: list[tuple[int, int]], room: np.ndarray) -> None:
        nonlocal left
        if (room < smallest).any():
            done.append((repeats, content))
            return
        if len(groups) == len(left):
            left = np.concatenate([left, np.empty_like(left)])
        left[len(groups)] = room
        groups.append((repeats, content))

    for k in np.argsort(-(sizes / capacity).sum(axis=1), kind="stable").tolist():
        size, count = sizes[k], int(counts[k])
        while count:
            open_groups = left[: len(groups)]
            fits = np.flatnonzero((open_groups >= size).all(axis=1))
            if len(fits):
                i = int(fits[np.argmin(open_groups[fits].sum(axis=1))])
                (repeats, content), room = groups[i], left[i].copy()
                groups[i], left[i] = groups[-1], left[len(groups) - 1]
                groups.pop()
            else:
                repeats, content, room = count, [], capacity
            copies = min(int((room // np.maximum(size, 1))[size > 0].min()), count)
            filled = min(repeats, count // copies)
            if content and filled < repeats:
                keep(repeats - filled, content, room)
            keep(filled, [*content, (k, copies)], room - copies * size)
            count -= filled * copies
    return [Pattern(repeats, *np.array(content).T) for repeats, content in done + groups]


class Plan:
    """The `num_rows` rows that hold all examples of `sizes` [N, D] within `capacity` [D]."""

    def __init__(self, sizes: np.ndarray, capacity: tuple[int, ...], seed: int):
        base = tuple(c + 1 for c in capacity)
        codes, class_of, counts = np.unique(
            np.ravel_multi_index(tuple(sizes.T), base), return_inverse=True, return_counts=True
        )
        # Sorting 16-bit numbers takes numpy a fraction of the time.
        self._class_of = class_of.astype(np.uint16 if len(codes) <= 1 << 16 else np.int32)
        classes = np.stack(np.unravel_index(codes, base), axis=1)
        self._patterns = fill(classes, counts, np.array(capacity))
        self._first_member = np.cumsum(counts) - counts
        # Where in each of its classes a pattern begins: after the members that earlier ones took.
        taken = np.zeros(len(codes), np.int64)
        self._first_taken = []
        for pattern in self._patterns:
            self._first_taken.append(taken[pattern.classes])
            taken[pattern.classes] += pattern.repeats * pattern.copies
        self._ends = np.cumsum([pattern.repeats for pattern in self._patterns])
        self.num_rows = int(self._ends[-1])
        self._seed = seed
        self._epoch = functools.lru_cache(2)(self._shuffled)  # batches straddle two epochs
        full = float(sizes[:, 0].sum()) / (self.num_rows * capacity[0])
        self.about = f"{self.num_rows:,} packed rows of {capacity[0]}, {full:.0%} full"

    def row(self, number: int) -> tuple[int, np.ndarray]:
        """The epoch, and the examples, of row `number`, counted from the first step."""
        epoch, i = divmod(number, self.num_rows)
        rows, members = self._epoch(epoch)
        row = int(rows[i])
        p = int(np.searchsorted(self._ends, row, side="right"))
        repeats, classes, copies = self._patterns[p]
        repeat = row - (int(self._ends[p]) - repeats)
        starts = self._first_member[classes] + self._first_taken[p] + repeat * copies
        return epoch, np.concatenate(
            [members[start : start + n] for start, n in zip(starts, copies, strict=True)]
        )

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of an epoch's rows, and the members of all classes, class by class."""
        generator = np.random.default_rng([Draw.PACKED_ORDER, self._seed, epoch])
        rows = generator.permutation(_count(self.num_rows))
        drawn = generator.permutation(_count(len(self._class_of)))
        return rows, drawn[np.argsort(self._class_of[drawn], kind="stable")]


def _count(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32 if n < 1 << 31 else np.int64)
