"""A task as one value: inputs, rows, loss, operations, and how a run of it is scored."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.config.data import PAD
from mhe_jax.config.fields import set_field
from mhe_jax.data import (
    AnyTokenizer,
    EvaluationBatches,
    Text,
    TrainBatches,
    open_split,
    open_train,
)
from mhe_jax.data.examples import Row
from mhe_jax.tasks.cost import step_flops
from mhe_jax.tasks.sums import label_sums, ratios, total

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]
# (params, batch, dropout key or None) -> sums.
SumsFunction = Callable[[Any, Batch, jax.Array | None], Sums]
# The output of the evaluation step for each batch; and of it, `index` and `outputs` of the rows.
Found = Sequence[dict[str, Any]]
Outputs = Sequence[tuple[np.ndarray, np.ndarray]]
Result = dict[str, Any]

# Input of hashed words without a table: a keyword argument of every model with only an encoder.
SIGNATURES = "signatures"
# Inputs that hold no tokens.
NOT_TOKENS = ("positions", "token_types", "marks")


def outputs_of(found: Found) -> Outputs:
    return [(batch["index"], batch["outputs"]) for batch in found]


class Task:
    """One thing to learn. Subclasses override what differs; `mhe_jax.tasks.TASKS` has one of each.

    inputs      the arrays of a batch that the model reads, in the order of its arguments
    segments    the arrays that keep the examples of a packed row apart, by name
    metrics     the score of a run in reports: the first that its result has
    loss_unit   the unit of the loss, for pictures
    methods     what `evaluation.Run` does with its model
    """

    inputs: tuple[str, ...]
    segments: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("score",)
    loss_unit: str = "nats a token"
    methods: tuple[str, ...] = ("encode",)

    # What is computed.

    step_flops = staticmethod(step_flops)

    def model(self, config: ModelConfig) -> nn.Module:
        raise NotImplementedError

    def initializer(self, model: nn.Module, length: int) -> Callable[[jax.Array], Any]:
        """`key -> params` of `model`, boxed with logical names under sharding rules."""
        inputs = [np.zeros((1, length), np.int32) for _ in self.inputs]
        return lambda key: model.init(key, *inputs)["params"]

    @property
    def token_inputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if name not in NOT_TOKENS)

    @property
    def keywords(self) -> tuple[str, ...]:
        """The arrays that a model takes by name, where a batch has them."""
        return (*self.segments, SIGNATURES)

    @property
    def batch_names(self) -> tuple[str, ...]:
        return (*self.inputs, "labels", "weights")

    def read(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a batch in `batch_names`, and those of `keywords` that it has."""
        optional = [name for name in self.keywords if name in rows]
        return {name: rows[name] for name in (*self.batch_names, *optional)}

    def sums(
        self, model: nn.Module, label_smoothing: float = 0.0, *, outputs: bool = False
    ) -> SumsFunction:
        """A function from a batch to its sums under `model`: those of `losses`, and `tokens`.

        `labels` and `weights` have the shape of the model's output without its vocabulary axis.
        Without a dropout key the model is deterministic. `tokens` counts those that are not
        padding (in translation, of source and target). With `outputs`, a task whose score needs
        more than sums also gives `outputs` and `index`, by which `scores` knows them.
        """

        def sums(params: Any, batch: Batch, dropout_key: jax.Array | None) -> Sums:
            named: dict[str, Any] = {name: batch[name] for name in self.keywords if name in batch}
            logits: Any = model.apply(
                {"params": params},
                *(batch[name] for name in self.inputs),
                **named,
                deterministic=dropout_key is None,
                rngs=None if dropout_key is None else {"dropout": dropout_key},
            )
            tokens = sum(jnp.sum(batch[name] != PAD) for name in self.token_inputs)
            found = self.losses(logits, batch, label_smoothing)
            found |= {"tokens": jnp.asarray(tokens, jnp.float32)}
            return found | (self.outputs(logits, batch) if outputs else {})

        return sums

    def losses(self, logits: jax.Array, batch: Batch, label_smoothing: float) -> Sums:
        """`loss`, `count` and others; see `sums.py`."""
        return label_sums(logits, batch["labels"], batch["weights"], label_smoothing)

    def outputs(self, logits: jax.Array, batch: Batch) -> Sums:
        return {}

    # What is read.

    def resolve(self, config: Config) -> Config:
        """The config, completed from its data; raises InputError if they do not agree."""
        return config

    def check_split(self, config: Config, split: str) -> None:
        """Raises InputError if something is wrong with a split, or it could not be scored."""
        if split == "train":
            open_train(config)
        else:
            open_split(config, split)

    def texts(self, config: Config) -> list[tuple[Text, float]]:
        """The training texts with their weights, from which a tokenizer is made."""
        return open_train(config)

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        raise NotImplementedError

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        raise NotImplementedError

    def empty_row(self, config: Config) -> Row:
        """A row with the shape and type of the longest in training; its values mean nothing."""
        raise NotImplementedError

    def rows_per_batch(self, config: Config) -> int:
        """Rows of a global batch; where rows differ in length, of a batch of the longest."""
        return config.data.batch_size

    def with_rows(self, config: Config, rows: int) -> Config:
        """The config, changed so that `rows_per_batch` is `rows`."""
        return set_field(config, "data.batch_size", rows)

    # How a run is scored.

    def scores(self, batches: EvaluationBatches, outputs: Outputs) -> dict[str, float]:
        """Metrics that need the `outputs` of all rows."""
        raise NotImplementedError

    def measure(self, found: Found, batches: EvaluationBatches) -> dict[str, float]:
        """The metrics of a split, from the output of the evaluation step for each batch."""
        metrics = ratios(total(found))
        if "outputs" in found[0] and math.isfinite(metrics["loss"]):
            metrics |= self.scores(batches, outputs_of(found))
        return metrics

    def result(self, config: Config, found: Found, batches: EvaluationBatches) -> Result:
        """The numbers that `eval.py` gives of a split, but for seconds and tokens a second."""
        counted = {"predicted_tokens": int(total(found)["count"])}
        return self.measure(found, batches) | counted

    def files(self, config: Config, found: Found, batches: EvaluationBatches) -> dict[str, str]:
        """Files of predictions that go with a result, {suffix: text}."""
        return {}
