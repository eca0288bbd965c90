"""Rows of running text: the tokens of all items in order, eos after each.

The task decides how many tokens a row takes, and how they become a row: `RowMaker`.

Training never tokenizes a whole file. An epoch has N rows; row i starts near place

    (i + shift of the epoch) · extent / N

of the source: at the start of the item there, or between two of its words if the item is longer
than a quarter of a row. It takes the text that follows until it is full; at the end of the source
it wraps around to the beginning. N is chosen so that the rows of an epoch hold about as much as the
text, as measured on a sample. The shift is random, so that over several epochs every token is seen,
in different contexts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mhe_jax.config import DataConfig
from mhe_jax.config.data import EOS
from mhe_jax.data import examples
from mhe_jax.data.batches import Draw, Epochs, EvaluationBatches, TrainRows
from mhe_jax.data.examples import Row
from mhe_jax.data.pieces import pieces
from mhe_jax.data.sources import Source, stream
from mhe_jax.data.tokens import tokenize
from mhe_jax.data.words import AnyTokenizer

SAMPLE_ITEMS = 4096


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


def count_words(lines: Iterable[str]) -> int:
    """Words between white space, and one end of line for each line.

    >>> count_words(["two words", ""])
    4
    """
    return sum(len(line.split()) + 1 for line in lines)


def density(source: Source, tokenizer: AnyTokenizer) -> tuple[float, float]:
    """Tokens in the whole source, and bytes of text per token, measured on a sample of its items.

    Exact if the source has at most `SAMPLE_ITEMS` items, none of them long.
    """
    generator = np.random.default_rng(0)
    count = min(len(source), SAMPLE_ITEMS)
    stratum = len(source) / count
    drawn = (np.arange(count) + generator.random(count)) * stratum
    indices = np.arange(count) if stratum == 1 else drawn.astype(np.int64)
    heads, shares, size, total = [], [], 0, 0
    for index in indices.tolist():
        (data,) = source.utf8(index)
        heads.append(next(pieces(data)))
        shares.append(len(data) / max(1, len(heads[-1].encode())))
        size += source.size(index)
        total += len(data) + 1
    rows = tokenizer.encode_batch(heads, num_threads=-1)
    tokens = sum(len(ids) * share + 1 for ids, share in zip(rows, shares, strict=True))
    if not size:  # only empty rows of a column: what the others hold is not known
        return float(source.extent + len(source)), 1.0
    return tokens / size * source.extent, total / tokens


class TrainBlocks(TrainRows):
    """Endless rows of running text, drawn as the module says."""

    def __init__(
        self,
        data: DataConfig,
        seed: int,
        tokenizer: AnyTokenizer,
        source: Source,
        maker: RowMaker,
        process_index: int = 0,
        process_count: int = 1,
    ):
        super().__init__(data.batch_size, process_index, process_count)
        self.tokenizer, self.source, self.maker = tokenizer, source, maker
        self._length, self._seed = data.sequence_length, seed
        self.text = source.key
        self._wanted = self._length - maker.begin
        self.num_tokens, self._bytes_per_token = density(self.source, tokenizer)
        # Rows in an epoch. A single row starts at the beginning and may end before it is full.
        self.num_rows = max(1, math.ceil(self.num_tokens / self._wanted))
        self._order = Epochs(self._shuffled)

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"{self.source.name}: {len(self.source):,} lines, about {self.num_tokens:,.0f} tokens; "
            f"an epoch is {self.num_rows:,} rows of {self._wanted} tokens, "
            f"{self.steps_per_epoch:,.1f} steps"
        )

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The rows with these numbers, counted from the first step."""
        rows = self._fill([self._place(number) for number in numbers])
        return [self._make(ids, number) for number, ids in zip(numbers, rows, strict=True)]

    def _make(self, ids: list[int], number: int) -> Row:
        generator = np.random.default_rng([Draw.BLOCK_MASKS, self._seed, number])
        return self.maker.make(ids, self._length, generator)

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, float]:
        """The order of an epoch's rows, and its shift."""
        generator = np.random.default_rng([Draw.BLOCK_ORDER, self._seed, epoch])
        order = np.arange(self.num_rows, dtype=np.int32 if self.num_rows < 1 << 31 else np.int64)
        generator.shuffle(order)
        return order, float(generator.random())

    def _place(self, number: int) -> float:
        """Where in the source row `number`, counted from the first step, starts."""
        if self.num_rows == 1:
            return 0.0
        epoch, i = divmod(number, self.num_rows)
        order, shift = self._order(epoch)
        return (int(order[i]) + shift) / self.num_rows * self.source.extent

    def _text(self, place: float) -> Iterator[tuple[str, bool]]:
        # Rows go back to the start of an item by at most a quarter of a row, so every token keeps
        # at least three quarters of its chance; with more, some would hardly ever be seen.
        yield from stream(self.source, place, self._wanted * self._bytes_per_token / 4)
        while self.num_rows > 1:
            yield from stream(self.source, 0.0, math.inf)

    def _fill(self, places: list[float]) -> list[list[int]]:
        """The first tokens of the text from each place; the rows are tokenized together."""
        texts = [self._text(place) for place in places]
        rows: list[list[int]] = [[] for _ in places]
        unfinished = list(range(len(places)))
        while unfinished:
            owners, parts, lasts, ended = [], [], [], set()
            for row in unfinished:
                # How much is read at once changes only how often this loop runs, never the tokens.
                needed = (self._wanted - len(rows[row])) * self._bytes_per_token * 1.2
                while needed > 0:
                    part, last = next(texts[row], (None, False))
                    if part is None:
                        ended.add(row)
                        break
                    owners.append(row)
                    parts.append(part)
                    lasts.append(last)
                    needed -= len(part) + self._bytes_per_token * last
            encoded = self.tokenizer.encode_batch(parts)
            for row, ids, last in zip(owners, encoded, lasts, strict=True):
                rows[row] += [*ids, EOS] if last else ids
            unfinished = [
                row for row in unfinished if row not in ended and len(rows[row]) < self._wanted
            ]
        return [row[: self._wanted] for row in rows]


