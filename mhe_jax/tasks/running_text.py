"""The tasks on running text: rows of one shape, cut from a source; and masked language modelling.

    tokens [T]  positions [P]  labels [P]  weights [P]      P positions of a row are predicted

Source of the latter: Devlin et al. 2019, section 3.1.
"""

import flax.linen as nn
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.data import AnyTokenizer, EvaluationBatches, Tokenizer, TrainBatches, examples
from mhe_jax.data.blocks import EvaluationBlocks, RowMaker, TrainBlocks
from mhe_jax.data.examples import Row, mlm_row, num_predictions
from mhe_jax.data.mixture import MixedRows
from mhe_jax.data.opening import open_split, open_train
from mhe_jax.data.packed import PackedText
from mhe_jax.model import MaskedLanguageModel
from mhe_jax.tasks.flops import encoder_flops, logits_flops
from mhe_jax.tasks.task import Task


class TextTask(Task):
    """A task on running text; `maker` of a subclass says how tokens become a row."""

    inputs = ("tokens",)
    segments = ("segments",)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        """How the tokens of a text become a row."""
        raise NotImplementedError

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        """Rows of running text, or rows packed with several items each."""
        maker, sources = self.maker(config, tokenizer), open_train(config)
        given, process = (config.data, config.train.seed), (process_index, process_count)
        if config.data.packing:
            assert isinstance(tokenizer, Tokenizer)
            parts = [PackedText(*given, tokenizer, s, maker, *process) for s, _ in sources]
        else:
            parts = [TrainBlocks(*given, tokenizer, s, maker, *process) for s, _ in sources]
        weights = [weight for _, weight in sources]
        return parts[0] if len(parts) == 1 else MixedRows(parts, weights, config.train.seed)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """The split cut into rows without gap or overlap."""
        maker, source = self.maker(config, tokenizer), open_split(config, split)
        length = config.data.sequence_length
        return EvaluationBlocks(length, tokenizer, source, batch_size, maker, *process)

    def empty_row(self, config: Config) -> Row:
        """Tokens, labels and weights, all of the length of a row."""
        return examples.lm_row([], config.data.sequence_length)


class MaskedLanguageModeling(TextTask):
    """Task `mlm`; a row holds bos and T - 1 tokens."""

    inputs = ("tokens", "positions")
    metrics = ("perplexity",)

    def model(self, config: ModelConfig) -> nn.Module:
        """(tokens [B, T], positions [B, P]) -> logits [B, P, V]."""
        return MaskedLanguageModel(config, right_padded=True)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        """Rows with masked tokens; what is masked depends on tokens and generator only."""
        size, rate = tokenizer.vocabulary_size, config.data.mask_rate

        def make(ids, length: int, generator: np.random.Generator) -> Row:
            return mlm_row(ids, length, size, rate, generator)

        return RowMaker(make, mask_rate=rate)

    def empty_row(self, config: Config) -> Row:
        """A row without text."""
        length, size = config.data.sequence_length, config.model.vocabulary_size
        return mlm_row([], length, size, config.data.mask_rate, np.random.default_rng(0))

    def step_flops(self, config: Config, rows: int) -> float:
        """The encoder at each token; head and logits at the predicted ones."""
        m, T = config.model, config.data.sequence_length
        predictions = num_predictions(T, config.data.mask_rate)
        head = predictions * (2 * m.features**2 + logits_flops(m))
        return 3.0 * rows * (T * encoder_flops(config) + head)
