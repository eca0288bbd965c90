"""Dropout of activations: what it keeps, how often, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.attention.projection import Dropout


def drop(x, rate, seed=0):
    rngs = {"dropout": jax.random.key(seed)}
    return Dropout(rate).apply({}, x, deterministic=False, rngs=rngs)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_shares_and_scale(rate):
    x = jnp.ones((300, 1001))
    y = np.asarray(drop(x, rate))
    keep = 1 - round(rate * 2**16) / 2**16
    np.testing.assert_allclose(np.unique(y), [0, 1 / keep], rtol=1e-6)
    deviation = (rate * (1 - rate) / x.size) ** 0.5
    assert abs(np.mean(y == 0) - rate) < 5 * deviation
    # Each column and row by itself, so also the two halves of a word.
    for axis in (0, 1):
        spread = np.mean(y == 0, axis) - rate
        assert np.abs(spread).max() < 6 * (rate * (1 - rate) / x.shape[axis]) ** 0.5


def test_halves_of_a_word_are_independent():
    dropped = np.asarray(drop(jnp.ones((2000, 100)), 0.5)) == 0
    share = np.mean(dropped[:, :50] & dropped[:, 50:])
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 1e5) ** 0.5


def test_the_key_decides():
    x = jnp.ones((4, 64))
    np.testing.assert_array_equal(drop(x, 0.5), drop(x, 0.5))
    assert (drop(x, 0.5) != drop(x, 0.5, seed=1)).any()


@pytest.mark.parametrize("width", [1, 7, 8])
def test_gradient_has_the_same_mask(width):
    x = jax.random.normal(jax.random.key(1), (3, 5, width))
    y, pull = jax.vjp(lambda x: drop(x, 0.3), x)
    (gradient,) = pull(jnp.ones_like(y))
    np.testing.assert_allclose(y, x * gradient, rtol=1e-6)
    assert y.shape == x.shape


@pytest.mark.parametrize(("rate", "deterministic"), [(0.0, False), (0.5, True)])
def test_nothing_is_drawn_where_nothing_is_dropped(rate, deterministic):
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(Dropout(rate).apply({}, x, deterministic=deterministic), x)


def test_everything_may_be_dropped():
    x = jnp.arange(6.0).reshape(2, 3)
    y, pull = jax.vjp(lambda x: drop(x, 1.0), x)
    np.testing.assert_array_equal(y, jnp.zeros_like(x))
    np.testing.assert_array_equal(pull(jnp.ones_like(y))[0], jnp.zeros_like(x))


def test_bfloat16_stays():
    x = jnp.ones((8, 8), jnp.bfloat16)
    assert drop(x, 0.1).dtype == jnp.bfloat16
