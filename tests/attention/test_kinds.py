"""Every kind and form against the float64 reference: outputs and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BATTERY,
    CASES,
    B,
    S,
    T,
    assert_close,
    every_case,
    every_grouping,
    f64,
    mask_for,
    mask_names,
    normal,
    random_parameters,
)
from kind_references import KINDS


@functools.cache
def gradient(case, inputs, **fields):
    """(params, inputs, mask, cotangent) to gradients and output."""
    module = case.module(**fields)

    def loss(params, inputs, mask, cotangent):
        output = module.apply({"params": params}, *inputs, mask=mask)
        return (output * cotangent).sum(), output

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def check(case, mask, dense, *inputs, **fields):
    """Output and every gradient of one call against the reference; gives the parameters."""
    params = random_parameters(case.module(**fields), *inputs)
    q, k, v = (*inputs, *(inputs[-1],) * (3 - len(inputs)))
    cotangent = normal(9, *q.shape[:-1], fields.get("out_features", q.shape[-1]))
    run = gradient(case, len(inputs), **fields)
    (of_params, of_inputs), output = run(params, inputs, mask, cotangent)
    assert_close(output, case.reference(params, q, k, v, dense)[0])
    wanted, *of_three = case.reference_gradients(params, q, k, v, dense, cotangent)
    # An input that is not given is the one before it.
    of_three[len(inputs) - 1] = sum(of_three[len(inputs) - 1 :])
    assert_close((of_params, of_inputs), (wanted, tuple(of_three[: len(inputs)])))
    return params


FEW = ("none", "[B, H, T, S]", "a head's row empty")
CROSS = [
    (case, name)
    for case in CASES
    for name in mask_names(case, T, S)
    if case in BATTERY or name in FEW  # other groupings of gqa differ by heads only
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("case", "name"), CROSS, ids=lambda x: str(x))
def test_every_mask(case, name):
    """The output under the mask as it is passed; gradients under its booleans."""
    passed, dense = mask_for(case, name, T, S)
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    heads = case.mask_heads
    params = check(case, jnp.asarray(dense[:, :heads]), dense, q, k)
    output = case.module().apply({"params": params}, q, k, mask=passed)
    assert_close(output, case.reference(params, q, k, k, dense)[0])
    empty = ~dense.any((1, 3))
    if empty.any():  # nothing but the bias of `out`
        bias = np.broadcast_to(params["out"]["bias"], output[empty].shape)
        np.testing.assert_array_equal(output[empty], bias)


@every_case
def test_self_attention(case):
    """Gradients under a `Mask` with all its parts, as it is passed."""
    mask, dense = mask_for(case, "all of them", T, T)
    check(case, mask, dense, normal(1, B, T, case.width))


@every_case
def test_widths_of_their_own(case):
    """All differ: 17 in, 19 for keys, 23 for values, H·D inside, 13 out; no biases, norms.

    Values of `skv` and `el`, which one matrix or none is for, are as wide as keys.
    """
    k = normal(2, B, S, case.width if case.kind == "el" else 19)
    v = normal(3, B, S, k.shape[-1] if case.one_source else 23)
    inputs = normal(1, B, T, 17), k, v
    fields = {"use_bias": False, "out_features": 13, "normalize_qk": case.may_normalize}
    mask, dense = mask_for(case, "padding", T, S)
    params = check(case, mask, dense, *inputs, **fields)
    assert ("query_ln" in params) == fields["normalize_qk"]
    assert not any("bias" in p for p in params.values() if isinstance(p, dict))


@every_case
@pytest.mark.parametrize("name", ["segments of one", "causal"])
def test_self_attention_output(case, name):
    """Under masks that only self-attention has, with a norm where the form allows one."""
    module = case.module(normalize_qk=case.may_normalize)
    mask, dense = mask_for(case, name, T, T)
    x = normal(1, B, T, case.width)
    params = random_parameters(module, x)
    output = jax.jit(module.apply)({"params": params}, x, mask=mask)
    assert_close(output, case.reference(params, x, x, x, dense)[0])


@pytest.mark.parametrize("case", [c for c in BATTERY if c.form != "shared"], ids=str)
def test_sown_weights_are_the_reference_weights(case):
    module = case.module()
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    params = random_parameters(module, q, k)
    mask, dense = mask_for(case, "an example empty", T, S)
    _, state = module.apply(
        {"params": params}, q, k, mask=mask, sow_weights=True, mutable=["intermediates"]
    )
    (sown,) = state["intermediates"]["attention_weights"]
    _, weights = case.reference(params, q, k, k, dense)
    assert_close(sown, weights[:, :1] if case.kind == "sha" else weights)
    _, state = module.apply({"params": params}, q, k, mutable=["intermediates"])
    assert not state


@every_case
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_leading_axes_are_rows(case, batch):
    module = case.module()
    q, k = normal(1, *batch, T, case.width), normal(2, *batch, S, case.width)
    params = random_parameters(module, q, k)
    heads = case.mask_heads
    mask = normal(4, *batch, heads, T, S) > -0.5
    output = jax.jit(module.apply)({"params": params}, q, k, mask=mask)
    rows = int(np.prod(batch))
    flat = [x.reshape(rows, *x.shape[len(batch) :]) for x in (q, k, mask)]
    dense = np.broadcast_to(flat[2], (rows, case.heads, T, S))
    wanted, _ = case.reference(params, flat[0], flat[1], flat[1], dense)
    assert_close(output, wanted.reshape(*batch, T, case.width))


@every_grouping
def test_the_reference_gradients_are_its_derivatives(case):
    """Central differences of the numpy reference along random directions of all leaves at once."""
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    module = case.module(normalize_qk=case.may_normalize)
    params = random_parameters(module, q, k)
    _, dense = mask_for(case, "one row empty", T, S)
    weights = np.random.default_rng(5).normal(size=q.shape)
    at = f64((params, q, k, k))
    grads = case.reference_gradients(*at, dense, weights)
    rng = np.random.default_rng(6)
    for _ in range(2):
        way = jax.tree.map(lambda x: rng.normal(size=x.shape), at)

        def along(step, way=way):
            moved = jax.tree.map(lambda x, d: x + step * d, at, way)
            return (case.reference(*moved, dense)[0] * weights).sum()

        slope = (along(1e-5) - along(-1e-5)) / 2e-5
        dots = jax.tree.map(lambda g, d: (g * d).sum(), grads, way)
        size = sum(map(abs, jax.tree.leaves(dots)))
        assert abs(sum(jax.tree.leaves(dots)) - slope) < 1e-7 * size


@every_grouping
def test_parameters_have_the_shapes_of_the_contract(case):
    kind = KINDS[case.kind]
    kernels = kind.kernels(case)
    wanted = {name: {"kernel": shape, "bias": shape[1:]} for name, shape in kernels.items()}
    wanted["out"] = {
        "kernel": (case.heads, case.head_features, case.width),
        "bias": (case.width,),
    }
    wanted |= kind.tables(case)
    for name in wanted.keys() & set(kind.unbiased):
        del wanted[name]["bias"]
    params = jax.eval_shape(case.module().init, jax.random.key(0), normal(1, B, T, case.width))
    assert jax.tree.map(lambda x: x.shape, params["params"]) == wanted
