"""Sums of losses against float64, with smoothing and weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.model import make_model
from mhe_jax.training import objective


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_label_sums(smoothing, dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 5, 7)) * 3, dtype)
    labels = rng.integers(0, 7, (3, 5))
    weights = rng.integers(0, 2, (3, 5)).astype(np.float32)
    sums = objective.label_sums(logits, jnp.asarray(labels), jnp.asarray(weights), smoothing)
    exact = np.asarray(logits, np.float64)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    loss = (1 - smoothing) * nats - smoothing * log_p.mean(-1)
    assert all(value.dtype == jnp.float32 for value in sums.values())
    np.testing.assert_allclose(sums["loss"], (loss * weights).sum(), rtol=1e-6)
    np.testing.assert_allclose(sums["nats"], (nats * weights).sum(), rtol=1e-6)
    np.testing.assert_allclose(sums["correct"], ((exact.argmax(-1) == labels) * weights).sum())
    assert sums["count"] == weights.sum()


def test_of_equal_logits_the_first_is_predicted():
    logits = jnp.asarray([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0], [3.0, -jnp.inf, 3.0], [0, jnp.nan, 1]])
    for label, correct in enumerate(([0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0])):
        found = [
            float(objective.label_sums(row[None], jnp.asarray([label]), jnp.ones(1))["correct"])
            for row in logits
        ]
        assert found == correct
    # The cases are those of argmax, but that nothing is right beside a logit that is no number.
    assert jnp.argmax(logits[:3], -1).tolist() == [1, 0, 0]


def test_a_row_of_padding_changes_nothing_but_is_not_counted(tiny):
    config = tiny("translation", **{"model.dropout_rate": 0.0})
    model = make_model("translation", config.model)
    params = jax.jit(objective.make_initializer("translation", model, 16))(jax.random.key(0))
    rng = np.random.default_rng(1)
    batch = {name: rng.integers(5, 300, (2, 8)) for name in ("source", "target", "labels")}
    batch = {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()} | {
        "weights": jnp.ones((2, 8), jnp.float32)
    }
    padded = {k: jnp.concatenate([v, jnp.zeros_like(v)]) for k, v in batch.items()}
    sums_function = jax.jit(lambda p, b: objective.make_sums("translation", model)(p, b, None))
    one, two = (sums_function(params, b) for b in (batch, padded))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-6)
    assert one["tokens"] == 32
