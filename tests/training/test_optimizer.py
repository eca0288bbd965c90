"""Schedules by their values, who decays, and who never moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.config import OptimizerConfig
from mhe_jax.model import make_model
from mhe_jax.training import objective
from mhe_jax.training.optimizer import decayed, frozen, make_optimizer, make_schedule
from mhe_jax.training.sharding import path_parts

W, N, PEAK = 4, 20, 0.3


def values(schedule, warmup=W):
    config = OptimizerConfig(schedule=schedule, learning_rate=PEAK, warmup_steps=warmup)
    rate = make_schedule(config, N)
    return np.array([rate(count) for count in range(N)])


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("constant", lambda n: np.ones_like(n)),
        ("inverse_sqrt", lambda n: np.sqrt(W / n)),
        ("linear", lambda n: (N - n) / (N - W)),
        ("cosine", lambda n: (1 + np.cos(np.pi * (n - W) / (N - W))) / 2),
    ],
)
def test_schedule(schedule, after):
    n = np.arange(1, N + 1, dtype=np.float64)
    wanted = PEAK * np.where(n <= W, n / W, after(n))
    np.testing.assert_allclose(values(schedule), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedule_ends_at_zero(schedule):
    assert values(schedule)[-1] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt", "linear", "cosine"])
def test_schedule_without_warmup_starts_near_the_peak(schedule):
    found = values(schedule, warmup=0)
    assert np.all(np.isfinite(found))
    assert 0.9 * PEAK < found[0] <= PEAK * (1 + 1e-6)
    assert np.all(np.diff(found) <= 0)


def shapes_of(config):
    model = make_model(config.task, config.model)
    init = objective.make_initializer(config.task, model, 16)
    return jax.eval_shape(init, jax.random.key(0))


def params_of(config):
    """Ones, which are as good as any."""
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes_of(config))


def names(tree, wanted):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(path_parts(path)) for path, leaf in leaves if leaf == wanted}


@pytest.mark.parametrize("scan", [False, True])
def test_no_decay_on_biases_norms_and_head_embeddings(tiny, scan):
    config = tiny(
        "mlm",
        **{
            "model.scan_layers": scan,
            "model.attention.use_bias": True,
            "model.attention.kind": "mhe_add",
            "model.attention.form": "materialized",
            "model.attention.normalize_qk": True,
        },
    )
    mask = decayed(shapes_of(config))
    layer = "encoder/layers" if scan else "encoder/layer_0"
    assert {
        f"{layer}/self_attention/query/bias",
        f"{layer}/self_attention/query_ln/scale",
        f"{layer}/self_attention/query_head_embedding",
        f"{layer}/self_attention_norm/scale",
        f"{layer}/self_attention_norm/bias",
        f"{layer}/mlp/up/bias",
        "vocabulary_bias",
    } <= names(mask, False)
    assert {
        f"{layer}/self_attention/query/kernel",
        f"{layer}/mlp/up/kernel",
        "embeddings/token",
        "embeddings/position",
        "head_dense/kernel",
    } == names(mask, True) - {
        f"{layer}/self_attention/{name}/kernel" for name in ("key", "value", "out")
    } - {f"{layer}/mlp/down/kernel"}


def test_decay_moves_only_what_decays(tiny):
    config = tiny("lm", **{"optimizer.weight_decay": 0.1, "optimizer.warmup_steps": 0})
    params = params_of(config)
    optimizer = make_optimizer(config)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    rate = float(make_schedule(config.optimizer, config.train.num_steps)(0))
    wanted = jax.tree.map(lambda p, d: np.full(p.shape, -0.1 * rate * d), params, decayed(params))
    jax.tree.map(lambda u, w: np.testing.assert_allclose(u, w, rtol=1e-6), updates, wanted)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_only_key_embeddings_of_mhe_add_stay(tiny, name, scan):
    config = tiny(
        "translation",
        **{
            "model.scan_layers": scan,
            "model.attention.kind": "mhe_add",
            "model.attention_by_role.decoder.kind": "mhe_mul",
            "optimizer.name": name,
            "optimizer.weight_decay": 0.1,
        },
    )
    params = params_of(config)
    layer = "layers" if scan else "layer_0"
    still = {
        f"encoder/{layer}/self_attention/key_head_embedding",
        f"decoder/{layer}/cross_attention/key_head_embedding",
    }
    assert names(frozen(params, config), True) == still
    optimizer = make_optimizer(config)
    gradients = jax.tree.map(lambda p: np.full_like(p, 0.5), params)

    @jax.jit
    def second_update(gradients, params):
        _, state = optimizer.update(gradients, optimizer.init(params), params)
        return optimizer.update(gradients, state, params)[0]

    updates = second_update(gradients, params)
    moved = jax.tree.map(lambda u: bool(jnp.any(u != 0)), updates)
    assert names(moved, False) == still


def test_key_embedding_that_matters_is_trained(tiny):
    config = tiny(
        "lm",
        **{
            "model.attention.kind": "mhe_add",
            "model.attention.normalize_qk": True,
        },
    )
    assert names(frozen(shapes_of(config), config), True) == set()


def test_clipping_is_by_the_global_norm(tiny):
    config = tiny("lm", **{"optimizer.clip_norm": 1.0})
    clipped, free = (
        make_optimizer(c) for c in (config, tiny("lm", **{"optimizer.clip_norm": None}))
    )
    params = params_of(config)
    large = jax.tree.map(lambda p: jnp.full_like(p, 3.0), params)
    count = sum(p.size for p in jax.tree.leaves(params))
    small = jax.tree.map(lambda g: g / (3.0 * count**0.5), large)
    first, second = (
        jax.jit(lambda g, p, o=o: o.update(g, o.init(p), p)[0])(g, params)
        for o, g in ((clipped, large), (free, small))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), first, second)
