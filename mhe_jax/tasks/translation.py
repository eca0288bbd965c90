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
)
from mhe_jax.data.batches import choose_buckets, mixed, of_rows
from mhe_jax.data.examples import Row, translation_row
from mhe_jax.data.rows import Pairs, evaluation_pairs, rows_of
from mhe_jax.data.tokens import tokens_of
from mhe_jax.model import EncoderDecoder
from mhe_jax.tasks.sums import ratios, total
from mhe_jax.tasks.task import Found, Result, Task


class Translation(Task):
    """Task `translation`, on pairs of texts."""

    inputs = ("source", "target")
    segments = ("source_segments", "target_segments")
    metrics = ("bleu",)
    methods = ("translate", "encode", "log_probs")

    def model(self, config: ModelConfig) -> nn.Module:
        return EncoderDecoder(config, right_padded=True)

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        """Pairs of similar length, or rows packed with several pairs each."""
        data, seed, process = config.data, config.train.seed, (process_index, process_count)
        cache, texts = cache_directory(data.cache_directory), open_train(config)
        given = (tokenizer, cache, *process)
        of = [Pairs(text, tokens_of(text, *given), data, seed) for text, _ in texts]
        weights = [weight for _, weight in texts]
        if data.packing:
            part = mixed([each.packed() for each in of], weights)
            return of_rows(part, rows_of(data, data.sequence_length), *process)
        longer = np.concatenate([each.lengths.max(axis=1) for each in of])
        buckets = data.length_buckets or choose_buckets(longer, data.sequence_length)
        part = mixed([each.bucketed(buckets) for each in of], weights)
        return TrainBatches(part, *process)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """All pairs in order of length."""
        text, cache = open_split(config, split), cache_directory(config.data.cache_directory)
        sides = tokens_of(text, tokenizer, cache, *process)
        return evaluation_pairs(text, sides, config.model.max_length, batch_size, *process)

    def empty_row(self, config: Config) -> Row:
        return translation_row([], [], config.data.sequence_length)

    def rows_per_batch(self, config: Config) -> int:
        """Pairs in a batch of the longest bucket."""
        return rows_of(config.data, config.data.sequence_length)

    def with_rows(self, config: Config, rows: int) -> Config:
        tokens = 2 * rows * config.data.sequence_length
        return set_field(config, "data.tokens_per_batch", tokens)

    def result(self, config: Config, found: Found, batches: EvaluationBatches) -> Result:
        """Of the references alone; `evaluation` adds what its search gives."""
        return ratios(total(found))
