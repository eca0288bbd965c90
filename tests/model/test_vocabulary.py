"""A vocabulary padded to a multiple: nothing that is measured or generated knows of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.evaluation.decoding import beam_search
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS

PADDED = 32


def cut(params, config):
    """Padded parameters as those of the model without padding."""
    V = config.vocabulary_size

    def of(path, leaf):
        axes = [i for i, size in enumerate(leaf.shape) if size == PADDED]
        assert len(axes) < 2
        return jnp.take(leaf, jnp.arange(V), axis=axes[0]) if axes else leaf

    return jax.tree_util.tree_map_with_path(of, params)


@pytest.mark.parametrize(("task", "tie_embeddings"), [("mlm", True), ("lm", False)])
def test_padding_changes_no_number(tiny, task, tie_embeddings):
    config = tiny.config("mhe_mul", tie_embeddings=tie_embeddings, num_layers=1)
    padded_config = dataclasses.replace(config, vocabulary_multiple=PADDED)
    V = config.vocabulary_size
    assert padded_config.padded_vocabulary_size == PADDED > V
    inputs = tiny.inputs(task)
    padded, plain = TASKS[task].model(padded_config), TASKS[task].model(config)
    params = tiny.params(task, padded_config)
    plain_params = cut(params, config)
    logits = padded.apply({"params": params}, *inputs)
    want = plain.apply({"params": plain_params}, *inputs)
    assert logits.shape[-1] == PADDED
    np.testing.assert_array_equal(logits[..., V:], -np.inf)
    np.testing.assert_allclose(logits[..., :V], want, rtol=1e-6, atol=1e-6)
    assert count_parameters(params, padded_config) == count_parameters(plain_params)
    assert count_parameters(plain_params, config) == count_parameters(plain_params)

    labels = np.arange(want[..., 0].size, dtype=np.int32).reshape(want.shape[:-1]) % V
    names = TASKS[task].inputs
    batch = dict(zip(names, inputs, strict=True)) | {
        "labels": labels,
        "weights": np.ones(labels.shape, np.float32),
    }

    def loss_of(model):
        sums = TASKS[task].sums(model, label_smoothing=0.1)
        return jax.value_and_grad(lambda params: sums(params, batch, None)["loss"])

    loss, gradients = tiny.jit(loss_of(padded))(params)
    want_loss, want_gradients = tiny.jit(loss_of(plain))(plain_params)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        cut(gradients, config),
        want_gradients,
    )
    for leaf in jax.tree.leaves(gradients):
        for axis in (i for i, size in enumerate(leaf.shape) if size == PADDED):
            np.testing.assert_array_equal(np.moveaxis(leaf, axis, 0)[V:], 0.0)


@pytest.mark.parametrize("beam_size", [1, 9])  # 9 are more than there are pieces
def test_a_search_never_finds_padding(beam_size):
    V, rows, length = 7, 3, 5
    table = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
    padded = np.pad(table, ((0, 0), (0, 4)), constant_values=-np.inf)
    options = {"max_length": length, "bos_id": 1, "eos_id": 2, "pad_id": 0}
    options |= {"forbidden_ids": (0, 1), "beam_size": beam_size}

    def found(table):
        def step(cache, tokens, positions):
            return jnp.asarray(table)[tokens[:, 0]], cache

        cache = {"any": jnp.zeros((rows, 1))}
        return beam_search(step, cache, jnp.full((rows,), length), **options)

    want, got = found(table), found(padded)
    jax.tree.map(np.testing.assert_array_equal, want.tokens, got.tokens)
    np.testing.assert_allclose(got.scores, want.scores, rtol=1e-6)
