"""Sliding windows: every token of a split predicted once, with at least a given context.

Of the tokens x_0 .. x_{N-1} of a split, window k is the T tokens from k·s on, s the stride. The
first predicts all of its tokens; each later one reads the T - s that the windows before it have
predicted, and predicts the s that follow. So every token has bos and at least min(i, T - s) tokens
before it, at T / s times the work. With s = T these are the blocks without overlap.
"""

import math

from mhe_jax.config import Config
from mhe_jax.data import AnyTokenizer, examples
from mhe_jax.data.blocks import EvaluationBlocks
from mhe_jax.data.examples import Row


class Windows(EvaluationBlocks):
    """A split of `lm` in windows of `data.sequence_length` that begin `stride` tokens apart."""

    def __init__(
        self,
        config: Config,
        tokenizer: AnyTokenizer,
        split: str,
        batch_size: int,
        stride: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        super().__init__(config, tokenizer, split, batch_size, process_index, process_count)
        self.stride, self._length = stride, config.data.sequence_length

    def __len__(self) -> int:
        return math.ceil(self._num_windows / self._rows)

    @property
    def _num_windows(self) -> int:
        return 1 + max(0, math.ceil((self.num_tokens - self._length) / self.stride))

    def batch(self, step: int) -> Row:
        """The windows that this process holds of batch `step`."""
        self._check(step)
        numbers = range(step * self._rows, (step + 1) * self._rows)[self._own]
        return examples.stack([self._window(number) for number in numbers])

    def _window(self, number: int) -> Row:
        if number >= self._num_windows:
            return examples.padding_like(self._window(0))
        start = number * self.stride
        row = examples.lm_row(self._tokens[start : start + self._length], self._length)
        if number:
            row["weights"][: self._length - self.stride] = 0
        return row
