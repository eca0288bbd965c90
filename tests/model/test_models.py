"""What must hold of every model: causality, padding, batches, dropout, types, learning."""

import collections
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mhe_jax.attention.module import Attention
from mhe_jax.attention.projection import Dropout
from mhe_jax.model import EncoderDecoder, MaskedLanguageModel
from mhe_jax.tasks import TASKS

NAMES = ("mlm", "lm", "translation")


@pytest.mark.parametrize(
    ("task", "kind"),
    [("lm", "mhe_add"), ("translation", "mhe_mul")],
)
def test_no_gradient_from_later_tokens(tiny, task, kind):
    """Every token stands once, so that a row of the (untied) table belongs to one place."""
    config = tiny.config(kind, tie_embeddings=False)
    params = tiny.params(task, config)
    T = 5
    tokens = jnp.arange(1, T + 1)[None]
    sources = jnp.arange(11, 17)[None]
    inputs = (tokens,) if task == "lm" else (sources, tokens)
    model = TASKS[task].model(config)

    def logits(table):
        changed = params | {"embeddings": params["embeddings"] | {"token": table}}
        return jnp.sin(model.apply({"params": changed}, *inputs)[0]).sum(-1)

    gradients = np.abs(tiny.jit(jax.jacrev(logits))(params["embeddings"]["token"])).sum(-1)
    seen = gradients[:, 1 : T + 1] > 0
    np.testing.assert_array_equal(seen, np.tril(np.ones((T, T), bool)))
    if task == "translation":
        assert (gradients[:, 11:17] > 0).all()


@pytest.mark.parametrize("task", NAMES)
def test_a_permuted_batch_permutes_the_output(tiny, task):
    config = tiny.config("mhe_mul")
    params = tiny.params(task, config)
    swapped = [x[::-1] for x in tiny.inputs(task)]
    np.testing.assert_allclose(
        tiny.logits(task, config, params, swapped),
        tiny.logits(task, config, params)[::-1],
        atol=1e-5,
    )


def test_more_padding_changes_no_real_token(tiny):
    """And a row that is nothing else stays finite."""
    config = tiny.config("mhe_add", num_layers=1)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 2)))  # noqa: E731
    for task in NAMES:
        params = tiny.params(task, config)
        inputs = tiny.inputs(task)
        padded = (pad(inputs[0]), *(x if task == "mlm" else pad(x) for x in inputs[1:]))
        want = tiny.logits(task, config, params)
        got = tiny.logits(task, config, params, padded)
        np.testing.assert_allclose(got[:, : want.shape[1]], want, atol=1e-5)
        nothing = [x.at[1].set(0) for x in inputs]
        assert np.isfinite(tiny.logits(task, config, params, nothing)).all()


def outputs(model, params, inputs):
    """What real tokens come to: encoded, decoded at once, and decoded over the cache."""
    variables = {"params": params}
    tokens, *targets = inputs
    found = {"encoded": model.apply(variables, tokens, method="encode")}
    if targets:
        found["decoded"] = model.apply(variables, *inputs)
        _, cache = model.apply(variables, tokens, method="start_cache", mutable=["cache"])
        positions = jnp.broadcast_to(jnp.arange(targets[0].shape[1]), targets[0].shape)
        step = {"method": "decode_step", "mutable": ["cache"]}
        found["over the cache"], _ = model.apply(variables | cache, *targets, positions, **step)
    return found


def made(tiny, task, kind, right_padded):
    """A model, its parameters, its token inputs; tables of the output lie apart."""
    config = tiny.config(kind, tie_embeddings=False)
    cls = {"mlm": MaskedLanguageModel, "translation": EncoderDecoder}[task]
    inputs = tiny.inputs(task) if task == "translation" else tiny.inputs(task)[:1]
    return cls(config, right_padded=right_padded), tiny.params(task, config), inputs


