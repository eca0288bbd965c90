"""Sixteen-bit types, the type of the softmax, and `precision`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    MHE,
    B,
    Case,
    S,
    T,
    every_case,
    every_kind,
    f64,
    mask_for,
    normal,
    random_parameters,
)

# Half a unit in the last place, relative.
ROUNDING = {jnp.bfloat16: 2.0**-9, jnp.float16: 2.0**-12}


def rounded(tree, dtype):
    """Numbers that the type holds exactly, as float32."""
    return jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), tree)


@pytest.mark.covering(1)
@every_kind
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_sixteen_bits_are_close_to_the_reference(case, dtype):
    """Inputs and parameters are exact in the type, so the error is the computation's.

    It rounds about ten times on the way to a number (projection and bias, embedding twice, 1/√D,
    score, weight, sum, output and bias). Roundings that all point one way would give 10 of them,
    and a score's error of |score| ≈ 4 roundings reaches the weights as such: 16 of the output's
    largest number in all.
    """
    module = case.module(dtype=dtype)
    q, k = rounded((normal(1, B, T, case.width), normal(2, B, S, case.width)), dtype)
    params = rounded(random_parameters(case.module(), q, k), dtype)
    mask, dense = mask_for(case, "one row empty", T, S)
    if case.form == "shared" and dtype == jnp.float16:
        with pytest.raises(ValueError, match="float16 lacks the range"):
            module.apply({"params": params}, q, k, mask=mask)
        return
    output = jax.jit(module.apply)({"params": params}, q, k, mask=mask)
    assert output.dtype == dtype
    wanted, _ = case.reference(params, q, k, k, dense)
    error = np.abs(f64(output) - wanted).max() / np.abs(wanted).max()
    assert error < 16 * ROUNDING[dtype]
    assert error > ROUNDING[dtype] / 64  # it did compute in sixteen bits


@pytest.mark.parametrize("kind", MHE)
def test_small_head_embeddings_survive_bfloat16(kind):
    """Embeddings of the initial size, 0.02, still tell heads apart in bfloat16.

    The effect of the embeddings on the output, relative to its own size; 1 + e rounded to bfloat16
    keeps steps of 0.008 only.
    """
    case = Case(kind, "folded")
    q, k = rounded((normal(1, B, T, case.width), normal(2, B, S, case.width)), jnp.bfloat16)
    params = rounded(random_parameters(case.module(), q, k, embedding=0.02), jnp.bfloat16)
    _, dense = mask_for(case, "none", T, S)
    wanted, _ = case.reference(params, q, k, k, dense)
    output = case.module(dtype=jnp.bfloat16).apply({"params": params}, q, k)
    error = np.abs(f64(output) - wanted).max() / np.abs(wanted).max()
    assert error < 8 * ROUNDING[jnp.bfloat16]


@every_kind
def test_types_follow_inputs_and_parameters_as_in_flax(case):
    """dtype None promotes; parameters have param_dtype whatever the computation does."""
    x = normal(1, B, T, case.width)

    def types(x, **fields):
        def run(x):
            module = case.module(**fields)
            output, variables = module.init_with_output(jax.random.key(0), x)
            return output, variables["params"]

        output, params = jax.eval_shape(run, x)
        return output.dtype, {p.dtype for p in jax.tree.leaves(params)}

    half = x.astype(jnp.bfloat16)
    assert types(half) == (jnp.float32, {jnp.dtype("float32")})
    assert types(half, param_dtype=jnp.bfloat16) == (jnp.bfloat16, {jnp.dtype("bfloat16")})
    assert types(x, dtype=jnp.bfloat16) == (jnp.bfloat16, {jnp.dtype("float32")})


@every_case
def test_the_type_of_the_softmax_and_the_precision_of_products(case):
    x = normal(1, B, T, case.width)
    params = {"params": random_parameters(case.module(), x)}
    for on, precision, wanted in ((True, "highest", "HIGHEST"), (False, None, "DEFAULT")):
        fields = {"dtype": jnp.bfloat16, "force_fp32_for_softmax": on, "precision": precision}
        text = jax.jit(case.module(**fields).apply).lower(params, x).as_text()
        # Those of scores, not of a gate: over as many keys as tokens.
        found = re.findall(rf"stablehlo\.exponential .*tensor<.*x{T}x(b?f\d+)>", text)
        exponentials = set(found)
        # Factors are always in float32.
        assert exponentials == {"f32" if on or case.form == "shared" else "bf16"}
        products = re.findall(r"stablehlo\.dot_general .*", text)
        assert len(products) >= 4
        # Embeddings meet projections in an einsum that contracts nothing, a product all the same.
        for product in products:
            assert f"[{wanted}, {wanted}]" in product, product


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN needs an NVIDIA GPU")
@every_kind
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_cudnn_errs_at_most_twice_as_much_as_xla(case, dtype):
    """Even lengths and a head width of 16, which cuDNN asks for; output and gradients."""
    for name in ("none", "causal", "padding", "segments", "one row empty", "bool"):
        compare_cudnn_with_xla(case, dtype, name)


def compare_cudnn_with_xla(case, dtype, name):
    width, length = case.heads * 16, 8
    x = rounded(normal(1, B, length, width), dtype)
    mask, dense = mask_for(case, name, length, length)
    cotangent = normal(9, B, length, width)

    def run(engine):
        module = case.module(dtype=dtype, qkv_features=width, engine=engine)
        params = rounded(random_parameters(module, x), dtype)

        def loss(params, x):
            output = module.apply({"params": params}, x, mask=mask).astype(jnp.float32)
            return (output * cotangent).sum(), output

        grads, output = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
        return params, f64((output, grads))

    params, by_xla = run("xla")
    _, by_cudnn = run("cudnn")
    output, (of_params, *of_inputs) = case.output_and_gradients(params, x, x, x, dense, cotangent)
    wanted = output, (of_params, sum(of_inputs))

    def error(got):
        return jax.tree.map(lambda a, b: np.linalg.norm(a - b), got, wanted)

    largest = max(map(np.linalg.norm, jax.tree.leaves(wanted)))
    floor = ROUNDING[dtype] * largest  # leaves that are 0 by algebra
    for a, b in zip(jax.tree.leaves(error(by_cudnn)), jax.tree.leaves(error(by_xla)), strict=True):
        assert a <= 2 * b + floor
