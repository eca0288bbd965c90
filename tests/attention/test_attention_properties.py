"""Properties that hold for every kind and form, whatever the numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CASES,
    B,
    S,
    T,
    assert_close,
    every_case,
    normal,
    random_parameters,
)

from mhe_jax.attention import Mask


@functools.cache
def ready(case, **fields):
    """Jitted call that gives numpy, parameters, inputs [B, S, M]."""
    module = case.module(**fields)
    x = normal(1, B, S, case.width)
    params = {"params": random_parameters(module, x)}
    apply = jax.jit(module.apply)
    return lambda *a, **k: jax.device_get(apply(*a, **k)), params, x


@every_case
def test_causal_outputs_do_not_depend_on_later_tokens(case):
    """By gradient: exactly 0 for every later token, and not 0 for any other."""
    _, params, x = ready(case)
    at = 2

    def total(x):
        output = case.module().apply(params, x, mask=Mask.causal())
        return (output[:, at] * normal(3, B, case.width)).sum()

    grad = jax.jit(jax.grad(total))(x)
    assert not np.any(grad[:, at + 1 :])
    assert (np.abs(grad[:, : at + 1]).max(-1) > 0).all()


@every_case
def test_rows_of_the_batch_do_not_meet(case):
    apply, params, x = ready(case)
    valid = jnp.ones((B, S), bool).at[0, 4:].set(False)
    output = apply(params, x, mask=Mask.padding(valid))
    swapped = apply(params, x[::-1], mask=Mask.padding(valid[::-1]))
    assert_close(swapped, output[::-1], 1e-6)
    assert np.abs(output - output[::-1]).max() > 1e-3


@every_case
def test_keys_have_no_order(case):
    """A permuted memory with its mask gives the same; a permuted query a permuted output."""
    apply, params, x = ready(case)
    q = normal(2, B, T, case.width)
    allowed = normal(5, B, 1, T, S) > -0.5
    order, of_queries = np.random.default_rng(1).permutation(S), np.array([3, 1, 4, 0, 2])
    output = apply(params, q, x, mask=allowed)
    assert_close(apply(params, q, x[:, order], mask=allowed[..., order]), output, 1e-5)
    moved = apply(params, q[:, of_queries], x, mask=allowed[:, :, of_queries])
    assert_close(moved, output[:, of_queries], 1e-5)


@every_case
def test_a_segment_does_not_see_another(case):
    """Packed examples: other tokens in one segment change no bit of the other's output.

    But for 'shared', where they move the maximum that all factors are divided by: rounding.
    """
    apply, params, x = ready(case)
    segments = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2]])
    mask = Mask.causal() & Mask.segments(segments)
    output = apply(params, x, mask=mask)
    changed = apply(params, np.where((segments == 2)[..., None], 7 * x + 1, x), mask=mask)
    first = segments == 1
    if case.form == "shared":
        assert_close(changed[first], output[first], 1e-6)
    else:
        np.testing.assert_array_equal(changed[first], output[first])
    second = segments == 2
    assert (np.abs(changed - output)[second].max(-1) > 1e-3).all()
    # Each segment is what it is alone.
    alone = apply(params, x[:1, 3:6], mask=Mask.causal())
    assert_close(output[:1, 3:6], alone, 1e-5)


@every_case
def test_padding_is_as_good_as_absent(case):
    """Whatever stands in padded places, NaN-free and huge, changes no bit."""
    apply, params, x = ready(case)
    q = normal(2, B, T, case.width)
    valid = jnp.ones((B, S), bool).at[:, 5:].set(False)
    output = apply(params, q, x, mask=Mask.padding(valid))
    other = x.copy()
    other[:, 5:] = 1e4
    np.testing.assert_array_equal(apply(params, q, other, mask=Mask.padding(valid)), output)
    assert_close(output, apply(params, q, x[:, :5]), 1e-5)


@every_case
def test_large_scores_stay_finite(case):
    _, params, x = ready(case)
    allowed = jnp.ones((B, 1, S, S), bool).at[0, :, 1].set(False)

    def total(x):
        return (case.module().apply(params, 100 * x, mask=allowed) ** 2).mean()

    value, grad = jax.jit(jax.value_and_grad(total))(x)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


def test_calls_in_one_module_share_parameters():
    """The same instance called twice, as tied layers do."""
    case = CASES[-1]
    module = case.module()
    x = normal(1, B, T, case.width)
    params = {"params": random_parameters(module, x)}
    twice = module.apply(params, x, method=lambda m, x: m(m(x)))
    assert_close(twice, module.apply(params, module.apply(params, x)), 1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.form], ids=str)
def test_heads_are_told_apart_by_their_embeddings(case):
    """Without them all heads are one; with them no two are."""
    apply, params, x = ready(case, out_features=case.width, use_bias=False)
    eye = jnp.eye(case.width).reshape(params["params"]["out"]["kernel"].shape)
    params = {"params": params["params"] | {"out": {"kernel": eye}}}
    heads = apply(params, x).reshape(B, S, case.heads, -1)
    for h in range(1, case.heads):
        assert np.abs(heads[:, :, h] - heads[:, :, h - 1]).min(-1).max() > 1e-3


@every_case
def test_calls_of_nothing(case):
    """No example, no query, no key: the output of no heads, and gradients of 0."""
    module = case.module()
    params = random_parameters(module, normal(1, B, S, case.width))
    shapes = {
        "no example": ((0, 37), (0, 41)),
        "no query": ((B, 0), (B, 41)),
        "no key": ((B, 37), (B, 0)),
    }

    @jax.jit
    def outputs_and_gradients(params):
        found = {}
        for name, sizes in shapes.items():
            inputs = [jnp.zeros((*size, case.width)) + 0.5 for size in sizes]
            output, pull = jax.vjp(lambda p, *x: module.apply({"params": p}, *x), params, *inputs)
            found[name] = output, pull(jnp.ones_like(output))
        return found

    for name, (output, (of_params, *of_inputs)) in outputs_and_gradients(params).items():
        shape = (*shapes[name][0], case.width)
        np.testing.assert_array_equal(output, np.broadcast_to(params["out"]["bias"], shape))
        assert [x.shape for x in of_inputs] == [(*s, case.width) for s in shapes[name]]
        of_bias = of_params["out"].pop("bias")
        np.testing.assert_array_equal(of_bias, shape[0] * shape[1])
        for leaf in jax.tree.leaves((of_params, of_inputs)):
            assert not np.any(leaf)
