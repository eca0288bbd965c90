"""Every kind and form against the float64 reference: outputs and all gradients; and properties that
hold whatever the numbers."""

import functools

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
    every_case,
    every_grouping,
    f64,
    mask_for,
    mask_names,
    normal,
    random_parameters,
)
from kind_references import KINDS

from mhe_jax.attention import Mask


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
    (of_params, of_inputs), output = jax.device_get(run(params, inputs, mask, cotangent))
    wanted_output, pulled = case.output_and_gradients(params, q, k, v, dense, cotangent)
    assert_close(output, wanted_output)
    wanted, *of_three = pulled
    # An input that is not given is the one before it.
    of_three[len(inputs) - 1] = sum(of_three[len(inputs) - 1 :])
    assert_close((of_params, of_inputs), (wanted, tuple(of_three[: len(inputs)])))
    empty = ~dense.any((1, 3))
    bias = np.broadcast_to(params["out"].get("bias", 0), output[empty].shape)
    np.testing.assert_array_equal(output[empty], bias)
    return params


@every_grouping
def test_output_and_gradients(case):
    """In one program; a row without a key has nothing but the bias of `out`."""
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    for name in ("[B, H, T, S]", "a head's row empty", "one row empty", "all empty"):
        if name in mask_names(case, T, S):
            _, dense = mask_for(case, name, T, S)
            check(case, dense[:, : case.mask_heads], dense, q, k)


@pytest.mark.parametrize("name", mask_names(Case("mha"), T, S))
def test_every_mask(name):
    """The output under the mask as it is passed."""
    case = Case("mha")
    passed, dense = mask_for(case, name, T, S)
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    params = random_parameters(case.module(), q, k)
    output = case.module().apply({"params": params}, q, k, mask=passed)
    assert_close(output, case.reference(params, q, k, k, dense)[0])


@pytest.mark.parametrize("form", ["shared", "materialized"])
def test_mva_without_its_key_bias_is_one_whose_bias_is_zero(form):
    """Outputs, gradients of what both have, and the cache, which has no bias then."""
    case = Case("mva", form, score_features=13)
    whole, bare = case.module(), case.module(use_key_bias=False)
    x = normal(1, B, T, case.width)
    params = random_parameters(whole, x)
    params["key_bias"]["kernel"] *= 0
    own = {name: leaf for name, leaf in params.items() if name != "key_bias"}

    def output(module, params):
        return jax.jit(module.apply)({"params": params}, x, mask=Mask.causal())

    def gradient(module, params):
        return jax.grad(lambda p: (output(module, p) * normal(9, *x.shape)).sum())(params)

    assert_close(output(bare, own), output(whole, params), 1e-6)
    wanted = gradient(whole, params)
    assert np.any(wanted.pop("key_bias")["kernel"])
    assert_close(gradient(bare, own), wanted)
    decoder = case.module(use_key_bias=False, decode=True)
    cache = decoder.init(jax.random.key(0), x)["cache"]
    assert cache.keys() == {"cached_key", "cached_value", "cache_index"}
    steps = []
    for t in range(T):
        step, changed = decoder.apply(
            {"params": own, "cache": cache}, x[:, t : t + 1], mutable=["cache"]
        )
        steps, cache = [*steps, step], changed["cache"]
    assert_close(np.concatenate(steps, 1), output(whole, params))


SELF = Case("mha"), Case("mva", "shared"), Case("gta", heads=6, kv_heads=2, head_features=14)


@pytest.mark.parametrize(
    ("case", "name"), [*zip(SELF, ("all of them", "segments", "causal"), strict=True)], ids=str
)
def test_self_attention(case, name):
    """Gradients under a `Mask` as it is passed."""
    mask, dense = mask_for(case, name, T, T)
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
    norms = [name for name in params if name.endswith("_ln")]
    # Of queries and keys; both parts of a key of gta have their own.
    assert len(norms) == (2 + (case.kind == "gta")) * fields["normalize_qk"]
    assert not any("bias" in p for p in params.values() if isinstance(p, dict))


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
    maps = 1 if case.kind == "sha" else dict(case.more).get("num_groups", case.readers)
    assert_close(sown, weights[:, :: case.readers // maps])
    _, state = module.apply({"params": params}, q, k, mutable=["intermediates"])
    assert not state


def test_leading_axes_are_rows():
    case, batch = Case("mva", "shared"), (2, 3)
    module = case.module()
    q, k = normal(1, *batch, T, case.width), normal(2, *batch, S, case.width)
    params = random_parameters(module, q, k)
    mask = normal(4, *batch, case.mask_heads, T, S) > -0.5
    output = jax.jit(module.apply)({"params": params}, q, k, mask=mask)
    rows = int(np.prod(batch))
    flat = [x.reshape(rows, *x.shape[len(batch) :]) for x in (q, k, mask)]
    dense = np.broadcast_to(flat[2], (rows, case.heads, T, S))
    wanted, _ = case.reference(params, flat[0], flat[1], flat[1], dense)
    assert_close(output, wanted.reshape(*batch, T, case.width))


def ready(case):
    """Parameters, inputs, and a call of the program of `test_every_mask`."""
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    params, run = random_parameters(case.module(), q, k), gradient(case, 2)

    def call(q, k, allowed, cotangent=None):
        cotangent = normal(9, *q.shape) if cotangent is None else cotangent
        mask = np.broadcast_to(allowed, (B, case.mask_heads, T, S))
        return jax.device_get(run(params, (q, k), mask, cotangent))

    return call, q, k


@every_case
def test_what_is_not_seen_does_not_matter(case):
    """A query has gradients of the keys that it sees alone; others may hold any number."""
    call, q, k = ready(case)
    at = normal(9, *q.shape) * (np.arange(T) == 2)[:, None]
    (_, (of_q, of_k)), _ = call(q, k, np.tri(T, S, dtype=bool), at)
    assert not np.any(of_k[:, 3:])
    assert (np.abs(of_k[:, :3]).max(-1) > 0).all()
    assert not np.any(np.delete(of_q, 2, 1))
    hidden = np.arange(S) < 5
    output = call(q, k, hidden)[1]
    np.testing.assert_array_equal(
        call(q, np.where(hidden[:, None], k, np.float32(1e4)), hidden)[1], output
    )


@every_case
def test_orders_of_rows_queries_and_keys(case):
    call, q, k = ready(case)
    allowed = normal(5, B, 1, T, S) > -0.5
    output = call(q, k, allowed)[1]
    assert_close(call(q[::-1], k[::-1], allowed[::-1])[1], output[::-1], 1e-6)
    assert np.abs(output - output[::-1]).max() > 1e-3
    order, of_queries = np.random.default_rng(1).permutation(S), np.array([3, 1, 4, 0, 2])
    assert_close(call(q, k[:, order], allowed[..., order])[1], output)
    assert_close(call(q[:, of_queries], k, allowed[:, :, of_queries])[1], output[:, of_queries])


@every_case
def test_large_scores_stay_finite(case):
    call, q, k = ready(case)
    found = call(100 * q, 100 * k, np.arange(S) != 1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


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
    way = jax.tree.map(lambda x: rng.normal(size=x.shape), at)

    def along(step):
        moved = jax.tree.map(lambda x, d: x + step * d, at, way)
        return (case.reference(*moved, dense)[0] * weights).sum()

    slope = (along(1e-5) - along(-1e-5)) / 2e-5
    dots = jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, way))
    assert abs(sum(dots) - slope) < 1e-7 * sum(map(abs, dots))


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
