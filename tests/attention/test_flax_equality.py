"""A drop-in for `flax.linen.MultiHeadDotProductAttention`: fields, parameters, outputs, models."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_cases import (
    B,
    Case,
    H,
    S,
    T,
    assert_close,
    every_kind,
    mask_for,
    normal,
    random_parameters,
)

from mhe_jax.attention import KINDS, Mask, MultiHeadAttention
from mhe_jax.config import FIELDS_OF_KINDS

MHA = Case("mha")
Flax = nn.MultiHeadDotProductAttention
KEY = jax.random.key(7)


def pair(**fields):
    fields = {"num_heads": H, "qkv_features": MHA.width} | fields
    return MultiHeadAttention(**fields), Flax(**fields)


def test_fields_and_call_are_those_of_flax():
    ours = {f.name: f.default for f in dataclasses.fields(MultiHeadAttention)}
    theirs = {f.name: f.default for f in dataclasses.fields(Flax)}
    # Positional use too: the same fields in the same order, then ours.
    assert [n for n in ours if n in theirs] == list(theirs)
    assert next(n for n in ours if n not in theirs) == list(ours)[len(theirs) - 2]  # parent, name
    for name, default in theirs.items():
        if name not in ("attention_fn", "bias_init"):
            assert ours[name] == default, name
    for kind in KINDS.values():
        assert set(ours) - {"score_features"} <= {f.name for f in dataclasses.fields(kind)}
    mine, theirs = (inspect.signature(c.__call__).parameters for c in (MultiHeadAttention, Flax))
    assert list(mine) == [*(name for name in theirs if name != "inputs_kv"), "positions"]


def test_outputs_under_every_mask_on_rows_with_a_key():
    ours, flax = pair()
    q, k, v = normal(1, B, T, 33), normal(2, B, S, 33), normal(3, B, S, 33)
    params = {"params": random_parameters(flax, q, k, v)}
    mine, theirs = (jax.jit(m.apply) for m in (ours, flax))
    for name in ("none", "[B, H, T, S]", "one row empty", "a head's row empty"):
        _, dense = mask_for(MHA, name, T, S)
        has_key = dense.any(-1).all(1)
        found = (np.asarray(f(params, q, k, v, mask=dense))[has_key] for f in (mine, theirs))
        assert_close(*found, 1e-6)


FIELDS = [
    {"use_bias": False},
    {"normalize_qk": True},
    {"use_bias": False, "normalize_qk": True, "out_features": 13, "qkv_features": 66},
    {"dtype": jnp.float16, "force_fp32_for_softmax": False},
    {"precision": "highest"},
]


@pytest.mark.parametrize(
    ("fields", "batch"),
    [(f, (B,)) for f in FIELDS] + [({"out_features": 13}, b) for b in ((), (2, 3))],
    ids=str,
)
def test_outputs_with_other_fields(fields, batch):
    ours, flax = pair(**fields)
    q, k, v = normal(1, *batch, T, 17), normal(2, *batch, S, 19), normal(3, *batch, S, 23)
    params = {"params": random_parameters(flax, q, k, v)}
    mask = normal(4, *batch, 1, T, S) > -0.7
    mask[..., 0] = True
    mine, theirs = (jax.jit(m.apply)(params, q, k, v, mask=mask) for m in (ours, flax))
    assert mine.dtype == theirs.dtype
    assert_close(mine, theirs, 2e-3 if "dtype" in fields else 1e-6)


INITIALIZERS = {
    "kernel_init": nn.initializers.normal(0.5),
    "bias_init": nn.initializers.normal(0.1),
    "out_kernel_init": nn.initializers.constant(0.25),
    "out_bias_init": nn.initializers.ones_init(),
}
OF_ALL = {name: INITIALIZERS[name] for name in ("kernel_init", "bias_init")}


@pytest.mark.parametrize(
    "fields",
    [{"use_bias": False, "normalize_qk": True}, OF_ALL, INITIALIZERS],
    ids=["no biases", "given", "given for out"],
)
def test_initial_parameters_are_those_of_flax(fields):
    ours, flax = pair(**fields)
    q, k = normal(1, B, T, 17), normal(2, B, S, 19)
    mine, theirs = (jax.jit(m.init)(jax.random.key(3), q, k) for m in (ours, flax))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@functools.cache
def started(module, shape):
    return jax.device_get(jax.jit(module.init)(jax.random.key(0), jnp.zeros(shape))["params"])


@every_kind
def test_initial_standard_deviations_are_those_of_flax(case):
    """1/√fan-in of the flattened kernel. A deviation of n numbers errs by 1/√(2n)."""
    heads, width, inputs = 8, 128, 128 if case.kind == "el" else 512
    x = jnp.zeros((1, 2, inputs))
    kv = {"num_kv_heads": 2} if case.kv_heads else {}
    module = KINDS[case.kind](num_heads=heads, qkv_features=width, **kv)
    params, flax = started(module, x.shape), started(Flax(heads, qkv_features=width), x.shape)
    for name, leaves in params.items():
        if name.endswith("embedding"):
            assert leaves.shape == (heads, width // heads)
            wanted = {"mhe_add": 0.02, "mhe_mul": 0.5, "collaborative": 0.5}[case.kind]
            assert abs(leaves.std() / wanted - 1) < 5 / np.sqrt(2 * leaves.size)
            continue
        if "scale" in leaves:
            assert np.all(leaves["scale"] == 1)
            continue
        kernel = leaves["kernel"]
        if case.kind == "mlra":  # one deviation for all, as in its paper
            assert abs(kernel.std() / 0.02 - 1) < 5 / np.sqrt(2 * kernel.size), name
            continue
        fan_in = width if name == "out" else kernel.shape[0]
        assert abs(kernel.std() * np.sqrt(fan_in) - 1) < 5 / np.sqrt(2 * kernel.size), name
        assert not np.any(leaves.get("bias", 0))
        if name in flax and kernel.shape == flax[name]["kernel"].shape:
            np.testing.assert_array_equal(kernel, flax[name]["kernel"])


@pytest.mark.parametrize(("ours_shares", "flax_shares"), [("batch", True), (False, False)])
def test_dropout_draws_the_mask_of_flax(ours_shares, flax_shares):
    """By `dropout_rng` and by the 'dropout' stream of a model."""
    batch = 2, 3
    rate = {"dropout_rate": 0.4, "deterministic": False}
    ours, _ = pair(broadcast_dropout=ours_shares, **rate)
    _, flax = pair(broadcast_dropout=flax_shares, **rate)
    q, k = normal(1, *batch, T, 33), normal(2, *batch, S, 33)
    params = {"params": random_parameters(pair()[1], q, k)}
    for how in ({"dropout_rng": KEY}, {"rngs": {"dropout": KEY}}):
        mine, theirs = (jax.jit(m.apply)(params, q, k, **how) for m in (ours, flax))
        assert_close(mine, theirs, 1e-6)


def test_sown_weights_are_those_of_flax():
    q, k = normal(1, 2, 3, T, 33), normal(2, 2, 3, S, 33)
    ours, flax = pair()
    params = {"params": random_parameters(flax, q, k)}
    mine, theirs = (
        m.apply(params, q, k, sow_weights=True, mutable=["intermediates"])[1] for m in (ours, flax)
    )
    assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, theirs)
    assert_close(mine, theirs, 1e-6)


def test_decoding_step_by_step_is_that_of_flax():
    ours, flax = pair(decode=True, normalize_qk=True)
    x = normal(1, B, T, 33)
    params = {"params": random_parameters(flax, x)}
    padding = jnp.ones((B, 1, 1, T), bool).at[0, :, :, 1].set(False)
    caches = [m.apply(params, x, mutable=["cache"])[1] for m in (ours, flax)]
    for t in range(T):
        mine, theirs = (
            m.apply(params | c, x[:, t : t + 1], mask=padding, mutable=["cache"])
            for m, c in zip((ours, flax), caches, strict=True)
        )
        caches = [mine[1], theirs[1]]
        assert_close(mine[0], theirs[0], 1e-6)
        for name in ("cached_key", "cached_value"):
            np.testing.assert_allclose(
                caches[0]["cache"][name], caches[1]["cache"][name], atol=1e-6
            )


class Model(nn.Module):
    """A model of someone's own, written for Flax's module: a decoder's block and a head."""

    attention: Callable[..., nn.Module] = nn.MultiHeadDotProductAttention

    @nn.compact
    def __call__(self, x, memory, train=False):
        mask = nn.make_causal_mask(x[..., 0])
        x += self.attention(
            num_heads=4, dropout_rate=0.1, deterministic=not train, name="self_attention"
        )(nn.LayerNorm()(x), mask=mask)
        x += self.attention(4, jnp.float32, use_bias=False, name="cross_attention")(x, memory)
        return nn.Dense(5)(x)


