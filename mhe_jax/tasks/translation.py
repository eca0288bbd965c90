"""Translation: an encoder reads a source, a decoder predicts each token of its target.

source [S]  target [T]  labels [T]  weights [T]      target is bos and all labels but the last
"""

import flax.linen as nn
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.config.fields import set_field
from mhe_jax.config.files import cache_directory
from mhe_jax.data import (
    AnyTokenizer,
    EvaluationBatches,
    TrainBatches,
    open_split,
    open_train,
    pairs,
)
from mhe_jax.data.batches import mixed, of_rows
from mhe_jax.data.examples import Row, translation_row
from mhe_jax.data.pairs import EvaluationPairs, Pairs, choose_buckets, rows_of
from mhe_jax.data.tokens import tokens_of
from mhe_jax.model import EncoderDecoder
from mhe_jax.tasks.cost import attention_flops, decoder_layer_flops, encoder_flops, logits_flops
from mhe_jax.tasks.sums import ratios, total
from mhe_jax.tasks.task import Found, Result, Task


class Translation(Task):
    """Task `translation`, on pairs of texts."""

    inputs = ("source", "target")
    segments = ("source_segments", "target_segments")
    metrics = ("bleu",)
    search = "translate"

    def model(self, config: ModelConfig) -> nn.Module:
        return EncoderDecoder(config, right_padded=True)

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        """Pairs of similar length, or rows packed with several pairs each."""
        data, seed, process = config.data, config.train.seed, (process_index, process_count)
        cache, texts = cache_directory(data.cache_directory), open_train(config)
        of = [Pairs(text, tokens_of(text, tokenizer, cache, *process), data) for text, _ in texts]
        weights = [weight for _, weight in texts]
        if data.packing:
            part = mixed([pairs.packed(each, data, seed) for each in of], weights)
            return of_rows(part, rows_of(data, data.sequence_length), *process)
        longer = np.concatenate([each.lengths.max(axis=1) for each in of])
        buckets = data.length_buckets or choose_buckets(longer, data.sequence_length)
        part = mixed([pairs.bucketed(each, data, buckets, seed) for each in of], weights)
        return TrainBatches(part, *process)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """All pairs in order of length."""
        text, cache = open_split(config, split), cache_directory(config.data.cache_directory)
        sides = tokens_of(text, tokenizer, cache, *process)
        return EvaluationPairs(text, sides, config.model.max_length, batch_size, *process)

    def empty_row(self, config: Config) -> Row:
        return translation_row([], [], config.data.sequence_length)

    def rows_per_batch(self, config: Config) -> int:
        """Pairs in a batch of the longest bucket."""
        return rows_of(config.data, config.data.sequence_length)

    def with_rows(self, config: Config, rows: int) -> Config:
        tokens = 2 * rows * config.data.sequence_length
        return set_field(config, "data.tokens_per_batch", tokens)

    def row_multiple(self, config: Config) -> int:
        return config.data.row_multiple

    def step_flops(self, config: Config, rows: int) -> float:
        m, T = config.model, config.data.sequence_length
        layer = decoder_layer_flops(config) + attention_flops(config, "cross", T)
        decoder = m.decoder_layers * layer
        return 3.0 * rows * T * (encoder_flops(config) + decoder + logits_flops(m))

    def result(self, config: Config, found: Found, batches: EvaluationBatches) -> Result:
        """Of the references alone; `evaluation` adds what its search gives."""
        return ratios(total(found))
