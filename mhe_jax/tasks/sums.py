"""Losses and metrics of a batch as sums, and the metrics that the sums of a split give.

    loss = Σ w · ((1 - ε) · -log p(label) + ε · mean_v(-log p(v)))    ε: label smoothing (training)
    nats = Σ w · -log p(label)
    correct = Σ w · [label is the most probable]
    count = Σ w
    unsmoothed_loss = nats            where ε > 0: what compares with a loss of validation

so perplexity is exp(nats / count). All float32, whatever the model computes in. The loss of numbers
is Σ w · (prediction - label)².
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mhe_jax.tasks.metrics import perplexity


def label_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, label_smoothing: float = 0.0
) -> dict[str, jax.Array]:
    """loss, nats, correct and count of logits [..., V], labels [...] and weights [...].

    With label smoothing, also unsmoothed_loss.
    """
    logits = logits.astype(jnp.float32)
    weights = weights.astype(jnp.float32)
    nats, label_logits, normalizer = label_nats(logits, labels)
    # A label of padding may be a token that does not exist, with a logit of -inf.
    nats = jnp.where(weights > 0, nats, 0.0)
    smooth = nats
    if label_smoothing:
        # Logits of -inf are past the end of the vocabulary.
        exists = logits > -jnp.inf
        total = jnp.sum(jnp.where(exists, logits, 0.0), axis=-1)
        spread = normalizer - total / jnp.sum(exists, axis=-1, dtype=jnp.float32)
        smooth = (1 - label_smoothing) * nats + label_smoothing * spread
    # argmax(logits) == labels, the first of equal logits; many times faster on a CPU.
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    ties = (logits == label_logits[..., None]) & (places >= labels[..., None])
    correct = jnp.all((logits < label_logits[..., None]) | ties, axis=-1)
    found = {
        "loss": jnp.sum(smooth * weights),
        "nats": jnp.sum(nats * weights),
        "correct": jnp.sum(jnp.where(correct, weights, 0.0)),
        "count": jnp.sum(weights),
    }
    return found | ({"unsmoothed_loss": found["nats"]} if label_smoothing else {})


def label_nats(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-log p(label), the label's logit, and the log of the sum of all exponentials, each [...]."""
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return normalizer - label_logits, label_logits, normalizer


def squared_error_sums(
    predictions: jax.Array, labels: jax.Array, weights: jax.Array
) -> dict[str, jax.Array]:
    """loss and count of predictions, labels and weights of one shape."""
    weights = weights.astype(jnp.float32)
    errors = jnp.square(predictions.astype(jnp.float32) - labels)
    return {"loss": jnp.sum(errors * weights), "count": jnp.sum(weights)}


def ratios(sums: dict[str, float]) -> dict[str, float]:
    """Losses, accuracy and perplexity, as far as their sums are there.

    Only `smoothed_loss` includes label smoothing.
    """
    count = max(sums["count"], 1.0)
    found = {"loss": sums.get("unsmoothed_loss", sums["loss"]) / count}
    if "unsmoothed_loss" in sums:
        found["smoothed_loss"] = sums["loss"] / count
    if "correct" in sums:
        found["accuracy"] = sums["correct"] / count
    if "nats" in sums:
        found["perplexity"] = perplexity(sums["nats"], count)
    return found


def total(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The sums of all batches, added in float64: a long split loses no digits."""
    names = [name for name in found[0] if name not in ("index", "outputs")]
    return {name: sum(float(batch[name]) for batch in found) for name in names}


def criterion(numbers: dict[str, float]) -> tuple[float, ...]:
    """Lowest for the best checkpoint: minus the official score, if any; then the loss.

    NaN counts as inf.
    """
    found = (-numbers["score"], numbers["loss"]) if "score" in numbers else (numbers["loss"],)
    return tuple(math.inf if math.isnan(value) else float(value) for value in found)