@pytest.mark.parametrize(("task", "kind"), [("mlm", "mhe_add"), ("translation", "mha")])
def test_inner_padding_is_not_attended_to(tiny, task, kind):
    """Another embedding of it changes what comes out at itself alone."""
    model, params, (tokens, *targets) = made(tiny, task, kind, right_padded=False)
    tokens = tokens.at[0, 2].set(0).at[1, 0].set(0)
    table = params["embeddings"]["token"]
    other = params | {"embeddings": params["embeddings"] | {"token": table.at[0].multiply(-3)}}
    targets = [x.clip(1) for x in targets]
    want, got = (outputs(model, p, (tokens, *targets)) for p in (params, other))
    for name, x in want.items():
        real = (tokens != 0) if name == "encoded" else np.ones(targets[0].shape, bool)
        np.testing.assert_array_equal(got[name][real], x[real])
        assert np.isfinite(x).all()
    at_padding = np.abs(got["encoded"] - want["encoded"])[tokens == 0]
    assert (at_padding.max(-1) > 1e-2).all()


@pytest.mark.parametrize("task", ["mlm", "translation"])
def test_right_padded_rows_by_their_lengths(tiny, task):
    """Bit by bit what the mask gives; where padding stands before a token, the row is NaN."""
    anywhere, params, inputs = made(tiny, task, "mha", right_padded=False)
    right, *_ = made(tiny, task, "mha", right_padded=True)
    tokens, *targets = inputs
    for given in (tokens.at[1].set(0), tokens):
        want, got = (outputs(model, params, (given, *targets)) for model in (anywhere, right))
        for name, x in want.items():
            np.testing.assert_array_equal(got[name], x)
    # The only change: now a token stands behind the padding of the second row.
    broken = outputs(right, params, (tokens.at[1, 5].set(3), *targets))
    for name, x in broken.items():
        np.testing.assert_array_equal(x[0], want[name][0])
        assert np.isnan(x[1]).all(), name


def test_tasks_pass_lengths_and_the_cache_keeps_them(tiny):
    """Each attention to padded tokens, in training and in each step of a search."""
    seen = collections.Counter()

    def note(function, args, kwargs, context):
        if isinstance(context.module, Attention) and context.method_name == "__call__":
            mask = kwargs.get("mask")
            parts = [] if mask is None else ["key_lengths", "key_valid"]
            of = [part for part in parts if getattr(mask, part) is not None]
            seen[context.module.name, *of] += 1
        return function(*args, **kwargs)

    config = tiny.config(num_layers=1)
    model, params = TASKS["translation"].model(config), tiny.params("translation", config)
    sources, targets = tiny.inputs("translation")
    assert TASKS["mlm"].model(config).right_padded
    with nn.intercept_methods(note):
        outputs(model, params, (sources, targets))
    assert seen["self_attention", "key_lengths"] == 3  # of the encoder, each time
    assert seen["cross_attention", "key_lengths"] == 2  # decoded at once, and over the cache
    assert not any("key_valid" in key for key in seen)
    for right_padded, shape in {True: (2,), False: (2, 7)}.items():
        model = EncoderDecoder(config, right_padded=right_padded)
        arguments = {"params": params}, sources
        _, state = model.apply(*arguments, method="start_cache", mutable=["cache"])
        kept = state["cache"]["decoder"]["layer_0"]
        name = "encoded_lengths" if right_padded else "encoded_valid"
        assert {k: v.shape for k, v in kept.items() if k.startswith("encoded")} == {name: shape}


