"""Rows of running text, and of pairs of sentences; each token is in one row of an epoch.

    blocks     the text from a random token on, cut into rows without gap or overlap
    packed     whole items or pairs in a row, none of which sees another (`packing`)
    bucketed   pairs in batches of one bucket b, the shortest that holds both sides, S = T = b

    rows(b) = tokens_per_batch / 2b, rounded down to a multiple of row_multiple (at least one)

An epoch shuffles each bucket, cuts it into batches and shuffles the batches of all buckets. Where a
bucket does not fill its last batch, pairs from the beginning of its order do, as often as it takes.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import grain
import numpy as np

from mhe_jax.config import DataConfig, InputError
from mhe_jax.data import batches, examples
from mhe_jax.data.batches import Draw, EvaluationBatches, Part, Planned, endless, padded
from mhe_jax.data.examples import Row, num_predictions
from mhe_jax.data.packing import Plan
from mhe_jax.data.text import Text
from mhe_jax.data.tokens import Tokens


class RowMaker(NamedTuple):
    """How at most length - begin tokens of a text become a row: `make(ids, length, generator)`.

    `mask_rate` is the share of the tokens that are predicted, at chosen positions; None for all.
    """

    make: Callable[[Sequence[int] | np.ndarray, int, np.random.Generator], Row]
    begin: int = 1
    mask_rate: float | None = None


def blocks(text: Text, tokens: Tokens, data: DataConfig, maker: RowMaker, seed: int) -> Part:
    """Endless rows, in an order drawn anew for each epoch."""
    length = data.sequence_length
    wanted, total = length - maker.begin, tokens.num_tokens
    count = math.ceil(total / wanted)

    @functools.lru_cache(2)
    def shift(epoch: int) -> int:
        return int(np.random.default_rng([Draw.SHIFT, seed, epoch]).integers(total))

    def cut(number: int, block: int) -> np.ndarray:
        """Row `number` since the first step is this block of its epoch; the last may be short."""
        first, last = block * wanted, min((block + 1) * wanted, total)
        start = (first + shift(number // count)) % total if count > 1 else 0
        stop = start + last - first
        return np.concatenate([tokens[start:stop], tokens[: max(0, stop - total)]])

    order = grain.MapDataset.range(count).seed(seed).shuffle().repeat().map_with_index(cut)
    rows = order.random_map(lambda ids, generator: maker.make(ids, length, generator))
    about = f"{text}, {total:,} tokens in {count:,} rows of {wanted}"
    return Part(rows, count, text.key, about)


def packed(text: Text, tokens: Tokens, data: DataConfig, maker: RowMaker, seed: int) -> Part:
    """Endless rows of several items each: one longer than a row is cut, an empty one left out.

    The masks of an example depend on seed, epoch and example alone.
    """
    length, most = data.sequence_length, num_predictions(data.sequence_length, data.mask_rate)
    cuts, is_last = cut_items(tokens.ends, length - maker.begin)
    lengths = np.diff(cuts)
    used = np.flatnonzero(lengths > 1)  # a single token is the eos of an empty item
    sizes, capacity = lengths[used][:, None] + maker.begin, (length,)
    if maker.mask_rate is not None:
        # Besides its tokens, an example needs room for its predictions.
        masked = np.maximum(1, np.rint(maker.mask_rate * (lengths - is_last)[used]))
        sizes = np.concatenate([sizes, masked.astype(np.int64)[:, None]], axis=1)
        capacity = (length, most)
    plan = Plan(sizes, capacity, seed)

    def example(epoch: int, number: int) -> Row:
        part = int(used[number])
        ids = tokens[int(cuts[part]) : int(cuts[part + 1])]
        generator = np.random.default_rng([Draw.PACKED_MASKS, seed, epoch, number])
        return maker.make(ids, len(ids) + maker.begin, generator)

    def row(number: int) -> Row:
        epoch, members = plan.row(number)
        return examples.pack([example(epoch, int(i)) for i in members], length, most)

    left = len(lengths) - len(used)
    about = f"{text}, {len(used):,} examples ({left:,} empty items left out) in {plan.about}"
    return Part(endless(row), plan.num_rows, text.key, about)


def cut_items(ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions [N + 1] that cut the items ending at `ends` into N nearly equal parts of at most
    `longest`, and whether each part is the last of its item [N].
    """
    lengths = np.diff(ends, prepend=0)
    parts = -(-lengths // longest)
    item = np.repeat(np.arange(len(ends)), parts)
    part = np.arange(len(item)) - np.repeat(np.cumsum(parts) - parts, parts) + 1
    stops = ends[item] - lengths[item] + part * lengths[item] // parts[item]
    return np.concatenate([[0], stops]), part == parts[item]


class EvaluationBlocks(EvaluationBatches):
    """A split in windows of as many tokens as a row takes, `stride` tokens apart, or side by side.

    Each but the first predicts its last `stride` tokens alone, so every token is predicted once.
    The masks of a row depend on the row alone.
    """

    def __init__(
        self,
        text: Text,
        tokens: Tokens,
        length: int,
        maker: RowMaker,
        batch_size: int,
        *process: int,
        stride: int | None = None,
    ):
        self._items = text
        wanted = length - maker.begin
        step = stride or wanted
        count = num_windows(tokens.num_tokens, wanted, step)

        def row(number: int) -> Row:
            ids = tokens[number * step : number * step + wanted]
            generator = np.random.default_rng([Draw.BLOCK_MASKS, 0, number])
            row = maker.make(ids, length, generator)
            if number:
                row["weights"][: wanted - step] = 0
            return row

        numbers = np.split(np.arange(count), range(batch_size, count, batch_size))
        super().__init__([Planned(row, padded(n, batch_size)) for n in numbers], text.key, *process)

    @property
    def num_words(self) -> int:
        """`count_words` of the split, the denominator of a perplexity per word."""
        return count_words(text for (text,) in self._items)


def num_windows(num_tokens: int, length: int, stride: int) -> int:
    """Windows of `length` that begin `stride` apart and hold all tokens; one if there are none."""
    return 1 + max(0, math.ceil((num_tokens - length) / stride))


def count_words(lines: Iterable[str]) -> int:
    """Words between white space, and one end of line for each line."""
    return sum(len(line.split()) + 1 for line in lines)


class Pairs:
    """The pairs of a text that can be trained on: neither side empty, none too long.

    `numbers` [pairs] are their numbers in the text, `lengths` [pairs, 2] their tokens with eos.
    """

    def __init__(self, text: Text, sides: Sequence[Tokens], data: DataConfig, seed: int):
        self.text, self._sides, self._data, self._seed = text, sides, data, seed
        lengths = np.stack([side.lengths for side in sides], axis=1)
        long = lengths.max(axis=1) > data.sequence_length
        empty = lengths.min(axis=1) == 1
        left = f"{(long & ~empty).sum():,} too long, {empty.sum():,} with an empty side"
        self.numbers = np.flatnonzero(~(long | empty)).astype(np.int32)
        self.lengths = lengths[self.numbers]
        self._about = f"{text}, {len(self.numbers):,} of them used ({left})"
        if not len(self.numbers):
            length = data.sequence_length
            raise InputError(f"{self._about}: data.sequence_length is {length}")

    def row(self, length: int, number: int) -> Row:
        """Pair `number` of the text, as a row of `length`."""
        source, target = (side.item(number) for side in self._sides)
        return examples.translation_row(source, target, length)

    def packed(self) -> Part:
        """Endless rows of several pairs, whose sides both carry the same segment number."""
        length = self._data.sequence_length
        plan = Plan(self.lengths, (length, length), self._seed)

        def row(number: int) -> Row:
            _, members = plan.row(number)
            return examples.pack([self.row(length, n) for n in self.numbers[members]], length)

        return Part(endless(row), plan.num_rows, self.text.key, f"{self._about} in {plan.about}")

    def bucketed(self, buckets: Sequence[int]) -> Part:
        """Plans of endless batches, as the module says."""
        rows = [rows_of(self._data, bucket) for bucket in buckets]
        of_bucket = np.searchsorted(buckets, self.lengths.max(axis=1))
        members = [self.numbers[of_bucket == b] for b in range(len(buckets))]
        counts = [-(-len(of) // size) for of, size in zip(members, rows, strict=True)]
        steps = sum(counts)

        @functools.lru_cache(2)  # batches straddle two epochs
        def shuffled(epoch: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
            """Bucket and start of each batch, and the order of each bucket."""
            generator = np.random.default_rng([self._seed, epoch])
            orders = [generator.permutation(of) for of in members]
            of_batch = np.repeat(np.arange(len(buckets)), counts)
            starts = np.concatenate([np.arange(n) * r for n, r in zip(counts, rows, strict=True)])
            order = generator.permutation(steps)
            return of_batch[order], starts[order], orders

        def plan(step: int) -> Planned:
            epoch, i = divmod(step, steps)
            of_batch, starts, orders = shuffled(epoch)
            b, start = int(of_batch[i]), int(starts[i])
            numbers = np.take(orders[b], range(start, start + rows[b]), mode="wrap")
            return Planned(functools.partial(self.row, buckets[b]), numbers)

        filled = sum(b * len(of) for b, of in zip(buckets, members, strict=True))
        padding = 1 - float(self.lengths.sum()) / (2 * filled)
        shapes = zip(rows, buckets, counts, strict=True)
        shown = " ".join(f"{size}×{bucket}" for size, bucket, count in shapes if count)
        about = f"{self._about}; rows × length {shown}, {padding:.0%} padding"
        return Part(endless(plan), steps, self.text.key, about)


def rows_of(data: DataConfig, bucket: int) -> int:
    """Rows of a global batch of pairs that are padded to `bucket` tokens a side."""
    multiple = data.row_multiple
    return max(data.tokens_per_batch // (2 * bucket) // multiple, 1) * multiple


def evaluation_pairs(
    text: Text, sides: Sequence[Tokens], longest: int, batch_size: int, *process: int
) -> EvaluationBatches:
    """All pairs of a split, cut to `longest` tokens, in order of bucket; `index` [rows] has their
    numbers in the text, -1 for padding.
    """

    def row(length: int, number: int) -> Row:
        source, target = (side.item(number) for side in sides)
        found = examples.translation_row(source, target, length)
        return found | {"index": np.array(number, np.int32)}

    lengths = np.minimum(np.max([side.lengths for side in sides], axis=0), longest)
    plan = [
        Planned(functools.partial(row, length), padded(numbers, batch_size))
        for length, numbers in batches.by_length(lengths, longest, batch_size)
    ]
    return EvaluationBatches(plan, text.key, *process)
