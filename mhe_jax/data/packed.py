"""Rows that hold several examples each, kept apart by their segments (`data.packing`).

    text   an example is an item of the source with eos; an item longer than a row is cut into parts
           of nearly equal length, an empty item is left out
    pairs  an example is a pair; empty sides and pairs that are too long are left out

Each segment of a text and of a target begins with bos. All rows have the same shape, S = T =
`data.sequence_length`. The masks of an example depend on seed, epoch and example alone.
"""

from collections.abc import Sequence

import numpy as np

from mhe_jax.config import DataConfig, InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.data import examples
from mhe_jax.data.batches import Draw, TrainRows
from mhe_jax.data.blocks import RowMaker
from mhe_jax.data.examples import Row, num_predictions
from mhe_jax.data.packing import Plan
from mhe_jax.data.pairs import Usable, encode, rows_of
from mhe_jax.data.sources import Source
from mhe_jax.data.tokenizer import Tokenizer
from mhe_jax.data.tokens import TokenFile, item_ends


class _Packed(TrainRows):
    """Endless rows, planned by `packing`; `plan` says which examples each row holds."""

    plan: Plan

    def __init__(
        self,
        data: DataConfig,
        seed: int,
        tokenizer: Tokenizer,
        source: Source,
        rows_per_batch: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        super().__init__(rows_per_batch, process_index, process_count)
        self.tokenizer, self.source, self.text = tokenizer, source, source.key
        self._seed, self._length = seed, data.sequence_length
        self._most = num_predictions(data.sequence_length, data.mask_rate)

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return self.plan.num_rows

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The packed rows with these numbers, counted from the first step."""
        members = [self.plan.row(number) for number in numbers]
        unpacked = iter(self.examples([(epoch, int(i)) for epoch, row in members for i in row]))
        return [
            examples.pack([next(unpacked) for _ in row], self._length, self._most)
            for _, row in members
        ]

    def examples(self, wanted: Sequence[tuple[int, int]]) -> list[Row]:
        """Each (epoch, example) as a row of its own."""
        raise NotImplementedError

    def _describe(self, what: str) -> str:
        return (
            f"{self.source.name}: {what}; an epoch is {self.num_rows:,} packed rows of "
            f"{self._length}, {self.plan.fullness:.0%} full, {self.steps_per_epoch:,.1f} steps"
        )


class PackedText(_Packed):
    """Packed rows of running text.

    The whole source is tokenized once, and the tokens are kept in the cache: two bytes each up to a
    vocabulary of 65,536.
    """

    def __init__(
        self,
        data: DataConfig,
        seed: int,
        tokenizer: Tokenizer,
        source: Source,
        maker: RowMaker,
        *process: int,
    ):
        super().__init__(data, seed, tokenizer, source, data.batch_size, *process)
        self.maker = maker
        cache = cache_directory(data.cache_directory)
        self._tokens = TokenFile(source, tokenizer, cache)
        self._cuts, is_last = cut_items(item_ends(self._tokens), self._length - maker.begin)
        lengths = np.diff(self._cuts)
        used = np.flatnonzero(lengths > 1)  # a single token is the eos of an empty item
        if not len(used):
            raise InputError(f"{source.name}: has no text, only empty items")
        self._parts = used.astype(np.int32 if len(lengths) < 1 << 31 else np.int64)
        self.num_examples, self.num_empty = len(used), len(lengths) - len(used)
        sizes, capacity = lengths[used][:, None] + maker.begin, (self._length,)
        if maker.mask_rate is not None:
            # Besides its tokens, an example needs room for its predictions.
            masked = np.maximum(1, np.rint(maker.mask_rate * (lengths - is_last)[used]))
            sizes = np.concatenate([sizes, masked.astype(np.int64)[:, None]], axis=1)
            capacity = (self._length, self._most)
        self.plan = Plan(sizes, capacity, seed)

    def describe(self) -> str:
        """One line for the log."""
        return self._describe(
            f"{self.num_examples:,} examples ({self.num_empty:,} empty items left out)"
        )

    def examples(self, wanted: Sequence[tuple[int, int]]) -> list[Row]:
        """Each (epoch, example) as a row of its own, without padding."""
        return [self._example(epoch, i) for epoch, i in wanted]

    def _example(self, epoch: int, i: int) -> Row:
        part = int(self._parts[i])
        ids = self._tokens[self._cuts[part] : self._cuts[part + 1]]
        seed = [Draw.PACKED_MASKS, self._seed, epoch, i]
        generator = np.random.default_rng(seed)
        return self.maker.make(ids, len(ids) + self.maker.begin, generator)


class PackedPairs(_Packed):
    """Packed rows of pairs: source and target of a pair carry the same segment number.

    A batch has as many rows as `tokens_per_batch` holds: source and target, T tokens each.
    """

    def __init__(
        self, data: DataConfig, seed: int, tokenizer: Tokenizer, source: Source, *process: int
    ):
        rows = rows_of(data, data.sequence_length)
        super().__init__(data, seed, tokenizer, source, rows, *process)
        self.usable = Usable(data, tokenizer, source)
        self.plan = Plan(self.usable.lengths, (self._length, self._length), seed)

    def describe(self) -> str:
        """One line for the log."""
        return self._describe(str(self.usable))

    def examples(self, wanted: Sequence[tuple[int, int]]) -> list[Row]:
        """Each (epoch, pair) as a row of its own."""
        numbers = self.usable.numbers[[i for _, i in wanted]]
        return encode(self.source, self.tokenizer, numbers, self._length)


def cut_items(ends: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions [N + 1] that cut the items ending at `ends` into N parts of at most `longest`.

    The second result [N] tells whether each part is the last of its item.

    >>> cuts, is_last = cut_items(np.array([2, 9]), 3)
    >>> cuts.tolist(), is_last.tolist()
    ([0, 2, 4, 6, 9], [True, False, False, True])
    """
    lengths = np.diff(ends, prepend=0)
    parts = -(-lengths // longest)
    item = np.repeat(np.arange(len(ends)), parts)
    part = np.arange(len(item)) - np.repeat(np.cumsum(parts) - parts, parts) + 1
    stops = ends[item] - lengths[item] + part * lengths[item] // parts[item]
    return np.concatenate([[0], stops]), part == parts[item]
