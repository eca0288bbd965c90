"""Dropout: its distribution, what shares a mask, and both forms under the same random key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CASES,
    MHE,
    B,
    Case,
    S,
    T,
    assert_close,
    every_case,
    every_kind,
    kept_by_words,
    mask_for,
    normal,
    random_parameters,
)

RATE = 0.3
KEY = jax.random.key(7)


def kept(case, broadcast):
    """The multipliers [B, H, T, S] that KEY draws, by the shape that the contract gives."""
    shape = {True: (B, 1, T, S), "batch": (1, 1, T, S), False: (B, case.heads, T, S)}[broadcast]
    if case.kind == "sha":
        shape = (shape[0], 1, T, S)
    if case.form == "shared":
        draw = kept_by_words(KEY, RATE, shape[0], T, S)[:, None]
    else:
        draw = np.asarray(jax.random.bernoulli(KEY, 1 - RATE, shape))
    return np.broadcast_to(draw / (1 - RATE), (B, case.heads, T, S))


@pytest.mark.covering(1)
@every_case
@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_equals_the_reference_with_the_same_mask(case, broadcast):
    """e_v too: times the sum of the kept weights, 0 without keys. 'batch': test_flax_equality."""
    module = case.module(dropout_rate=RATE, deterministic=False, broadcast_dropout=broadcast)
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    params = random_parameters(case.module(), q, k)
    mask, dense = mask_for(case, "an example empty", T, S)
    if case.form == "shared" and broadcast is False:
        with pytest.raises(ValueError, match="dropout differs from head to head"):
            module.apply({"params": params}, q, k, mask=mask, dropout_rng=KEY)
        return
    run = jax.jit(module.apply)
    output = jax.device_get(run({"params": params}, q, k, mask=mask, dropout_rng=KEY))
    assert_close(output, case.reference(params, q, k, k, dense, kept=kept(case, broadcast))[0])
    bias = np.broadcast_to(params["out"]["bias"], output[0].shape)
    np.testing.assert_array_equal(output[0], bias)


@every_kind
def test_the_mean_over_many_keys_is_the_output_without_dropout(case):
    module = case.module(dropout_rate=RATE)
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    params = random_parameters(case.module(), q, k)

    def draw(key):
        return module.apply({"params": params}, q, k, deterministic=False, dropout_rng=key)

    draws = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(KEY, 1000)), np.float64)
    without = module.apply({"params": params}, q, k, deterministic=True)
    # 330 or 660 numbers within five standard errors: a false alarm in some thousand changes of KEY.
    error = np.abs(draws.mean(0) - without) / (draws.std(0, ddof=1) / np.sqrt(len(draws)))
    assert error.max() < 5
    assert draws.std(0).max() > 0.05
    # Not only the largest: the mean of the squared errors is 1 where nothing is biased.
    assert (error**2).mean() < 2


@every_kind
@pytest.mark.parametrize("broadcast", [True, "batch", False])
def test_who_shares_a_mask(case, broadcast):
    """Equal heads and equal rows of a batch come out equal where they share the mask."""
    module = case.module(
        dropout_rate=RATE, deterministic=False, broadcast_dropout=broadcast, out_features=case.width
    )
    q, k = normal(1, 1, T, case.width).repeat(B, 0), normal(2, 1, S, case.width).repeat(B, 0)
    if case.kind == "el":
        k = jnp.tile(k[..., : case.head_features], case.heads)
    if case.form == "shared" and broadcast is False:
        pytest.skip("refused: see test_dropout_equals_the_reference_with_the_same_mask")
    params = random_parameters(module, q, k)

    def first_head(path, x):
        """All heads as the first; `out` passes the heads on."""
        name = path[-1].key
        if path[0].key == "out":
            if name == "bias":
                return jnp.zeros_like(x)
            return jnp.eye(case.width).reshape(x.shape)
        if name.endswith("head_embedding"):
            return x[:1].repeat(x.shape[0], 0)
        if path[0].key == "key_bias" or (name == "kernel" and x.ndim == 3):
            return x[:, :1].repeat(x.shape[1], 1)
        return x[:1].repeat(x.shape[0], 0) if x.ndim == 2 and name == "bias" else x

    params = jax.tree_util.tree_map_with_path(first_head, params)
    output = module.apply({"params": params}, q, k, dropout_rng=KEY)
    heads = np.asarray(output).reshape(B, T, case.heads, case.head_features)
    over_heads = np.abs(heads[:, :, 0] - heads[:, :, 1]).max()
    over_batch = np.abs(heads[0] - heads[1]).max()
    assert (over_heads < 1e-5) == (broadcast is not False or case.kind == "sha")
    assert (over_batch < 1e-5) == (broadcast == "batch")


@pytest.mark.parametrize("kind", MHE)
@pytest.mark.parametrize("broadcast", [True, False])
def test_forms_agree_under_the_same_random_key(kind, broadcast):
    """Through the 'dropout' stream, as a model passes it; gradients too."""
    case = Case(kind)
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    params = random_parameters(case.module(), q, k)
    mask, _ = mask_for(case, "a head's row empty", T, S)

    def value_and_gradient(form):
        module = case.module(form=form, dropout_rate=RATE, broadcast_dropout=broadcast)

        def loss(params, q, k):
            out = module.apply(
                {"params": params}, q, k, mask=mask, deterministic=False, rngs={"dropout": KEY}
            )
            return (out * normal(9, B, T, case.width)).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(params, q, k)

    assert_close(value_and_gradient("folded"), value_and_gradient("materialized"))


def test_sown_weights_are_those_before_dropout():
    case = Case("mha")
    module = case.module(dropout_rate=RATE, deterministic=False)
    q = normal(1, B, T, case.width)
    params = {"params": random_parameters(module, q)}
    _, state = module.apply(params, q, sow_weights=True, dropout_rng=KEY, mutable=["intermediates"])
    (weights,) = state["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_the_rate_is_the_share_that_is_dropped():
    """One head, values of ones: the output is the kept sum, of uniform weights here."""
    module = Case("mha").module(
        num_heads=1, qkv_features=4, use_bias=False, dropout_rate=RATE, deterministic=False
    )
    x = jnp.ones((1, 300, 4))
    params = {r: {"kernel": jnp.zeros((4, 1, 4))} for r in ("query", "key")}
    params["value"] = {"kernel": jnp.full((4, 1, 4), 0.25)}
    params["out"] = {"kernel": jnp.full((1, 4, 4), 0.25)}
    share = module.apply({"params": params}, x, dropout_rng=KEY)[0, :, 0] * (1 - RATE)
    n = 300 * 300
    assert abs(float(share.mean()) - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / n)


@every_kind
def test_deterministic_is_asked_for_once_as_in_flax(case):
    x = normal(1, B, T, case.width)
    params = {"params": random_parameters(case.module(), x)}
    with pytest.raises(ValueError, match="deterministic"):
        case.module(dropout_rate=RATE, deterministic=True).apply(params, x, deterministic=True)
    with pytest.raises(ValueError, match="deterministic"):
        case.module(dropout_rate=RATE).apply(params, x)
    plain = case.module().apply(params, x)
    for field, argument in ((True, None), (None, True)):
        same = case.module(dropout_rate=RATE, deterministic=field)
        np.testing.assert_array_equal(same.apply(params, x, deterministic=argument), plain)
    with pytest.raises(Exception, match="dropout"):  # flax: no such random stream
        case.module(dropout_rate=RATE, deterministic=False).apply(params, x)


def test_every_case_is_covered():
    """Kinds that `every_kind` leaves out are other forms or groups of a kind that is there."""
    assert {c.kind for c in CASES} == {
        "mha", "sha", "mqa", "gqa", "skv", "el", "mhe_add", "mhe_mul", "mva", "collaborative",
        "mfa", "gta", "mla", "tpa",
    }  # fmt: skip