class EvaluationBlocks(EvaluationBatches):
    """A split cut into rows without gap or overlap; the masks of a row depend on the row alone.

    The tokens of the split are held in memory, two bytes each up to a vocabulary of 65,536.
    """

    def __init__(
        self,
        length: int,
        tokenizer: AnyTokenizer,
        source: Source,
        batch_size: int,
        maker: RowMaker,
        process_index: int = 0,
        process_count: int = 1,
    ):
        super().__init__(process_index, process_count)
        self.maker, self._length, self.source = maker, length, source
        self.text = source.key
        self._rows = batch_size
        self._own = self._own_rows(batch_size)
        self._wanted = self._length - maker.begin
        self._tokens = np.concatenate(list(tokenize(self.source, tokenizer)))
        self.num_tokens = len(self._tokens)

    @property
    def num_words(self) -> int:
        """`count_words` of the split, the denominator of a perplexity per word."""
        # Count whole lines: tokenizing a long line in parts may cut a word.
        return count_words(map(self._text, range(len(self.source))))

    def __len__(self) -> int:
        return math.ceil(self.num_tokens / (self._wanted * self._rows))

    def _text(self, index: int) -> str:
        item = self.source[index]
        assert isinstance(item, str)
        return item

    def batch(self, step: int) -> Row:
        """The rows that this process holds of batch `step`."""
        self._check(step)
        rows = []
        for number in range(step * self._rows, (step + 1) * self._rows)[self._own]:
            ids = self._tokens[number * self._wanted : (number + 1) * self._wanted]
            generator = np.random.default_rng([Draw.BLOCK_MASKS, 0, number])
            row = self.maker.make(ids, self._length, generator)
            rows.append(row if len(ids) else examples.padding_like(row))
        return examples.stack(rows)
