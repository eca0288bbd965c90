"""Heads on an encoder: by hand, and what does not matter must not."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest
from random_parameters import random_parameters

from mhe_jax.config import AttentionConfig, ModelConfig
from mhe_jax.model.encoder import EncoderModel
from mhe_jax.tasks import TASKS

CONFIG = ModelConfig(
    vocabulary_size=13,
    features=6,
    mlp_features=7,
    num_layers=1,
    max_length=11,
    num_token_types=2,
    num_classes=5,
    attention=AttentionConfig(kind="mhe_mul", num_heads=3),
)
TOKENS = np.array([[2, 7, 8, 3, 9, 10, 3, 0, 0], [2, 5, 3, 6, 3, 0, 0, 0, 0]])
TYPES = np.array([[0, 0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0]])
MARKS = np.array([[0, 1, 1, 0, 0, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0, 0]])


def made(task, config=CONFIG, inputs=(TOKENS, TYPES, MARKS)):
    model = TASKS[task].model(config)
    params = random_parameters(lambda key: model.init(key, *inputs)["params"], size=0.5)
    return model, {"params": params}


def encoded(config, variables):
    params = {name: variables["params"][name] for name in ("embeddings", "encoder")}
    model = EncoderModel(config)
    types = TYPES if config.num_token_types > 1 else None
    return np.asarray(model.apply({"params": params}, TOKENS, types, method="encode"))


def head(params, z):
    z = np.tanh(z @ params["pooler"]["kernel"] + params["pooler"]["bias"])
    return z @ params["classifier"]["kernel"] + params["classifier"]["bias"]


@pytest.mark.parametrize(
    ("num_spans", "token_types", "pooling"), [(0, 0, "first"), (2, 2, "first"), (2, 0, "mean")]
)
def test_classifier_by_hand(num_spans, token_types, pooling):
    config = dataclasses.replace(
        CONFIG, num_spans=num_spans, num_token_types=token_types, pooling=pooling
    )
    model, variables = made("classification", config)
    x = encoded(config, variables)
    mean = np.stack([x[0, :7].mean(axis=0), x[1, :5].mean(axis=0)])
    parts = [x[:, 0] if pooling == "first" else mean]
    if num_spans:
        parts += [np.stack([x[0, 1:3].mean(axis=0), x[1, 1]])]
        parts += [np.stack([x[0, 5], np.zeros(6)])]  # the second row has no second span
    expected = head(variables["params"], np.concatenate(parts, axis=-1))
    found = model.apply(variables, TOKENS, TYPES, MARKS)
    assert found.shape == (2, 5)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_dropout_is_before_the_pooler_and_after_it():
    config = dataclasses.replace(CONFIG, num_spans=2, dropout_rate=0.5)
    model = TASKS["classification"].model(config)
    for deterministic in (False, True):
        found = []

        def note(function, args, kwargs, context, found=found):
            if context.module.path == ("dropout",) and context.method_name == "__call__":
                found.append((args[0].shape, kwargs["deterministic"]))
            return function(*args, **kwargs)

        def init(key, fixed=deterministic):
            keys = {"params": key, "dropout": key}
            return model.init(keys, TOKENS, TYPES, MARKS, deterministic=fixed)

        with nn.intercept_methods(note):
            jax.eval_shape(init, jax.random.key(0))
        assert found == [((2, 3 * 6), deterministic), ((2, 6), deterministic)]


def test_regressor_and_choices():
    config = dataclasses.replace(CONFIG, num_classes=None)
    model, variables = made("regression", config)
    found = model.apply(variables, TOKENS, TYPES, MARKS)
    expected = head(variables["params"], encoded(config, variables)[:, 0])[:, 0]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    # The choices of a row are scored alike, by themselves.
    scorer = TASKS["multiple_choice"].model(config)
    choices = (np.stack([x] * 3) for x in (TOKENS, TYPES, MARKS))
    found = scorer.apply(variables, *choices)
    np.testing.assert_allclose(found, np.stack([expected] * 3), atol=2e-6)


def test_span_by_hand():
    model, variables = made("span")
    found = np.asarray(model.apply(variables, TOKENS, TYPES, MARKS))
    span = variables["params"]["span"]
    expected = encoded(CONFIG, variables) @ span["kernel"] + span["bias"]
    assert found.shape == (2, 2, 9)
    inside = MARKS > 0
    np.testing.assert_allclose(found.swapaxes(1, 2)[inside], expected[inside], atol=2e-6)
    probabilities = jax.nn.softmax(found, axis=-1).swapaxes(1, 2)
    assert (probabilities[~inside] == 0).all()


@pytest.mark.parametrize("task", ["classification", "regression", "multiple_choice", "span"])
def test_padding_changes_nothing(task):
    classes = 5 if task == "classification" else None
    model, variables = made(task, dataclasses.replace(CONFIG, num_classes=classes))
    more = [np.pad(x, ((0, 0), (0, 2))) for x in (TOKENS, TYPES, MARKS)]
    short = model.apply(variables, TOKENS, TYPES, MARKS)
    long = model.apply(variables, *more)
    long = long[..., :9] if task == "span" else long
    np.testing.assert_allclose(long, short, atol=2e-6)
