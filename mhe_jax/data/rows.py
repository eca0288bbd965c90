"""Rows of running text: the tokens of all items in order, eos after each.

    blocks    an epoch begins at a random token, and is cut into rows without gap or overlap
    packed    a row holds whole items, none of which sees another (`data.packing`)

Every token is in one row of an epoch. The task decides how many tokens a row takes, and how they
become one: `RowMaker`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grain
import numpy as np

from mhe_jax.config import DataConfig
from mhe_jax.data import examples
from mhe_jax.data.batches import ENDLESS, Draw, EvaluationBatches, Part, Planned
from mhe_jax.data.examples import Row, num_predictions
from mhe_jax.data.packing import Plan
from mhe_jax.data.text import Text
from mhe_jax.data.tokens import Tokens


@dataclass(frozen=True)
class RowMaker:
    """How the tokens of a text become a row.

    `make(ids, length, generator)` returns a row of `length`, and draws anything random in it from
    the generator; at most length - begin ids fit. `mask_rate` is the share of the tokens that are
    predicted, at chosen positions; None if every position of a row has its prediction.
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

    rows = (
        grain.MapDataset.range(count)
        .seed(seed)
        .shuffle()
        .repeat()
        .map_with_index(cut)
        .random_map(lambda ids, generator: maker.make(ids, length, generator))
    )
    about = f"{text}, {total:,} tokens in {count:,} rows of {wanted}"
    return Part(rows, count, text.key, about)


def packed(text: Text, tokens: Tokens, data: DataConfig, maker: RowMaker, seed: int) -> Part:
    """Endless rows of several items each, planned by `packing`.

    An item longer than a row is cut into parts of nearly equal length; an empty one is left out.
    Each segment begins with bos. The masks of an example depend on seed, epoch and example alone.
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
    about = f"{text}, {len(used):,} examples ({left:,} empty items left out) in {plan}"
    return Part(grain.MapDataset.range(ENDLESS).map(row), plan.num_rows, text.key, about)


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


class EvaluationBlocks(EvaluationBatches):
    """A split in windows of as many tokens as a row takes, `stride` tokens apart.

    Without a stride they do not overlap. With stride s, the first window predicts all of its
    tokens; each later one reads those that the windows before it have predicted, and predicts the s
    that follow: so every token is predicted once. The masks of a row depend on the row alone.
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
            row = maker.make(ids, length, np.random.default_rng([Draw.BLOCK_MASKS, 0, number]))
            if number >= count:
                return examples.padding_like(row)
            if number:
                row["weights"][: wanted - step] = 0
            return row

        def plan(batch: int) -> Planned:
            return Planned(row, range(batch * batch_size, (batch + 1) * batch_size))

        batches = grain.MapDataset.range(math.ceil(count / batch_size)).map(plan)
        super().__init__(batches, text.key, *process)

    @property
    def num_words(self) -> int:
        """`count_words` of the split, the denominator of a perplexity per word."""
        return count_words(text for (text,) in self._items)


def num_windows(num_tokens: int, length: int, stride: int) -> int:
    """Windows of `length` that begin `stride` apart and hold all tokens; one if there are none."""
    return 1 + max(0, math.ceil((num_tokens - length) / stride))


def count_words(lines: Iterable[str]) -> int:
    """Words between white space, and one end of line for each line.

    >>> count_words(["two words", ""])
    4
    """
    return sum(len(line.split()) + 1 for line in lines)
