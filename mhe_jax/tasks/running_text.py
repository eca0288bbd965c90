"""The tasks on running text, whose rows of one shape are cut from a source.

    mlm    tokens [T]  positions [P]  labels [P]  weights [P]    P masked positions are predicted
    lm     tokens [T]                 labels [T]  weights [T]    each token from those before it

Source of the former: Devlin et al. 2019, section 3.1.
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
from mhe_jax.model import LanguageModel, MaskedLanguageModel
from mhe_jax.tasks.cost import decoder_layer_flops, encoder_flops, logits_flops
from mhe_jax.tasks.metrics import perplexity
from mhe_jax.tasks.sums import ratios, total
from mhe_jax.tasks.task import Found, Result, Task


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
        """The split in rows without gap or overlap, or in windows of `evaluation.stride`."""
        text, maker = open_split(config, split), self.maker(config, tokenizer)
        cache = cache_directory(config.data.cache_directory)
        (tokens,) = tokens_of(text, tokenizer, cache, *process)
        given = (text, tokens, config.data.sequence_length, maker, batch_size)
        return EvaluationBlocks(*given, *process, stride=config.evaluation.stride)

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


class LanguageModeling(TextTask):
    """Task `lm`; a row predicts T tokens, each from bos and those before it in the row."""

    metrics = ("perplexity_per_word", "perplexity_per_token")
    search = "generate"

    def model(self, config: ModelConfig) -> nn.Module:
        return LanguageModel(config)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        return RowMaker(lambda ids, length, _: examples.lm_row(ids, length), begin=0)

    def step_flops(self, config: Config, rows: int) -> float:
        m = config.model
        token = m.num_layers * decoder_layer_flops(config) + logits_flops(m)
        return 3.0 * rows * config.data.sequence_length * token

    def result(self, config: Config, found: Found, batches: EvaluationBatches) -> Result:
        """Perplexity per token, and per word to compare different tokenizers.

        Words are separated by white space in the raw text, and the end of each line counts as one.
        """
        assert isinstance(batches, EvaluationBlocks)
        sums, words = total(found), batches.num_words
        metrics = ratios(sums)
        return {
            "loss": metrics["loss"],
            "accuracy": metrics["accuracy"],
            "perplexity_per_token": metrics["perplexity"],
            "perplexity_per_word": perplexity(sums["nats"], words),
            "stride": config.evaluation.stride,
            "nats": sums["nats"],
            "tokens": int(sums["count"]),
            "words": words,
        }
