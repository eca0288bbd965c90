"""Batches of sentence pairs, for translation: of similar length, or packed.

The length of a pair is the longer of source and target in tokens, with eos. A pair goes into the
shortest bucket that holds it, and a batch holds pairs of one bucket b only, padded to S = T = b:

    rows(b) = tokens_per_batch / 2b, rounded down to a multiple of row_multiple (at least one)

An epoch shuffles each bucket, cuts it into batches and shuffles the batches of all buckets. Each
pair that is neither empty nor too long appears once; where a bucket does not fill its last batch,
pairs from the beginning of its order fill it up, as often as it takes: those of a bucket with fewer
pairs than rows appear many times.
"""

import functools
from collections.abc import Sequence

import grain
import numpy as np

from mhe_jax.config import DataConfig, InputError
from mhe_jax.data import examples
from mhe_jax.data.batches import ENDLESS, EvaluationBatches, Part, Planned, padded
from mhe_jax.data.examples import Row
from mhe_jax.data.packing import Plan
from mhe_jax.data.text import Text
from mhe_jax.data.tokens import Tokens

NUM_BUCKETS = 6  # each is a shape that is compiled
BUCKET_MULTIPLE = 4


class Pairs:
    """The pairs of a text that can be trained on: neither side empty, none too long.

    `numbers` [pairs] are their numbers in the text, `lengths` [pairs, 2] their tokens with eos.

    Raises:
      InputError: there are none.
    """

    def __init__(self, text: Text, sides: Sequence[Tokens], data: DataConfig):
        self.text, self._sides = text, sides
        lengths = np.stack([side.lengths for side in sides], axis=1)
        too_long = lengths.max(axis=1) > data.sequence_length
        empty = lengths.min(axis=1) == 1
        left = (
            f"{int((too_long & ~empty).sum()):,} too long, {int(empty.sum()):,} with an empty side"
        )
        self.numbers = np.flatnonzero(~(too_long | empty)).astype(np.int32)
        self.lengths = lengths[self.numbers]
        self.about = f"{text}, {len(self.numbers):,} of them used ({left})"
        if not len(self.numbers):
            raise InputError(
                f"{text.name}: none of {len(text):,} pairs can be used: {left} for "
                f"data.sequence_length={data.sequence_length}"
            )

    def row(self, length: int, number: int) -> Row:
        """Pair `number` of the text, as a row of `length`."""
        source, target = (side.item(number) for side in self._sides)
        return examples.translation_row(source, target, length)


def choose_buckets(lengths: np.ndarray, longest: int) -> tuple[int, ...]:
    """At most `NUM_BUCKETS` lengths that pad `lengths` (none above `longest`) the least.

    All but the last, `longest`, are multiples of `BUCKET_MULTIPLE`; only the last may be empty.

    >>> choose_buckets(np.array([3, 3, 11, 12]), 40)
    (4, 12, 40)
    """
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
    """Batches of at most `size` rows: the bucket of each, and the numbers of its rows.

    >>> [(bucket, rows.tolist()) for bucket, rows in by_length(np.array([3, 12, 3, 4]), 40, 2)]
    [(4, [0, 2]), (4, [3]), (12, [1])]
    """
    buckets = choose_buckets(lengths, longest)
    of_bucket = np.searchsorted(buckets, lengths)
    plan = []
    for b, bucket in enumerate(buckets):
        members = np.flatnonzero(of_bucket == b)
        plan += [(bucket, members[i : i + size]) for i in range(0, len(members), size)]
    return plan


def rows_of(data: DataConfig, bucket: int) -> int:
    """Rows of a global batch of pairs that are padded to `bucket` tokens a side."""
    multiple = data.row_multiple
    return max(data.tokens_per_batch // (2 * bucket) // multiple, 1) * multiple


def bucketed(pairs: Pairs, data: DataConfig, buckets: Sequence[int], seed: int) -> Part:
    """Plans of endless batches, as the module says."""
    rows = [rows_of(data, bucket) for bucket in buckets]
    of_bucket = np.searchsorted(buckets, pairs.lengths.max(axis=1))
    members = [pairs.numbers[of_bucket == b] for b in range(len(buckets))]
    counts = [-(-len(of) // size) for of, size in zip(members, rows, strict=True)]
    steps = sum(counts)

    @functools.lru_cache(2)  # batches straddle two epochs
    def shuffled(epoch: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Bucket and start of each batch, and the order of each bucket."""
        generator = np.random.default_rng([seed, epoch])
        orders = [generator.permutation(of) for of in members]
        of_batch = np.repeat(np.arange(len(buckets)), counts)
        starts = np.concatenate([np.arange(n) * r for n, r in zip(counts, rows, strict=True)])
        order = generator.permutation(len(of_batch))
        return of_batch[order], starts[order], orders

    def plan(step: int) -> Planned:
        epoch, i = divmod(step, steps)
        of_batch, starts, orders = shuffled(epoch)
        b, start = int(of_batch[i]), int(starts[i])
        numbers = np.take(orders[b], range(start, start + rows[b]), mode="wrap")
        return Planned(functools.partial(pairs.row, buckets[b]), numbers)

    padding = 1 - float(pairs.lengths.sum()) / (
        2 * sum(b * len(of) for b, of in zip(buckets, members, strict=True))
    )
    shapes = zip(rows, buckets, counts, strict=True)
    shown = " ".join(f"{size}×{bucket}" for size, bucket, count in shapes if count)
    about = f"{pairs.about}; rows × length {shown}, {padding:.0%} padding"
    return Part(grain.MapDataset.range(ENDLESS).map(plan), steps, pairs.text.key, about)


def packed(pairs: Pairs, data: DataConfig, seed: int) -> Part:
    """Endless rows of several pairs each: both sides of a pair carry the same segment number."""
    length = data.sequence_length
    plan = Plan(pairs.lengths, (length, length), seed)

    def row(number: int) -> Row:
        _, members = plan.row(number)
        rows = [pairs.row(length, int(pairs.numbers[i])) for i in members]
        return examples.pack(rows, length)

    rows = grain.MapDataset.range(ENDLESS).map(row)
    return Part(rows, plan.num_rows, pairs.text.key, f"{pairs.about} in {plan}")


class EvaluationPairs(EvaluationBatches):
    """All pairs of a split in order of bucket, none left out.

    A batch also has `index` [rows], the number of each pair in the text (-1 for padding). Sentences
    are cut to `longest` tokens with eos.
    """

    def __init__(
        self, text: Text, sides: Sequence[Tokens], longest: int, batch_size: int, *process: int
    ):
        lengths = np.minimum(np.max([side.lengths for side in sides], axis=0), longest)
        batches = by_length(lengths, longest, batch_size)

        def row(length: int, number: int) -> Row:
            if number < 0:
                found = examples.padding_like(examples.translation_row([], [], length))
            else:
                source, target = (side.item(number) for side in sides)
                found = examples.translation_row(source, target, length)
            return found | {"index": np.array(number, np.int32)}

        def plan(step: int) -> Planned:
            length, numbers = batches[step]
            return Planned(functools.partial(row, length), padded(numbers, batch_size))

        super().__init__(grain.MapDataset.range(len(batches)).map(plan), text.key, *process)