def train_step(attention):
    """Loss before and after steps of AdamW, and the gradients of the first, all jitted."""
    model = Model(attention)
    x, memory = normal(1, 3, T, 24), normal(2, 3, S, 24)
    labels = jnp.asarray(np.random.default_rng(4).integers(0, 5, (3, T)))
    params = random_parameters(model, x, memory)
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = model.apply({"params": params}, x, memory, train=True, rngs={"dropout": KEY})
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return value, grads, optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    before, grads, after, state = step(params, state)
    for _ in range(4):
        value, _, after, state = step(after, state)
    return before, value, grads


@pytest.mark.parametrize("kind", ["gqa", "mhe_add"])
def test_a_model_takes_any_kind_by_one_name(kind):
    attention = KINDS[kind]
    if kind in FIELDS_OF_KINDS["num_kv_heads"]:
        attention = functools.partial(attention, num_kv_heads=2)
    before, later, grads = train_step(attention)
    assert later < before
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(g).all()
        if "key_head_embedding" not in jax.tree_util.keystr(path) or kind != "mhe_add":
            assert np.any(g), path


def test_the_model_with_mha_is_the_model_with_flax():
    """Loss, gradients and steps; with dropout, which Flax shares over the batch."""
    shared = functools.partial(MultiHeadAttention, broadcast_dropout="batch")
    mine, theirs = train_step(shared), train_step(Flax)
    np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(mine[1], theirs[1], rtol=1e-4)
    assert_close(mine[2], theirs[2])


