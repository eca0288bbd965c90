"""Schedules by their values, who decays, and who never moves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax.config import OptimizerConfig
from mhe_jax.model import stack_layers
from mhe_jax.tasks import TASKS
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
def test_schedule_ends_at_zero_and_stays_there(schedule):
    assert values(schedule)[-1] == pytest.approx(0, abs=1e-7)
    config = OptimizerConfig(schedule=schedule, learning_rate=PEAK, warmup_steps=W)
    assert float(make_schedule(config, N)(N + 3)) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt", "linear", "cosine"])
def test_schedule_without_warmup_starts_near_the_peak(schedule):
    found = values(schedule, warmup=0)
    assert 0.9 * PEAK < found[0] <= PEAK * (1 + 1e-6)
    assert np.all(np.diff(found) <= 0)


def shapes_of(config):
    model = TASKS[config.task].model(config.model)
    init = TASKS[config.task].initializer(model, 16)
    return jax.eval_shape(init, jax.random.key(0))


def params_of(config):
    """Ones, which are as good as any."""
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes_of(config))


def names(tree, wanted):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(path_parts(path)) for path, leaf in leaves if leaf == wanted}


@pytest.mark.parametrize("scan", [False, True])
def test_no_decay_on_biases_norms_and_head_embeddings(tiny, scan):
    attention = {"kind": "mhe_add", "form": "materialized", "use_bias": True, "normalize_qk": True}
    fields = {f"model.attention.{name}": value for name, value in attention.items()}
    mask = decayed(shapes_of(tiny("mlm", **fields, **{"model.scan_layers": scan})))
    layer = "encoder/layers" if scan else "encoder/layer_0"
    kept = ["query/bias", "query_ln/scale", "query_head_embedding"]
    wanted = {f"{layer}/self_attention/{name}" for name in kept} | {"vocabulary_bias"}
    norm = {f"{layer}/self_attention_norm/scale", f"{layer}/self_attention_norm/bias"}
    assert wanted | norm | {f"{layer}/mlp/up/bias"} <= names(mask, False)
    kernels = {f"{layer}/self_attention/{name}/kernel" for name in ("query", "key", "value", "out")}
    kernels |= {f"{layer}/mlp/up/kernel", f"{layer}/mlp/down/kernel", "head_dense/kernel"}
    assert names(mask, True) == kernels | {"embeddings/token", "embeddings/position"}


def test_no_decay_on_the_embeddings_of_groups_and_the_scales_of_mfa(tiny):
    attention = "encoder/layer_0/self_attention/"
    groups = {"model.attention.kind": "mhe_add", "model.attention.score_groups": 2}
    kept = names(decayed(shapes_of(tiny("mlm", **groups))), False)
    assert f"{attention}query_group_embedding" in kept
    scales = {"model.attention.kind": "mfa", "model.attention.reuse_keys": True}
    kept = names(decayed(shapes_of(tiny("mlm", **scales))), False)
    assert {f"{attention}query_latent_norm/scale", f"{attention}value_scale"} <= kept
    assert f"{attention}key_to_value/kernel" not in kept


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("kind", ["mhe_mul", "collaborative"])
def test_head_embeddings_have_a_rate_of_their_own(tiny, name, kind):
    """All else moves as without it, in the second step too."""
    rates = {1.0: None, 3.0: None}
    for rate in rates:
        fields = {"optimizer.name": name, "optimizer.head_embedding_rate": rate}
        config = tiny("lm", **fields, **{"model.attention.kind": kind})
        params, optimizer = params_of(config), make_optimizer(config)
        gradients = jax.tree.map(
            lambda p: np.linspace(-1, 2, p.size, dtype=np.float32).reshape(p.shape), params
        )
        _, state = optimizer.update(gradients, optimizer.init(params), params)
        rates[rate], _ = optimizer.update(gradients, state, params)

    def compare(path, plain, other):
        factor = 3 if str(path[-1].key).endswith("_head_embedding") else 1
        np.testing.assert_allclose(other, factor * plain, rtol=1e-6)
        return factor

    assert 3 in jax.tree.leaves(jax.tree_util.tree_map_with_path(compare, *rates.values()))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
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


@pytest.mark.parametrize("why", [("attention.normalize_qk", True), ("positions", "rotary")])
def test_key_embedding_that_matters_is_trained(tiny, why):
    field, value = why
    config = tiny("lm", **{"model.attention.kind": "mhe_add", f"model.{field}": value})
    assert names(frozen(shapes_of(config), config), True) == set()


def test_cross_attention_that_is_not_rotated_keeps_its_key_embedding(tiny):
    config = tiny("translation", **{"model.attention.kind": "mhe_add", "model.positions": "rotary"})
    still = {"decoder/layer_0/cross_attention/key_head_embedding"}
    assert names(frozen(shapes_of(config), config), True) == still


ATTENTION = ("decoder", "layer_0", "self_attention")
# One array is large enough for Adafactor to keep means of its rows and columns instead of all.
SHAPES = {
    (*ATTENTION, "query", "kernel"): (3, 5),
    (*ATTENTION, "query_head_embedding"): (2, 7),
    (*ATTENTION, "key_head_embedding"): (2, 7),
    ("decoder", "layer_0", "mlp", "up", "kernel"): (131, 137),
    ("decoder", "layer_0", "mlp", "up", "bias"): (11,),
    ("decoder", "norm", "scale"): (13,),
}
DECAYED, FROZEN = ("kernel",), (*ATTENTION, "key_head_embedding")
# Norms of the gradients of three updates, and where they are cut.
NORMS, CLIP = (5.0, 0.3, 2.0), 0.7
BETA1, BETA2, EPSILON, DECAY = 0.7, 0.8, 0.05, 0.2


def rms(x):
    return np.sqrt(np.mean(x**2))


def clipped(gradients, clip):
    """By the norm of all that may move."""
    gradients = {k: g * (k != FROZEN) for k, g in gradients.items()}
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    return {k: g * min(1, (clip or np.inf) / norm) for k, g in gradients.items()}


def adamw(params, history, rates, clip):
    """Loshchilov & Hutter 2019, algorithm 2."""
    m = v = dict.fromkeys(params, 0.0)
    for n, (gradients, rate) in enumerate(zip(history, rates, strict=True), 1):
        g = clipped(gradients, clip)
        m = {k: BETA1 * m[k] + (1 - BETA1) * g[k] for k in params}
        v = {k: BETA2 * v[k] + (1 - BETA2) * g[k] ** 2 for k in params}
        for k, p in params.items():
            first, second = m[k] / (1 - BETA1**n), v[k] / (1 - BETA2**n)
            update = first / (np.sqrt(second) + EPSILON) + DECAY * (k[-1] in DECAYED) * p
            params = params | {k: p - rate * update * (k != FROZEN)}
    return params


def adafactor(params, history, rates, clip):
    """Shazeer & Stern 2018, algorithm 4 and 5, with the decay of weights after them."""
    v = dict.fromkeys(params, 0.0)
    for n, (gradients, rate) in enumerate(zip(history, rates, strict=True), 1):
        g = clipped(gradients, clip)
        beta = 1 - n**-0.8
        for k, p in params.items():
            square = g[k] ** 2 + 1e-30
            v[k] = beta * v[k] + (1 - beta) * square
            second = v[k]
            if min(p.shape) >= 128:
                second = np.outer(second.mean(1), second.mean(0)) / second.mean()
            u = g[k] / np.sqrt(second)
            u = u / max(1, rms(u)) * max(1e-3, rms(p)) + DECAY * (k[-1] in DECAYED) * p
            params = params | {k: p - rate * u * (k != FROZEN)}
    return params


def muon(params, history, rates, clip):
    """Jordan 2024, five steps of Newton-Schulz; the rate scaled as in Liu et al. 2025, 2.2."""
    others = adamw(params, history, rates, clip)
    momentum = dict.fromkeys(params, 0.0)
    for n, (gradients, rate) in enumerate(zip(history, rates, strict=True), 1):
        g = clipped(gradients, clip)
        momentum = {k: 0.95 * momentum[k] + 0.05 * g[k] for k in params}
        for k in (k for k in params if k[-1] == "kernel"):
            m = 0.95 * momentum[k] / (1 - 0.95 ** (n + 1)) + 0.05 * g[k] / (1 - 0.95**n)
            x = m / np.linalg.norm(m)
            x = x.T if x.shape[0] > x.shape[1] else x
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x.T if m.shape[0] > m.shape[1] else x
            update = 0.2 * np.sqrt(max(m.shape)) * x + DECAY * params[k]
            params = params | {k: params[k] - rate * update}
    return params | {k: others[k] for k in params if k[-1] != "kernel"}


@pytest.mark.parametrize("clip", [CLIP, None])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_updates_are_those_of_the_paper(tiny, name, clip):
    """Three in float64: the first of AdamW alone would not show how large its gradient was."""
    config = tiny(
        "lm",
        **{
            "model.attention.kind": "mhe_add",
            "optimizer.name": name,
            "optimizer.warmup_steps": 2,
            "optimizer.learning_rate": 0.3,
            "optimizer.beta1": BETA1,
            "optimizer.beta2": BETA2,
            "optimizer.epsilon": EPSILON,
            "optimizer.weight_decay": DECAY,
            "optimizer.clip_norm": clip,
        },
    )
    rng = np.random.default_rng(0)
    draw = lambda scale: {k: scale * rng.normal(size=shape) for k, shape in SHAPES.items()}  # noqa: E731
    history = []
    for wanted in NORMS:
        drawn = draw(1.0)
        norm = np.sqrt(sum(np.sum(g**2) for k, g in drawn.items() if k != FROZEN))
        history.append({k: g * wanted / norm for k, g in drawn.items()})
    before = draw(0.5)
    optimizer = make_optimizer(config)
    params = as_tree(before)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradients in history:
        updates, state = update(as_tree(gradients), state, params)
        params = optax.apply_updates(params, updates)
    reference = {"adamw": adamw, "adafactor": adafactor, "muon": muon}[name]
    rates = [make_schedule(config.optimizer, config.train.num_steps)(n) for n in range(3)]
    wanted = reference(before, history, np.asarray(rates, np.float64), clip)
    assert all(np.any(wanted[k] != before[k]) == (k != FROZEN) for k in SHAPES)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        params,
        as_tree(wanted),
    )


@pytest.mark.parametrize("scan", [False, True])
def test_muon_takes_kernels_of_heads_as_matrices(tiny, scan):
    """[M, H, D] moves as [M, HD] does, and [H, D, M] as [HD, M]; each scanned layer by itself."""
    config = tiny("lm", **{"optimizer.name": "muon", "optimizer.schedule": "constant"})
    layers = 2
    shapes = {"query": (11, 3, 5), "out": (3, 5, 11)}
    flat = {"query": (11, 15), "out": (15, 11)}

    def updates(shapes, scan):
        rng = np.random.default_rng(0)
        kernels = {name: rng.normal(size=(layers, *shape)) for name, shape in shapes.items()}
        if scan:
            tree = {"layers": {name: {"kernel": k} for name, k in kernels.items()}}
        else:
            each = range(layers)
            tree = {f"layer_{i}": {n: {"kernel": k[i]} for n, k in kernels.items()} for i in each}
        tree = jax.tree.map(jnp.asarray, {"decoder": tree})
        optimizer = make_optimizer(config)
        found = optimizer.update(tree, optimizer.init(tree), tree)[0]["decoder"]
        return found if scan else stack_layers(found)

    wanted = updates(flat, scan=False)["layers"]
    found = updates(shapes, scan)
    for name in shapes:
        matrix = np.reshape(found["layers"][name]["kernel"], (layers, *flat[name]))
        np.testing.assert_allclose(matrix, wanted[name]["kernel"], rtol=1e-4, atol=1e-6)


def test_adam_has_a_rate_of_its_own_under_muon(tiny):
    fields = {"optimizer.name": "muon", "optimizer.adam_rate": 0.5, "optimizer.learning_rate": 0.1}
    tree = as_tree({k: np.ones(shape) for k, shape in SHAPES.items()})
    found = []
    for more in (fields, fields | {"optimizer.adam_rate": 1.0}):
        optimizer = make_optimizer(tiny("lm", **more))
        found.append(flatten_dict(optimizer.update(tree, optimizer.init(tree), tree)[0]))
    for name in SHAPES:
        times = 1 if name[-1] == "kernel" else 2
        np.testing.assert_allclose(found[1][name], times * found[0][name], rtol=1e-5)


def as_tree(flat):
    return unflatten_dict({k: jnp.asarray(x, jnp.float32) for k, x in flat.items()})
