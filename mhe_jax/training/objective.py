"""What is minimised and what is measured, for each task, as sums over a batch.

    loss = Σ w · ((1 - ε) · -log p(label) + ε · mean_v(-log p(v)))    ε: label smoothing (training)
    nats = Σ w · -log p(label)
    correct = Σ w · [label is the most probable]
    count = Σ w
    tokens = tokens in the batch that are not padding (translation: of source and target)

so perplexity is exp(nats / count). All float32, whatever the model computes in. Of labelled
examples only loss, count and tokens are summed: what they are worth is their official score. A
regression's loss is Σ w · (prediction - label)². The labels of `shuffle_random` are 0 for an
original token, 1 for one from another place, 2 for a random one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.config import LABELLED, Task

Batch = dict[str, jax.Array]
# (params, batch, dropout key or None) -> sums.
SumsFunction = Callable[[Any, Batch, jax.Array | None], dict[str, jax.Array]]

# What of a batch the model reads, in the order of its arguments.
INPUTS: dict[Task, tuple[str, ...]] = {
    "mlm": ("tokens", "positions"),
    "shuffle_random": ("tokens",),
    "lm": ("tokens",),
    "translation": ("source", "target"),
    **dict.fromkeys(LABELLED, ("tokens", "token_types", "marks")),
}
# Of hashed words without a table: a keyword argument of every model that has an encoder alone.
SIGNATURES = "signatures"
# What keeps the examples of a packed row apart: keyword arguments of the model.
SEGMENTS: dict[Task, tuple[str, ...]] = {
    "mlm": ("segments",),
    "lm": ("segments",),
    "translation": ("source_segments", "target_segments"),
}
# Inputs that hold no tokens.
NOT_TOKENS = ("positions", "token_types", "marks")
PAD_ID = 0


def batch_names(task: Task) -> tuple[str, ...]:
    """The arrays that every batch of a task has for a step to read."""
    index = ("index",) if task in LABELLED else ()
    return (*INPUTS[task], "labels", "weights", *index)


def what_is_read(task: Task, rows: Mapping[str, Any]) -> dict[str, Any]:
    """`batch_names` of a batch, and what keeps packed examples apart or describes hashed words."""
    optional = [name for name in keywords(task) if name in rows]
    return {name: rows[name] for name in (*batch_names(task), *optional)}


def keywords(task: Task) -> tuple[str, ...]:
    """The arrays of some batches that a model takes by name."""
    return (*SEGMENTS.get(task, ()), SIGNATURES)


def make_initializer(task: Task, model: nn.Module, length: int) -> Callable[[jax.Array], Any]:
    """`key -> params` of `model`, boxed with logical names under sharding rules."""
    inputs = [np.zeros((1, length), np.int32) for _ in INPUTS[task]]
    return lambda key: model.init(key, *inputs)["params"]


def make_sums(
    task: Task, model: nn.Module, label_smoothing: float = 0.0, *, outputs: bool = False
) -> SumsFunction:
    """The sums of this module's equations, of a batch that goes through `model`.

    Batch: the inputs of `INPUTS`, `labels` and `weights`, both of the shape of the model's output
    without its vocabulary axis, and `keywords`. Without a dropout key the model is deterministic.
    With `outputs`, labelled examples also come with `outputs`, what the model gave, and `index`,
    whose that is; `shuffle_random` with `outputs` log p(1) - log p(0) and `index` the label of each
    token, -1 where it does not count.
    """

    def sums(params: Any, batch: Batch, dropout_key: jax.Array | None) -> dict[str, jax.Array]:
        named: dict[str, Any] = {name: batch[name] for name in keywords(task) if name in batch}
        logits: Any = model.apply(
            {"params": params},
            *(batch[name] for name in INPUTS[task]),
            **named,
            deterministic=dropout_key is None,
            rngs=None if dropout_key is None else {"dropout": dropout_key},
        )
        tokens = sum(
            jnp.sum(batch[name] != PAD_ID) for name in INPUTS[task] if name not in NOT_TOKENS
        )
        if task == "regression":
            found = squared_error_sums(logits, batch["labels"], batch["weights"])
        else:
            found = label_sums(logits, batch["labels"], batch["weights"], label_smoothing)
        found = {**found, "tokens": jnp.asarray(tokens, jnp.float32)}
        if task in LABELLED:
            found = {name: found[name] for name in ("loss", "count", "tokens")}
            if outputs:
                found |= {"outputs": logits, "index": batch["index"]}
        elif task == "shuffle_random" and outputs:
            index = jnp.where(batch["weights"] > 0, batch["labels"], -1)
            found |= {"outputs": logits[..., 1] - logits[..., 0], "index": index}
        return found

    return sums


def label_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, label_smoothing: float = 0.0
) -> dict[str, jax.Array]:
    """loss, nats, correct and count of logits [..., V], labels [...] and weights [...]."""
    logits = logits.astype(jnp.float32)
    weights = weights.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nats = normalizer - label_logits
    smooth = nats
    if label_smoothing:
        # A logit of -inf stands past the end of the vocabulary.
        exists = logits > -jnp.inf
        total = jnp.sum(jnp.where(exists, logits, 0.0), axis=-1)
        spread = normalizer - total / jnp.sum(exists, axis=-1)
        smooth = (1 - label_smoothing) * nats + label_smoothing * spread
    correct = _is_highest(logits, labels, label_logits)
    return {
        "loss": jnp.sum(smooth * weights),
        "nats": jnp.sum(nats * weights),
        "correct": jnp.sum(correct * weights),
        "count": jnp.sum(weights),
    }


def _is_highest(logits, labels, label_logits):
    """`argmax(logits) == labels`, of equal logits the first: many times faster on a CPU."""
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    label_logits = label_logits[..., None]
    equal = (logits == label_logits) & (places >= labels[..., None])
    return jnp.all((logits < label_logits) | equal, axis=-1)


def squared_error_sums(
    predictions: jax.Array, labels: jax.Array, weights: jax.Array
) -> dict[str, jax.Array]:
    """loss and count of predictions, labels and weights of one shape."""
    weights = weights.astype(jnp.float32)
    errors = jnp.square(predictions.astype(jnp.float32) - labels)
    return {"loss": jnp.sum(errors * weights), "count": jnp.sum(weights)}


def ratios(sums: dict[str, float]) -> dict[str, float]:
    """What people read: loss, accuracy and perplexity; the loss with smoothing where it is used.

    Accuracy and perplexity only where their sums are there.

    >>> ratios({"loss": 4.0, "nats": 2.0, "correct": 1.0, "count": 2.0})
    {'loss': 2.0, 'accuracy': 0.5, 'perplexity': 2.718281828459045}
    """
    count = max(sums["count"], 1.0)
    found = {"loss": sums["loss"] / count}
    if "correct" in sums:
        found["accuracy"] = sums["correct"] / count
    if "nats" in sums:
        found["perplexity"] = float(np.exp(min(sums["nats"] / count, 700.0)))
    return found
