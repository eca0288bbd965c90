"""Shuffle + random: an encoder tells which tokens were moved or replaced (HashFormers).

    tokens [T]  labels [T]  weights [T]      signatures [T, 16] of hashed words without a table

Labels are 0 for an original token, 1 for one from another place, 2 for a random one.

Source: Xue & Aletras 2022, "HashFormers".
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.config.data import NUM_SPECIAL
from mhe_jax.data import AnyTokenizer, EvaluationBatches
from mhe_jax.data.examples import Row, begun
from mhe_jax.data.rows import RowMaker
from mhe_jax.model import ShuffleRandomClassifier
from mhe_jax.tasks.metrics import check_sklearn, roc_auc
from mhe_jax.tasks.running_text import TextTask
from mhe_jax.tasks.task import Batch, Outputs, Sums


class ShuffleRandom(TextTask):
    """Task `shuffle_random`; a row holds bos and T - 1 tokens.

    `auc` says how well moved tokens are told from original ones. Every validation moves the same
    tokens.
    """

    segments = ()
    metrics = ("auc",)

    def model(self, config: ModelConfig) -> nn.Module:
        return ShuffleRandomClassifier(config, right_padded=True)

    def maker(self, config: Config, tokenizer: AnyTokenizer) -> RowMaker:
        """Rows with moved and random tokens; which ones depends on tokens and generator only."""
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

    Source: Xue & Aletras 2022, "HashFormers"; their code draws bits that words do not have, and
    labels an unchanged token as moved.
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
