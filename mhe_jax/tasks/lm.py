"""Language modelling: a decoder predicts each token from those before it.

tokens [T]  labels [T]  weights [T]      tokens are bos and all labels but the last
"""

import math

import flax.linen as nn

from mhe_jax.config import Config, ModelConfig
from mhe_jax.data import AnyTokenizer, EvaluationBatches, Source, examples, open_split
from mhe_jax.data.blocks import EvaluationBlocks, RowMaker
from mhe_jax.data.examples import Row
from mhe_jax.model import LanguageModel
from mhe_jax.tasks.flops import decoder_layer_flops, logits_flops
from mhe_jax.tasks.metrics import perplexity
from mhe_jax.tasks.running_text import TextTask
from mhe_jax.tasks.sums import ratios, total
from mhe_jax.tasks.task import Result, TrainedRun, finite

MAKER = RowMaker(lambda ids, length, _: examples.lm_row(ids, length), begin=0)


class LanguageModeling(TextTask):
    """Task `lm`; a row predicts T tokens, each from bos and those before it in the row."""

    metrics = ("perplexity_per_word", "perplexity_per_token")
    search = "generate"

    def model(self, config: ModelConfig) -> nn.Module:
        """Tokens [B, T] -> logits [B, T, V]."""
        return LanguageModel(config)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        """Rows of `examples.lm_row`; nothing is random."""
        return MAKER

    def scored_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """Blocks without overlap, or with `evaluation.stride` sliding windows."""
        stride = config.evaluation.stride
        if stride is None:
            return self.evaluation_batches(config, tokenizer, split, batch_size, *process)
        source, length = open_split(config, split), config.data.sequence_length
        return SlidingWindows(length, tokenizer, source, batch_size, stride, *process)

    def step_flops(self, config: Config, rows: int) -> float:
        """Causal layers and logits at each token."""
        m = config.model
        token = m.num_layers * decoder_layer_flops(config) + logits_flops(m)
        return 3.0 * rows * config.data.sequence_length * token

    def evaluate(self, run: TrainedRun) -> Result:
        """Perplexity per token, and per word to compare different tokenizers.

        Per word it is exp(nats of all tokens / words). Words are separated by white space in the
        raw text, and the end of each line counts as one. Every token is predicted once: from its
        block, or with `evaluation.stride` as `SlidingWindows` says.
        """
        found, batches, seconds = run.outputs()
        assert isinstance(batches, EvaluationBlocks)
        sums, words = finite(run, total(found)), batches.num_words
        metrics = ratios(sums)
        return {
            **run.described(),
            "loss": metrics["loss"],
            "accuracy": metrics["accuracy"],
            "perplexity_per_token": perplexity(sums["nats"], sums["count"]),
            "perplexity_per_word": perplexity(sums["nats"], words),
            "stride": run.evaluation.stride,
            "nats": sums["nats"],
            "tokens": int(sums["count"]),
            "words": words,
            "seconds": seconds,
            "tokens_per_second": sums["tokens"] / seconds,
        }


def num_windows(num_tokens: int, length: int, stride: int) -> int:
    """Windows of `length` that begin `stride` apart and hold all tokens; one if there are none."""
    return 1 + max(0, math.ceil((num_tokens - length) / stride))


class SlidingWindows(EvaluationBlocks):
    """A split in windows of T = `data.sequence_length` tokens that begin `stride` tokens apart.

    Of the tokens x_0 .. x_{N-1} of a split, window k is the T tokens from k·s on, with stride s.
    The first window predicts all of its tokens; each later one reads the T - s tokens that the
    windows before it have predicted, and predicts the s that follow. So every token x_i has bos and
    at least min(i, T - s) tokens before it, at T / s times the work. With s = T these are the
    blocks without overlap.
    """

    def __init__(
        self,
        length: int,
        tokenizer: AnyTokenizer,
        source: Source,
        batch_size: int,
        stride: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        super().__init__(length, tokenizer, source, batch_size, MAKER, process_index, process_count)
        self.stride = stride

    def __len__(self) -> int:
        return math.ceil(self._num_windows / self._rows)

    @property
    def _num_windows(self) -> int:
        return num_windows(self.num_tokens, self._length, self.stride)

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
