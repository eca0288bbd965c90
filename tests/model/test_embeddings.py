"""Tables, positions and tied logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.config import ModelConfig
from mhe_jax.model.embeddings import Embeddings

TOKENS = jnp.array([[3, 5, 7, 1], [2, 2, 9, 4]])


def embeddings(**changes):
    fields = {"vocabulary_size": 11, "features": 6, "max_length": 5, "dropout_rate": 0.0}
    return Embeddings(ModelConfig(**fields | changes))


def test_sum_of_the_tables_times_the_root_of_the_width():
    module = embeddings(num_token_types=2)
    types = jnp.array([[0, 0, 1, 1], [1, 0, 0, 1]])
    x, variables = module.init_with_output(jax.random.key(0), TOKENS, None, types)
    p = jax.tree.map(np.asarray, variables["params"])
    want = p["token"][TOKENS] + p["position"][None, :4] + p["type"][types]
    np.testing.assert_allclose(x, np.sqrt(6) * want, rtol=1e-6)


def test_sinusoids_are_sines_then_cosines_and_are_not_scaled():
    module = embeddings(positions="sinusoidal")
    places = jnp.array([[0, 1, 2, 3], [4, 4, 0, 1]])
    x, variables = module.init_with_output(jax.random.key(0), TOKENS, places)
    assert "position" not in variables["params"]
    rates = 10000.0 ** -(np.arange(3) / 2)
    angles = np.asarray(places)[..., None] * rates
    want = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    token = np.asarray(variables["params"]["token"])[TOKENS]
    np.testing.assert_allclose(x, np.sqrt(6) * token + want, atol=1e-5)


def test_positions_count_from_0_where_they_are_not_given():
    module = embeddings()
    x, variables = module.init_with_output(jax.random.key(0), TOKENS)
    same = module.apply(variables, TOKENS, jnp.array([[0, 1, 2, 3]] * 2))
    np.testing.assert_array_equal(x, same)


def test_dropout_comes_last():
    """After the norm, so that all of it may be dropped, its bias too."""
    module = Embeddings(embeddings(dropout_rate=1.0).config, normalize=True)
    variables = module.init(jax.random.key(0), TOKENS)
    bias = {"norm": variables["params"]["norm"] | {"bias": jnp.full(6, 0.5)}}
    given = {"params": variables["params"] | bias}
    rngs = {"dropout": jax.random.key(1)}
    x = module.apply(given, TOKENS, deterministic=False, rngs=rngs)
    np.testing.assert_array_equal(x, np.zeros((2, 4, 6)))
    assert np.all(np.asarray(module.apply(given, TOKENS)) != 0)


def test_initial_scale():
    module = embeddings(vocabulary_size=500, features=64, max_length=300)
    tokens = jnp.arange(300)[None] % 500
    x, variables = module.init_with_output(jax.random.key(0), tokens)
    for table in variables["params"].values():
        np.testing.assert_allclose(table.std(), 1 / 8, rtol=0.05)
    np.testing.assert_allclose(x.std(), np.sqrt(2), rtol=0.05)
    unit = jax.random.normal(jax.random.key(1), (2, 9, 64))
    logits = module.apply(variables, unit, method="attend")
    np.testing.assert_allclose(logits.std(), 1, rtol=0.05)


@pytest.mark.parametrize("tie", [True, False])
def test_logits(tie):
    module = embeddings(tie_embeddings=tie)
    variables = module.init(jax.random.key(0), TOKENS)
    p = variables["params"]
    assert ("output" in p) != tie
    x = jax.random.normal(jax.random.key(1), (2, 3, 6))
    table = p["token"].T if tie else p["output"]
    np.testing.assert_allclose(module.apply(variables, x, method="attend"), x @ table, atol=1e-6)
    half = module.apply(variables, x.astype(jnp.bfloat16), method="attend")
    assert half.dtype == jnp.float32
    # Of rounded numbers, but summed without rounding.
    rounded = (np.asarray(y.astype(jnp.bfloat16), np.float64) for y in (x, table))
    np.testing.assert_allclose(half, np.matmul(*rounded), rtol=1e-5, atol=1e-5)
    assert embeddings(dtype="bfloat16").apply(variables, TOKENS).dtype == jnp.bfloat16


@pytest.mark.parametrize("multiple", [1, 8])
def test_logits_of_tokens_that_are_absent(multiple):
    """Softmax gives them nothing, nor what pads the vocabulary."""
    module = embeddings(absent_tokens=(1, 4), vocabulary_multiple=multiple)
    variables = module.init(jax.random.key(0), TOKENS)
    logits = module.apply(variables, jnp.ones((1, 1, 6)), method="attend")[0, 0]
    absent = [1, 4, *range(11, len(logits))]
    np.testing.assert_array_equal(logits == -jnp.inf, np.isin(np.arange(len(logits)), absent))


def test_what_does_not_fit_is_refused_or_poisoned():
    module = embeddings()
    variables = module.init(jax.random.key(0), TOKENS)
    with pytest.raises(ValueError, match=r"rows of 6 tokens .* model.max_length=5"):
        module.apply(variables, jnp.ones((1, 6), jnp.int32))
    with pytest.raises(ValueError, match="num_token_types is 0"):
        module.apply(variables, TOKENS, None, TOKENS)
    past_the_end = module.apply(variables, jnp.ones((1, 2), jnp.int32), jnp.array([[4, 5]]))
    np.testing.assert_array_equal(np.isnan(past_the_end).all(-1), [[False, True]])
    unknown = module.apply(variables, jnp.array([[10, 11]]))
    np.testing.assert_array_equal(np.isnan(unknown).all(-1), [[False, True]])
