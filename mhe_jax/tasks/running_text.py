"""The tasks on running text: rows of one shape, cut from a source; and masked language modelling.

    tokens [T]  positions [P]  labels [P]  weights [P]      P positions of a row are predicted

Source of the latter: Devlin et al. 2019, section 3.1.
"""

import flax.linen as nn
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.config.files import cache_directory
from mhe_jax.data import (
    AnyTokenizer,
    EvaluationBatches,
    TrainBatches,
    examples,
    open_split,
    open_train,
)
from mhe_jax.data.batches import mixed, of_rows
from mhe_jax.data.examples import Row, mlm_row, num_predictions
from mhe_jax.data.rows import EvaluationBlocks, RowMaker, blocks, packed
from mhe_jax.data.tokens import tokens_of
from mhe_jax.model import MaskedLanguageModel
from mhe_jax.tasks.flops import encoder_flops, logits_flops
from mhe_jax.tasks.task import Task


class TextTask(Task):
    """A task on running text; `maker` of a subclass says how tokens become a row."""

    inputs = ("tokens",)
    segments = ("segments",)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        raise NotImplementedError

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        """Rows of running text, or rows packed with several items each."""
        data, process, parts, weights = config.data, (process_index, process_count), [], []
        for text, weight in open_train(config):
            (tokens,) = tokens_of(text, tokenizer, cache_directory(data.cache_directory), *process)
            make, maker = packed if data.packing else blocks, self.maker(config, tokenizer)
            parts.append(make(text, tokens, data, maker, config.train.seed))
            weights.append(weight)
        return of_rows(mixed(parts, weights), data.batch_size, *process)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """The split cut into rows without gap or overlap."""
        return self.blocks(config, tokenizer, split, batch_size, *process)

    def blocks(
        self,
        config: Config,
        tokenizer: AnyTokenizer,
        split: str,
        batch_size: int,
        *process: int,
        stride: int | None = None,
    ) -> EvaluationBlocks:
        """The split cut into rows, `stride` tokens apart."""
        text, maker = open_split(config, split), self.maker(config, tokenizer)
        cache = cache_directory(config.data.cache_directory)
        (tokens,) = tokens_of(text, tokenizer, cache, *process)
        given = (text, tokens, config.data.sequence_length, maker, batch_size)
        return EvaluationBlocks(*given, *process, stride=stride)

    def empty_row(self, config: Config) -> Row:
        return examples.lm_row([], config.data.sequence_length)


class MaskedLanguageModeling(TextTask):
    """Task `mlm`; a row holds bos and T - 1 tokens."""

    inputs = ("tokens", "positions")
    metrics = ("perplexity",)

    def model(self, config: ModelConfig) -> nn.Module:
        return MaskedLanguageModel(config, right_padded=True)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        """Rows with masked tokens; what is masked depends on tokens and generator only."""
        size, rate = tokenizer.vocabulary_size, config.data.mask_rate

        def make(ids, length: int, generator: np.random.Generator) -> Row:
            return mlm_row(ids, length, size, rate, generator)

        return RowMaker(make, mask_rate=rate)

    def empty_row(self, config: Config) -> Row:
        length, size = config.data.sequence_length, config.model.vocabulary_size
        return mlm_row([], length, size, config.data.mask_rate, np.random.default_rng(0))

    def step_flops(self, config: Config, rows: int) -> float:
        """The encoder at each token; head and logits at the predicted ones."""
        m, T = config.model, config.data.sequence_length
        predictions = num_predictions(T, config.data.mask_rate)
        head = predictions * (2 * m.features**2 + logits_flops(m))
        return 3.0 * rows * (T * encoder_flops(config) + head)
