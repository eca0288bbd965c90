"""Batches of sentence pairs of similar length, for translation.

The length of a pair is the longer of source and target in tokens, with eos. A pair goes into the
shortest bucket that holds it, and a batch holds pairs of one bucket b only, padded to S = T = b:

    rows(b) = tokens_per_batch / 2b, rounded down to a multiple of row_multiple (at least one)

An epoch shuffles each bucket, cuts it into batches and shuffles the batches of all buckets. Each
pair that is neither empty nor too long appears once; where a bucket does not fill its last batch,
pairs from the beginning of its order fill it up, as often as it takes: those of a bucket with fewer
pairs than rows appear many times.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mhe_jax.config import DataConfig, InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.data import examples
from mhe_jax.data.batches import Epochs, EvaluationBatches, TrainBatches
from mhe_jax.data.cache import built_once, key_of
from mhe_jax.data.examples import Row
from mhe_jax.data.sources import Source
from mhe_jax.data.tokenizer import Tokenizer

NUM_BUCKETS = 6  # each is a shape that is compiled
BUCKET_MULTIPLE = 4


def token_lengths(source: Source, tokenizer: Tokenizer, cache: Path) -> np.ndarray:
    """Tokens of each pair's source and target, without eos: int32 [pairs, 2]; computed once."""

    def build(temporary: Path) -> None:
        lengths = np.zeros((len(source), 2), np.int32)
        for start in range(0, len(source), 1 << 14):
            chunk = [source[i] for i in range(start, min(start + (1 << 14), len(source)))]
            for side in (0, 1):
                rows = tokenizer.encode_batch([pair[side] for pair in chunk], num_threads=-1)
                lengths[start : start + len(chunk), side] = [len(ids) for ids in rows]
        lengths.tofile(temporary)

    path = built_once(cache / "lengths" / f"{key_of(source.key, tokenizer.key)}.int32", build)
    return np.fromfile(path, np.int32).reshape(-1, 2)


