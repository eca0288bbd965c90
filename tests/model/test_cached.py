"""Decoding over the cache equals the full pass, and the cache has the size it should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.config import KroneckerConfig
from mhe_jax.model import unroll_layers
from mhe_jax.tasks import TASKS

T, PREFILL = 5, 3


def start(model, params, task, inputs, length=None):
    argument = inputs[0].shape[0] if task == "lm" else inputs[0]
    _, cache = model.apply(
        {"params": params}, argument, length, method="start_cache", mutable=["cache"]
    )
    return cache


def step(model, params, cache, tokens, positions):
    return model.apply(
        {"params": params} | cache, tokens, positions, method="decode_step", mutable=["cache"]
    )


@pytest.mark.parametrize(
    ("kind", "kronecker", "positions", "task", "scan_layers"),
    [
        ("mha", None, "learned", "translation", False),
        ("mhe_mul", None, "rotary", "translation", True),
        ("mva", None, "learned", "lm", True),
        ("gta", None, "rotary", "lm", True),
        ("mla", 2, "rotary", "lm", True),
        ("ghla", 2, "learned", "translation", False),
    ],
)
def test_prefill_and_steps_equal_the_full_pass(tiny, kind, kronecker, positions, task, scan_layers):
    of_model = {"scan_layers": scan_layers, "positions": positions}
    of_model["kronecker"] = KroneckerConfig(kronecker, kronecker, kronecker)
    config = tiny.config(kind, features=16, mlp="gated", **of_model)
    params = tiny.params(task, config)
    model = TASKS[task].model(config)
    inputs = tiny.inputs(task)
    tokens = inputs[-1][:, :T]

    def run(params):
        cache = start(model, params, task, inputs, length=T)
        positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
        first, cache = step(model, params, cache, tokens[:, :PREFILL], positions[:, :PREFILL])

        def one(cache, token_and_position):
            logits, cache = step(model, params, cache, *token_and_position)
            return cache, logits[:, 0]

        columns = tokens.T[PREFILL:, :, None], positions.T[PREFILL:, :, None]
        if scan_layers:
            cache, rest = jax.lax.scan(one, cache, columns)
            return jnp.concatenate([first, rest.swapaxes(0, 1)], 1), cache
        rest = []
        for column in zip(*columns, strict=True):
            cache, logits = one(cache, column)
            rest.append(logits[:, None])
        return jnp.concatenate([first, *rest], 1), cache

    cached, cache = tiny.maybe_jit(run, config)(params)
    unrolled = dataclasses.replace(config, scan_layers=False)
    full = tiny.logits(task, unrolled, unroll_layers(params), (*inputs[:-1], tokens))
    np.testing.assert_allclose(cached, full, atol=1e-5, rtol=1e-5)
    for leaf in jax.tree.leaves(cache):
        assert leaf.shape[model.cache_batch_axis] == 2


def test_the_default_length_is_the_longest_sequence(tiny):
    config = tiny.config()
    model = TASKS["lm"].model(config)
    cache = start(model, tiny.params("lm", config), "lm", tiny.inputs("lm"))
    assert cache["cache"]["decoder"]["layer_0"]["self_attention"]["cached_key"].shape[1] == 9


def test_an_overfull_cache_never_clamps(tiny):
    """What is known before the program runs raises; what only the rows know poisons with NaN."""
    config = tiny.config("mhe_mul", scan_layers=True)
    model, params = TASKS["lm"].model(config), tiny.params("lm", config)
    tokens = tiny.inputs("lm")[0]
    positions = jnp.broadcast_to(jnp.arange(7), tokens.shape)
    cache = start(model, params, "lm", (tokens,), length=4)
    with pytest.raises(ValueError, match="do not fit"):
        step(model, params, cache, tokens, positions)

    @tiny.jit
    def twice(params, cache):
        first, cache = step(model, params, cache, tokens[:, :3], positions[:, :3])
        second, _ = step(model, params, cache, tokens[:, 3:5], positions[:, 3:5])
        return first, second

    first, second = twice(params, cache)
    assert np.isfinite(first).all()
    assert np.isnan(second).all()
