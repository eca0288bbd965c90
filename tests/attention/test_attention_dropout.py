"""Dropout: the weights that the drawn mask leaves, in every form, and when it is drawn."""

import jax
import numpy as np
import pytest
from attention_cases import (
    BATTERY,
    B,
    Case,
    S,
    T,
    assert_close,
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


@pytest.mark.parametrize("value", [False, 0, np.False_], ids=repr)
def test_every_false_is_a_mask_for_each_head(value):
    fields = {"dropout_rate": RATE, "deterministic": False, "broadcast_dropout": value}
    module, x = Case("mva", "shared").module(**fields), normal(1, B, T, Case("mva").width)
    with pytest.raises(ValueError, match="dropout differs from head to head"):
        module.init({"params": KEY, "dropout": KEY}, x)


# One for each way of weights, and e_v, which is weighed too.
CASES = "mha", "sha", "mhe_add-materialized", "mhe_add-folded", "mhe_add-shared"
CASES += "mhe_mul-folded", "mva-shared", "mla-absorbed", "tpa-factored"


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", [c for c in BATTERY if str(c) in CASES], ids=str)
@pytest.mark.parametrize("broadcast", [True, False, "batch"])
def test_dropout_equals_the_reference_with_the_same_mask(case, broadcast):
    """Outputs and gradients; e_v too: times the sum of the kept weights, 0 without keys."""
    module = case.module(dropout_rate=RATE, deterministic=False, broadcast_dropout=broadcast)
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    params = random_parameters(case.module(), q, k)
    mask, dense = mask_for(case, "an example empty", T, S)
    if case.form == "shared" and broadcast is False:
        with pytest.raises(ValueError, match="dropout differs from head to head"):
            module.apply({"params": params}, q, k, mask=mask, dropout_rng=KEY)
        return
    cotangent = normal(9, *q.shape)

    @jax.jit
    def run(params, q, k):
        def loss(params, q, k):
            output = module.apply({"params": params}, q, k, mask=mask, dropout_rng=KEY)
            return (output * cotangent).sum(), output

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(params, q, k)

    gradients, output = jax.device_get(run(params, q, k))
    how = {"kept": kept(case, broadcast)}
    wanted, pulled = case.output_and_gradients(params, q, k, k, dense, cotangent, **how)
    assert_close(output, wanted)
    bias = np.broadcast_to(params["out"]["bias"], output[0].shape)
    np.testing.assert_array_equal(output[0], bias)
    of_params, of_q, of_k, of_v = pulled
    assert_close(gradients, (of_params, of_q, of_k + of_v))


def test_sown_weights_are_those_before_dropout():
    case = Case("mha")
    module = case.module(dropout_rate=RATE, deterministic=False)
    q = normal(1, B, T, case.width)
    params = {"params": random_parameters(module, q)}
    _, state = module.apply(params, q, sow_weights=True, dropout_rng=KEY, mutable=["intermediates"])
    (weights,) = state["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("case", [Case("mha"), Case("mva", "shared")], ids=str)
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