class Usable:
    """The pairs of a source that can be trained on: neither side empty, none too long.

    `numbers` [pairs] are their numbers in the source, `lengths` [pairs, 2] their tokens with eos.

    Raises:
      InputError: there are none.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, source: Source):
        cache = cache_directory(data.cache_directory)
        lengths = token_lengths(source, tokenizer, cache) + 1
        too_long = lengths.max(axis=1) > data.sequence_length
        empty = lengths.min(axis=1) == 1
        self.num_too_long, self.num_empty = int((too_long & ~empty).sum()), int(empty.sum())
        self.numbers = np.flatnonzero(~(too_long | empty)).astype(np.int32)
        self.lengths = lengths[self.numbers]
        if not len(self.numbers):
            raise InputError(
                f"{source.name}: none of {len(source):,} pairs can be used: "
                f"{self.num_empty:,} have an empty side, {self.num_too_long:,} are longer than "
                f"data.sequence_length={data.sequence_length} tokens"
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def __str__(self) -> str:
        return (
            f"{len(self):,} pairs ({self.num_too_long:,} too long, "
            f"{self.num_empty:,} with an empty side)"
        )


def buckets_for(
    data: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source]
) -> tuple[int, ...]:
    """`data.length_buckets`, or those that pad the pairs of all `sources` the least."""
    if data.length_buckets:
        return data.length_buckets
    usable = [Usable(data, tokenizer, source) for source in sources]
    longer = np.concatenate([pairs.lengths.max(axis=1) for pairs in usable])
    return choose_buckets(longer, data.sequence_length)


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
    best, steps = cost[0], []
    for _ in range(NUM_BUCKETS - 1):
        through = best[:, None] + cost[1:]
        steps.append(np.argmin(through, axis=0))
        # Staying with fewer buckets is allowed: the step then leads nowhere.
        stay = best <= through.min(axis=0)
        steps[-1][stay] = -1
        best = np.minimum(best, through.min(axis=0))
    chosen, j = [len(edges) - 1], len(edges) - 1
    for step in reversed(steps):
        if step[j] >= 0:
            j = int(step[j])
            chosen.append(j)
    occupied = np.diff(counts[[0, *(np.array(chosen[::-1]) + 1)]]) > 0
    return tuple(
        int(edges[j])
        for j, used in zip(chosen[::-1], occupied, strict=True)
        if used or edges[j] == longest
    )


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


class TrainPairs(TrainBatches):
    """Endless batches of pairs, planned as the module says."""

    def __init__(
        self,
        data: DataConfig,
        seed: int,
        tokenizer: Tokenizer,
        source: Source,
        buckets: tuple[int, ...],
        process_index: int = 0,
        process_count: int = 1,
    ):
        super().__init__(process_index, process_count)
        self.tokenizer, self.source, self.buckets = tokenizer, source, buckets
        self.text = source.key
        self._seed = seed
        self.usable = Usable(data, tokenizer, source)
        self.rows = tuple(rows_of(data, bucket) for bucket in self.buckets)
        of_bucket = np.searchsorted(self.buckets, self.usable.lengths.max(axis=1))
        self._members = [self.usable.numbers[of_bucket == b] for b in range(len(self.buckets))]
        self._counts = [-(-len(m) // r) for m, r in zip(self._members, self.rows, strict=True)]
        self._own = [self._own_rows(rows) for rows in self.rows]
        self._padding = 1 - float(self.usable.lengths.sum()) / (
            2 * sum(b * len(m) for b, m in zip(self.buckets, self._members, strict=True))
        )
        self._epoch = Epochs(self._shuffled)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return sum(self._counts)

    def describe(self) -> str:
        """One line for the log."""
        buckets = zip(self.rows, self.buckets, self._counts, strict=True)
        shapes = " ".join(f"{rows}×{bucket}" for rows, bucket, count in buckets if count)
        return (
            f"{self.source.name}: {self.usable}; an epoch is {self.steps_per_epoch:,} steps; "
            f"rows × length {shapes}, {self._padding:.0%} padding"
        )

    def pair_numbers(self, step: int) -> tuple[int, np.ndarray]:
        """The length and the pairs of global batch `step`."""
        epoch, i = divmod(step, self.steps_per_epoch)
        of_batch, starts, orders = self._epoch(epoch)
        bucket, start = int(of_batch[i]), int(starts[i])
        order, rows = orders[bucket], self.rows[bucket]
        return self.buckets[bucket], np.take(order, range(start, start + rows), mode="wrap")

    def batch(self, step: int) -> Row:
        """The rows that this process holds of global batch `step`."""
        length, numbers = self.pair_numbers(step)
        bucket = self.buckets.index(length)
        rows = encode(self.source, self.tokenizer, numbers[self._own[bucket]], length)
        return examples.stack(rows)

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Bucket and start of each batch, and the order of each bucket."""
        generator = np.random.default_rng([self._seed, epoch])
        orders = [generator.permutation(members) for members in self._members]
        of_batch = np.repeat(np.arange(len(self.buckets)), self._counts)
        starts = np.concatenate(
            [np.arange(n) * r for n, r in zip(self._counts, self.rows, strict=True)]
        )
        shuffled = generator.permutation(len(of_batch))
        return of_batch[shuffled], starts[shuffled], orders


class EvaluationPairs(EvaluationBatches):
    """All pairs of a split in order of bucket, none left out.

    A batch also has `index` [rows], the number of each pair in `source` (-1 for padding): the texts
    to compare with are `source[index]`. Sentences are cut to `longest` tokens with eos.
    """

    def __init__(
        self,
        data: DataConfig,
        longest: int,
        tokenizer: Tokenizer,
        source: Source,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        super().__init__(process_index, process_count)
        self.tokenizer, self.source, self.text = tokenizer, source, source.key
        self._rows = batch_size
        self._own = self._own_rows(batch_size)
        cache = cache_directory(data.cache_directory)
        tokens = token_lengths(source, tokenizer, cache)
        lengths = np.minimum(tokens.max(axis=1) + 1, longest)
        self._plan = by_length(lengths, longest, batch_size)

    def __len__(self) -> int:
        return len(self._plan)

    def batch(self, step: int) -> Row:
        """The rows that this process holds of batch `step`."""
        self._check(step)
        length, members = self._plan[step]
        numbers = np.full(self._rows, -1, np.int32)
        numbers[: len(members)] = members
        numbers = numbers[self._own]
        rows = encode(self.source, self.tokenizer, numbers[numbers >= 0], length)
        empty = examples.padding_like(examples.translation_row([], [], length))
        rows += [empty] * (len(numbers) - len(rows))
        return examples.stack(rows) | {"index": numbers}


def encode(source: Source, tokenizer: Tokenizer, numbers: np.ndarray, length: int) -> list[Row]:
    """A row of `length` for each of the pairs `numbers`."""
    pairs = [source[int(number)] for number in numbers]
    texts = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    ids = tokenizer.encode_batch(texts)
    return [
        examples.translation_row(src, tgt, length)
        for src, tgt in zip(ids[: len(pairs)], ids[len(pairs) :], strict=True)
    ]