def test_token_types(tiny):
    config = tiny.config(num_token_types=2)
    params = tiny.params("mlm", config)
    tokens, masked = tiny.inputs("mlm")
    without = tiny.logits("mlm", config, params)
    types = (jnp.zeros_like(tokens), jnp.ones_like(tokens))
    zeros, ones = (tiny.logits("mlm", config, params, (tokens, masked, of)) for of in types)
    np.testing.assert_array_equal(without, zeros)
    assert (np.abs(ones - zeros) > 1e-3).any()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_head_of_a_masked_language_model_is_its_equation(tiny, activation):
    config = tiny.config(activation=activation, layer_norm_epsilon=0.1)
    params = tiny.params("mlm", config)
    tokens, masked = tiny.inputs("mlm")
    model = TASKS["mlm"].model(config)
    p = jax.tree.map(np.asarray, params)
    x = np.asarray(model.apply({"params": params}, tokens, method="encode"))
    x = np.take_along_axis(x, np.asarray(masked)[:, :, None], 1)
    x = x @ p["head_dense"]["kernel"] + p["head_dense"]["bias"]
    half = jax.scipy.special.erf(x / np.sqrt(2)) if activation == "gelu" else np.sign(x)
    x = np.asarray(x * (1 + half) / 2)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1)
    x = x * p["head_norm"]["scale"] + p["head_norm"]["bias"]
    want = x @ p["embeddings"]["token"].T + p["vocabulary_bias"]
    np.testing.assert_allclose(tiny.logits("mlm", config, params), want, atol=2e-5)


@pytest.mark.parametrize(
    ("task", "wanted"),
    [
        # Embeddings and sublayers; attention.
        ("mlm", {Dropout: 1 + 2 * 2, Attention: 2}),
        ("lm", {Dropout: 1 + 2 * 2, Attention: 2}),
        ("translation", {Dropout: 2 + 2 * 2 + 2 * 3, Attention: 2 + 2 * 2}),
    ],
)
def test_dropout_is_asked_of_every_part(tiny, task, wanted):
    """In training, and in training alone."""
    model, inputs = TASKS[task].model(tiny.config(num_layers=2)), tiny.inputs(task)
    for deterministic in (True, False):
        asked = collections.Counter()

        def note(function, args, kwargs, context, asked=asked):
            for part in (Dropout, Attention):
                if isinstance(context.module, part) and context.method_name == "__call__":
                    asked[part, kwargs["deterministic"]] += 1
            return function(*args, **kwargs)

        def init(key, fixed=deterministic):
            keys = {"params": key, "dropout": key}
            return model.init(keys, *inputs, deterministic=fixed)

        with nn.intercept_methods(note):
            jax.eval_shape(init, jax.random.key(0))
        assert asked == {(part, deterministic): count for part, count in wanted.items()}


def test_bfloat16_is_close(tiny):
    task = "translation"
    config = tiny.config("mhe_mul", scan_layers=True)
    params = tiny.params(task, config)
    want = tiny.logits(task, config, params)
    half = dataclasses.replace(config, dtype="bfloat16")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tiny.params(task, half)))
    got = tiny.logits(task, half, params)
    assert got.dtype == want.dtype == jnp.float32
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def loss_of(task, model, params, inputs, labels):
    logits = model.apply({"params": params}, *inputs)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.parametrize(("task", "norm_position"), [("mlm", "post"), ("translation", "pre")])
def test_loss_and_gradients_at_the_start(tiny, task, norm_position):
    """The loss is that of knowing nothing, and every parameter gets a moderate gradient."""
    config = tiny.config("mhe_mul", norm_position=norm_position, scan_layers=True)
    model = TASKS[task].model(config)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(1, 26, (16, 9)))
    inputs = (tokens,) if task == "lm" else (tokens, tokens % 9 if task == "mlm" else tokens)
    labels = jnp.asarray(rng.integers(1, 26, (16, 9)))
    params = tiny.jit(model.init)(jax.random.key(0), *inputs)["params"]

    def loss(params):
        return loss_of(task, model, params, inputs, labels)

    value, gradients = tiny.jit(jax.value_and_grad(loss))(params)
    assert abs(value - np.log(26)) < 1
    assert 0.05 < optax.tree.norm(gradients) < 10
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 1e-8, path
