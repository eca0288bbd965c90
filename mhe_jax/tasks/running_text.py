"""The tasks on running text, whose rows of one shape are cut from a source.

    mlm               tokens [T]  positions [P]  labels [P]  weights [P]
                      P masked positions are predicted
    lm                tokens [T]                 labels [T]  weights [T]
                      each token is predicted from those before it
    shuffle_random    tokens [T]                 labels [T]  weights [T]
                      labels are 0 for an original token, 1 for one from another place, 2 for a
                      random one; signatures [T, 16] of hashed words without a table

Sources: Devlin et al. 2019, section 3.1; Xue & Aletras 2022, "HashFormers".
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.config.data import NUM_SPECIAL
from mhe_jax.config.files import cache_directory
from mhe_jax.data import AnyTokenizer, EvaluationBatches, TrainBatches, open_split, open_train
from mhe_jax.data.batches import mixed, of_rows
from mhe_jax.data.examples import Row, begun, lm_row, mlm_row
from mhe_jax.data.rows import EvaluationBlocks, RowMaker, blocks, packed
from mhe_jax.data.tokens import tokens_of
from mhe_jax.model import LanguageModel, MaskedLanguageModel, ShuffleRandomClassifier
from mhe_jax.tasks.metrics import check_sklearn, perplexity, roc_auc
from mhe_jax.tasks.sums import ratios, total
from mhe_jax.tasks.task import Batch, Found, Outputs, Result, Sums, Task


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
        return lm_row([], config.data.sequence_length)


class MaskedLanguageModeling(TextTask):
    """Task `mlm`; a row holds bos and T - 1 tokens."""

    inputs = ("tokens", "positions")
    metrics = ("perplexity",)

    def model(self, config: ModelConfig) -> nn.Module:
        return MaskedLanguageModel(config, right_padded=True)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        size, rate = tokenizer.vocabulary_size, config.data.mask_rate
        return RowMaker(
            lambda ids, length, generator: mlm_row(ids, length, size, rate, generator),
            mask_rate=rate,
        )

    def empty_row(self, config: Config) -> Row:
        length, size = config.data.sequence_length, config.model.vocabulary_size
        return mlm_row([], length, size, config.data.mask_rate, np.random.default_rng(0))


class LanguageModeling(TextTask):
    """Task `lm`; a row predicts T tokens, each from bos and those before it in the row."""

    metrics = ("perplexity_per_word", "perplexity_per_token")
    methods = ("generate", "log_probs")

    def model(self, config: ModelConfig) -> nn.Module:
        return LanguageModel(config)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        return RowMaker(lambda ids, length, _: lm_row(ids, length), begin=0)

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


class ShuffleRandom(TextTask):
    """Task `shuffle_random`; a row holds bos and T - 1 tokens, the same in each validation."""

    segments = ()
    metrics = ("auc",)

    def model(self, config: ModelConfig) -> nn.Module:
        return ShuffleRandomClassifier(config, right_padded=True)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        size, rate = config.model.vocabulary_size, config.data.corruption_rate

        def make(ids, length: int, generator: np.random.Generator) -> Row:
            return shuffle_random_row(tokenizer.inputs(begun(ids, length)), size, rate, generator)

        return RowMaker(make)

    def check_split(self, config: Config, split: str) -> None:
        super().check_split(config, split)
        check_sklearn(self.metrics)

    def outputs(self, logits: jax.Array, batch: Batch) -> Sums:
        """log p(1) - log p(0); `index` is the label of each token, -1 where it does not count."""
        index = jnp.where(batch["weights"] > 0, batch["labels"], -1)
        return {"outputs": logits[..., 1] - logits[..., 0], "index": index}

    def scores(self, batches: EvaluationBatches, outputs: Outputs) -> dict[str, float]:
        """`auc`, the area under the ROC curve of moved tokens (1) against original ones (0)."""
        labels, found = (
            np.concatenate([x.ravel() for x in of]) for of in zip(*outputs, strict=True)
        )
        told = (labels == 0) | (labels == 1)
        return {"auc": roc_auc(labels[told], found[told])}


def shuffle_random_row(
    inputs: Row, vocabulary_size: int, rate: float, generator: np.random.Generator
) -> Row:
    """A row whose ordinary tokens are original (0), from another place of it (1), or random (2).

    Each takes, with probability `rate`, the token of another ordinary place, by a permutation of
    them all. Each of the others becomes, with probability `rate`, a random one: an ordinary id, or
    as its signature its own bits in random order. So there are as many ones as in words; with LSH
    those are not half, and the number of ones in fair bits would give label 2 away. A token that
    comes out unchanged keeps the label 0. Special tokens stay, and have weight 0.

    The code of Xue & Aletras draws bits that words do not have, and labels an unchanged token as
    moved.
    """
    name = "signatures" if "signatures" in inputs else "tokens"
    (places,) = np.nonzero(inputs["tokens"] >= NUM_SPECIAL)
    codes = inputs[name]
    old = codes[places]
    moved = generator.random(len(places)) < rate
    random = ~moved & (generator.random(len(places)) < rate)
    new = old.copy()
    new[moved] = old[generator.permutation(len(places))[moved]]
    if name == "signatures":
        bits = generator.permuted(np.unpackbits(old[random], axis=1), axis=1)
        new[random] = np.packbits(bits, axis=1)
    else:
        new[random] = generator.integers(NUM_SPECIAL, vocabulary_size, int(random.sum()))
    changed = (new != old).any(axis=tuple(range(1, new.ndim)))
    row = {**inputs, name: codes.copy()}
    row[name][places] = new
    labels, weights = np.zeros((2, len(codes)), np.int32)
    labels[places] = np.where(changed, moved + 2 * random, 0)
    weights[places] = 1
    return {**row, "labels": labels, "weights": weights.astype(np.float32)}
