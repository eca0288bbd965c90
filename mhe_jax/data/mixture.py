"""Several training sources with weights (`data.train_weights`).

Draws come in blocks of `BLOCK`: each block has every source in proportion to its weight, in an
order of its own. So draw n is the k-th of its source, where k is known without looking at the draws
before it, and each source goes through its own epochs at its own pace. A draw is a row; in unpacked
translation, where the rows of a batch have similar lengths, it is a batch.
"""

from collections.abc import Sequence

import numpy as np

from mhe_jax.config import InputError
from mhe_jax.data.batches import Draw, Epochs, TrainBatches, TrainRows
from mhe_jax.data.cache import key_of
from mhe_jax.data.examples import Row

BLOCK = 10_000


class Draws:
    """Which source draw n comes from, and how many draws of that source came before it."""

    def __init__(self, weights: Sequence[float], seed: int):
        shares = np.array(weights) / sum(weights) * BLOCK
        self._counts = np.floor(shares).astype(np.int64)
        # The largest remainders get what is left.
        left = BLOCK - self._counts.sum()
        self._counts[np.argsort(self._counts - shares, kind="stable")[:left]] += 1
        if not self._counts.all():
            k = int(np.argmin(self._counts))
            raise InputError(
                f"data.train_weights is {tuple(weights)!r}: {weights[k]} is less than 1 in "
                f"{BLOCK:,} of their sum"
            )
        self.shares = self._counts / BLOCK
        self._seed = seed
        self._block = Epochs(self._shuffled)

    def __call__(self, number: int) -> tuple[int, int]:
        block, i = divmod(number, BLOCK)
        parts, before = self._block(block)
        part = int(parts[i])
        return part, block * int(self._counts[part]) + int(before[i])

    def _shuffled(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng([Draw.SOURCE_ORDER, self._seed, block])
        parts = generator.permutation(np.repeat(np.arange(len(self._counts)), self._counts))
        before = np.empty(BLOCK, np.int64)
        for part, count in enumerate(self._counts):
            before[parts == part] = np.arange(count)
        return parts, before


class MixedRows(TrainRows):
    """Rows of several sources; an epoch sees each source whole at least once."""

    def __init__(self, parts: Sequence[TrainRows], weights: Sequence[float], seed: int):
        first = parts[0]
        super().__init__(first.rows_per_batch, first.process_index, first.process_count)
        self.parts, self.draws = parts, Draws(weights, seed)
        self.text = key_of(*(part.text for part in parts))
        shares = zip(parts, self.draws.shares, strict=True)
        self.num_rows = max(round(part.num_rows / share) for part, share in shares)

    def describe(self) -> str:
        """A line for each source."""
        return _describe(self.parts, self.draws)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The rows with these numbers; those of one source are read together."""
        drawn = [self.draws(number) for number in numbers]
        found = [
            iter(part.rows([number for of, number in drawn if of == p]))
            for p, part in enumerate(self.parts)
        ]
        return [next(found[p]) for p, _ in drawn]


class MixedBatches(TrainBatches):
    """Batches of several sources, each batch from one; an epoch is as in `MixedRows`."""

    def __init__(self, parts: Sequence[TrainBatches], weights: Sequence[float], seed: int):
        super().__init__(parts[0].process_index, parts[0].process_count)
        self.parts, self.draws = parts, Draws(weights, seed)
        self.text = key_of(*(part.text for part in parts))
        shares = zip(parts, self.draws.shares, strict=True)
        self.steps_per_epoch = max(part.steps_per_epoch / share for part, share in shares)

    def describe(self) -> str:
        """A line for each source."""
        return _describe(self.parts, self.draws)

    def batch(self, step: int) -> Row:
        """The rows that this process holds of global batch `step`."""
        part, number = self.draws(step)
        return self.parts[part].batch(number)


def _describe(parts: Sequence[TrainBatches], draws: Draws) -> str:
    shares = zip(parts, draws.shares, strict=True)
    return "\n".join(f"{share:.2%} {part.describe()}" for part, share in shares)
