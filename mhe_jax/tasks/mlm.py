"""Masked language modelling: an encoder predicts 15 % of the tokens, most of them masked.

    tokens [T]  positions [P]  labels [P]  weights [P]      P positions of a row are predicted

Source: Devlin et al. 2019, section 3.1.
"""

import flax.linen as nn
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.data import AnyTokenizer
from mhe_jax.data.blocks import RowMaker
from mhe_jax.data.examples import Row, mlm_row, num_predictions
from mhe_jax.model import MaskedLanguageModel
from mhe_jax.tasks.flops import encoder_flops, logits_flops
from mhe_jax.tasks.running_text import TextTask


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