def test_values_of_their_own_do_not_depend_on_identity():
    """The same array, an equal one and another one, as they are and through a lifted call."""
    case = Case("skv")
    module = case.module()
    lifted = nn.remat(KINDS[case.kind])(**fields_of(module))
    q, k, v = (normal(i, B, n, case.width) for i, n in ((1, T), (2, S), (3, S)))
    params = {"params": random_parameters(module, q)}

    @jax.jit
    def outputs(q, k, v):
        calls = (q, k), (q, k, k), (q, k, k * 1), (q, k, v)
        return [m.apply(params, *call) for m in (module, lifted) for call in calls]

    alone, *others = outputs(q, k, v)
    mask = np.ones((B, case.heads, T, S), bool)
    another = case.reference(params["params"], q, k, v, mask)[0]
    assert np.abs(another - alone).max() > 0.1
    for found, wanted in zip(others, (alone, alone, another, *3 * (alone,), another), strict=True):
        assert_close(found, wanted)


def fields_of(module):
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
    return {name: value for name, value in fields.items() if name not in ("parent", "name")}


@pytest.mark.parametrize("case", [Case("mha"), Case("skv")], ids=str)
def test_what_a_decoding_call_means_does_not_depend_on_identity(case):
    """`m(q, q)`, `m(q, q * 1)` and lifted calls append to the cache of self-attention."""
    x = normal(1, B, T, case.width)
    module = case.module(decode=True)
    params = {"params": random_parameters(case.module(), x)}
    lifted = [lift(KINDS[case.kind])(**fields_of(module)) for lift in (nn.remat, nn.jit)]

    @jax.jit
    def outputs(params, x):
        run = functools.partial(module.apply, mutable=["cache"])
        _, cache = run(params, x)
        calls = ((module, (x, x * 1)), *((m, (x, x)) for m in (module, *lifted)))
        found = [m.apply(params | cache, *inputs, mutable=["cache"]) for m, inputs in calls]
        return run(params, x, mask=Mask.causal())[0], found

    wanted, found = outputs(params, x)
    for output, after in found:
        assert_close(output, wanted)
        np.testing.assert_array_equal(after["cache"]["cache_index"], [T] * B)
