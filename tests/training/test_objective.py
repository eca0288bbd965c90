"""Sums of losses against float64, with smoothing and weights; what a validation says of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.tasks import TASKS
from mhe_jax.tasks.sums import criterion, label_sums, ratios, squared_error_sums, total
from mhe_jax.tasks.task import Task


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_label_sums(smoothing, dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 5, 7)) * 3, dtype)
    labels = rng.integers(0, 7, (3, 5))
    weights = rng.integers(0, 2, (3, 5)).astype(np.float32)
    sums = label_sums(logits, jnp.asarray(labels), jnp.asarray(weights), smoothing)
    exact = np.asarray(logits, np.float64)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    loss = (1 - smoothing) * nats - smoothing * log_p.mean(-1)
    assert all(value.dtype == jnp.float32 for value in sums.values())
    np.testing.assert_allclose(sums["loss"], (loss * weights).sum(), rtol=1e-6)
    np.testing.assert_allclose(sums["nats"], (nats * weights).sum(), rtol=1e-6)
    assert ("unsmoothed_loss" in sums) == (smoothing > 0)
    assert sums.get("unsmoothed_loss", sums["loss"]) == sums["nats"]
    np.testing.assert_allclose(sums["correct"], ((exact.argmax(-1) == labels) * weights).sum())
    assert sums["count"] == weights.sum()


def test_of_equal_logits_the_first_is_predicted():
    logits = jnp.asarray([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0], [3.0, -jnp.inf, 3.0], [0, jnp.nan, 1]])
    for label, correct in enumerate(([0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0])):
        found = [
            float(label_sums(row[None], jnp.asarray([label]), jnp.ones(1))["correct"])
            for row in logits
        ]
        assert found == correct
    # The cases are those of argmax, but that nothing is right beside a logit that is no number.
    assert jnp.argmax(logits[:3], -1).tolist() == [1, 0, 0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_without_weight_may_be_a_token_that_does_not_exist(smoothing):
    """Its logit is -inf: loss and gradient stay those of the other labels."""
    logits = np.random.default_rng(2).normal(size=(2, 3, 5)).astype(np.float32)
    logits[..., 0] = -np.inf
    labels, weights = jnp.array([[1, 4, 0], [2, 0, 0]]), jnp.array([[1.0, 2, 0], [1, 0, 0]])

    def sums(logits, labels):
        found = label_sums(logits, labels, weights, smoothing)
        return found["loss"], found

    run = jax.value_and_grad(sums, has_aux=True)
    (loss, found), gradient = run(jnp.asarray(logits), labels)
    (_, other), same = run(jnp.asarray(logits), jnp.where(weights > 0, labels, 3))
    assert np.isfinite(loss)
    assert jax.tree.map(float, found) == jax.tree.map(float, other)
    np.testing.assert_array_equal(gradient, same)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[weights == 0])


def test_squared_errors_of_what_counts():
    predictions, labels = np.array([0.5, 3.0, -2.0], np.float32), np.array([2.5, 3.5, 9.0])
    sums = squared_error_sums(
        jnp.asarray(predictions, jnp.bfloat16), jnp.asarray(labels), jnp.array([1.0, 1.0, 0.0])
    )
    assert {name: float(value) for name, value in sums.items()} == {"loss": 4.25, "count": 2.0}


def test_ratios_are_over_what_counts():
    sums = {"loss": 7.0, "nats": 6.0, "correct": 3.0, "count": 5.0, "tokens": 11.0}
    found = ratios(sums)
    assert found == pytest.approx({"loss": 1.4, "accuracy": 0.6, "perplexity": np.exp(1.2)})
    assert ratios({"loss": 7.0, "count": 5.0, "tokens": 11.0}) == {"loss": 1.4}
    assert ratios({"loss": 0.0, "count": 0.0}) == {"loss": 0.0}
    assert np.isfinite(ratios({"loss": 9e9, "nats": 9e9, "count": 5.0})["perplexity"])
    smoothed = {"loss": 7.0, "unsmoothed_loss": 6.0, "count": 5.0}
    assert ratios(smoothed) == pytest.approx({"loss": 1.2, "smoothed_loss": 1.4})


class Recorder(nn.Module):
    """Takes anything, and gives logits of a shape."""

    shape: tuple[int, ...]

    def __call__(self, *inputs, deterministic, **named):
        return jnp.broadcast_to(jnp.arange(self.shape[-1], dtype=jnp.float32) ** 2, self.shape)


@pytest.mark.parametrize(
    ("task", "shape", "tokens"),
    [
        ("mlm", (2, 3, 7), 7),
        ("shuffle_random", (2, 5, 3), 7),
        ("lm", (2, 5, 7), 7),
        ("translation", (2, 5, 7), 7 + 5),
        ("classification", (2, 7), 7),
        ("regression", (2,), 7),
    ],
)
def test_tokens_are_ids_that_are_not_padding(task, shape, tokens):
    ids = np.array([[3, 4, 5, 6, 0], [2, 8, 9, 0, 0]], np.int32)
    batch = {name: np.ones((2, 5), np.int32) for name in TASKS[task].inputs}
    batch |= {TASKS[task].inputs[0]: ids, "index": np.arange(2)}
    if task == "translation":
        batch["target"] = np.array([[2, 4, 0, 0, 0], [2, 8, 9, 0, 0]], np.int32)
    of_labels = shape if task == "regression" else shape[:-1]
    batch |= {"labels": np.zeros(of_labels, np.int32), "weights": np.ones(of_labels, np.float32)}
    sums = TASKS[task].sums(Recorder(shape))({}, batch, None)
    assert sums["tokens"] == tokens


def test_outputs_of_shuffle_random_tell_shuffled_from_original():
    logits = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)

    class Fixed(nn.Module):
        def __call__(self, tokens, *, deterministic):
            return jnp.asarray(logits)

    labels = np.array([[0, 1, 2, 1, 0], [2, 0, 1, 0, 0]])
    weights = np.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 0]], np.float32)
    batch = {"tokens": np.ones((2, 5), np.int32), "labels": labels, "weights": weights}
    found = TASKS["shuffle_random"].sums(Fixed(), outputs=True)({}, batch, None)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(found["outputs"], log_p[..., 1] - log_p[..., 0], atol=1e-6)
    np.testing.assert_array_equal(found["index"], [[0, 1, 2, -1, 0], [-1, 0, 1, 0, -1]])


def test_auc_is_of_moved_against_original_tokens():
    """Random tokens and what does not count are left out; a text may have neither."""
    labels = np.array([[0, 1, 2, -1], [1, 0, 2, -1]])
    odds = np.array([[-1.0, 2.0, -9.0, 9.0], [1.0, 3.0, 9.0, -9.0]])
    scores = TASKS["shuffle_random"].scores
    assert scores(None, [(labels[:1], odds[:1]), (labels[1:], odds[1:])]) == {"auc": 0.5}
    assert scores(None, [(labels[:1], odds[:1])]) == {"auc": 1.0}
    assert scores(None, [(labels[:, 2:], odds[:, 2:])]) == {"auc": 0.5}


LOSSES = [
    {"loss": np.float32(6.0), "count": np.float32(3.0), "tokens": np.float32(11.0)},
    {"loss": np.float32(1.0), "count": np.float32(2.0), "tokens": np.float32(7.0)},
]


class Scored(Task):
    """Scores batches by what it is given of them."""

    def __init__(self):
        self.given = []

    def scores(self, batches, outputs):
        self.given.append((batches, outputs))
        return {"score": 83.0}


def test_the_best_has_the_least_loss_or_the_highest_score():
    assert criterion({"loss": 2.0}) < criterion({"loss": 3.0})
    one, other = {"loss": 3.0, "score": 5.0}, {"loss": 2.0, "score": 4.0}
    assert criterion(one) < criterion(other)
    # Of equal scores, the least loss.
    assert criterion({"loss": 2.0, "score": 5.0}) < criterion(one)


def test_a_loss_that_is_no_number_is_never_the_best():
    nan = criterion({"loss": float("nan")})
    assert criterion({"loss": 1e30}) < nan
    assert criterion({"loss": 9.0, "score": -9.0}) < criterion({"loss": 1.0, "score": np.nan})


def test_sums_are_of_all_batches_and_lose_no_digits():
    found = [{"loss": np.float32(1.0), "index": 0}, {"loss": np.float32(2.0**24), "index": 1}]
    assert total(found) == {"loss": 1.0 + 2.0**24}


def test_scores_come_where_there_are_outputs_that_are_numbers():
    found = [batch | {"index": i, "outputs": 10 * i} for i, batch in enumerate(LOSSES)]
    task = Scored()
    assert task.measure(found, "batches") == {"loss": pytest.approx(7 / 5), "score": 83.0}
    assert task.given == [("batches", [(0, 0), (1, 10)])]
    broken = [found[0], found[1] | {"loss": np.float32("nan")}]
    assert set(task.measure(broken, "batches")) == {"loss"}
    assert len(task.given) == 1
