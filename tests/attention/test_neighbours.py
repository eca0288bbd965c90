"""What `collaborative`, `mfa` and `gta` are cases of, and how they start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import B, Case, S, T, assert_close, mask_for, normal, random_parameters

from mhe_jax.attention import make_attention

KEY_REUSE = Case("mfa", more=(("reuse_keys", True),))


def inputs(case):
    return normal(1, B, T, case.width), normal(2, B, S, case.width)


@pytest.mark.parametrize(("groups", "normalize_qk"), [(None, True), (2, False)])
def test_equal_mixing_is_mva(groups, normalize_qk):
    case = Case("collaborative", heads=6, groups=groups, score_features=13)
    q, k = inputs(case)
    module = case.module(normalize_qk=normalize_qk)
    params = random_parameters(module, q, k)
    same = params | {"query_head_embedding": jnp.zeros_like(params["query_head_embedding"])}
    mva = Case("mva", heads=6, groups=groups, score_features=13).module(normalize_qk=normalize_qk)
    of_mva = {name: p for name, p in params.items() if name != "query_head_embedding"}
    mask, _ = mask_for(case, "padding", T, S)
    wanted = jax.jit(mva.apply)({"params": of_mva}, q, k, mask=mask)
    apply = jax.jit(module.apply)
    assert_close(apply({"params": same}, q, k, mask=mask), wanted)
    assert np.abs(apply({"params": params}, q, k, mask=mask) - wanted).max() > 0.1


def test_gta_is_gqa_with_keys_that_are_half_values():
    case = Case("gta", heads=6, kv_heads=2, head_features=14)
    q, k = inputs(case)
    params = random_parameters(case.module(), q, k)
    both, rotary = params["key_value"], params["key"]

    def joined(name):
        half = jnp.repeat(rotary[name][..., None, :], 2, -2)
        return jnp.concatenate([both[name][..., :7], half], -1)

    key = {name: joined(name) for name in ("kernel", "bias")}
    grouped = {"query": params["query"], "key": key, "value": both, "out": params["out"]}
    gqa = Case("gqa", heads=6, kv_heads=2, head_features=14).module()
    wanted = gqa.apply({"params": grouped}, q, k)
    assert_close(case.module().apply({"params": params}, q, k), wanted)


def test_mfa_of_a_full_rank_is_mqa():
    """With W_dq the identity, queries are those of normed inputs."""
    q, k = inputs(Case("mfa"))
    M = q.shape[-1]
    case = Case("mfa", more=(("query_rank", M),))
    params = random_parameters(case.module(use_bias=False), q, k)
    params["query_latent"] = {"kernel": jnp.eye(M)}
    params["query_latent_norm"] = {"scale": jnp.ones(M)}
    mqa = {name: params[name] for name in ("query", "key", "value", "out")}
    normed = q / np.sqrt((q**2).mean(-1, keepdims=True) + 1e-6)
    wanted = Case("mqa").module(use_bias=False).apply({"params": mqa}, normed, k)
    assert_close(case.module(use_bias=False).apply({"params": params}, q, k), wanted)


def test_key_reuse_starts_from_values_that_are_keys_and_leaves_them():
    module, (q, k) = KEY_REUSE.module(use_bias=False), inputs(KEY_REUSE)
    params = module.init(jax.random.key(0), q, k)["params"]
    mqa = {name: params[name] for name in ("key", "out")}
    mqa |= {
        "query": params["query"],
        "value": params["key"],
        "query_latent": params["query_latent"],
    }
    mqa["query_latent_norm"] = params["query_latent_norm"]
    wanted = Case("mfa").module(use_bias=False).apply({"params": mqa}, q, k)
    assert_close(module.apply({"params": params}, q, k), wanted)

    def loss(params):
        return (module.apply({"params": params}, q, k) * normal(3, *q.shape)).sum()

    first = jax.grad(loss)(params)
    assert np.abs(first["key_to_value"]["kernel"]).min() > 0
    moved = params | {"key_to_value": first["key_to_value"]}
    assert np.abs(jax.grad(loss)(moved)["value_scale"]).min() > 0


def test_key_reuse_makes_no_values_of_the_cache():
    """Of all tokens of the cache there is one product, which makes keys."""
    long, C = 1021, KEY_REUSE.head_features
    q, k = normal(1, B, T, KEY_REUSE.width), normal(2, B, long, KEY_REUSE.width)
    module = KEY_REUSE.module()
    params = {"params": random_parameters(module, q, k)}
    lines = str(jax.make_jaxpr(module.apply)(params, q, k)).splitlines()
    made = [line for line in lines if f"f32[{B},{long},1,{C}] = dot_general" in line]
    assert len(made) == 1


@pytest.mark.parametrize("call", ["call", "fill_cache"])
def test_gta_takes_no_heads_of_an_odd_width(call):
    module = make_attention("gta", num_heads=3, num_kv_heads=1, qkv_features=33, decode=True)
    x = normal(1, B, T, 33)
    method = {"method": "fill_cache"} if call == "fill_cache" else {}
    with pytest.raises(ValueError, match="gta ties half of a key to its value: the width 11 is od"):
        jax.eval_shape(lambda: module.init(jax.random.key(0), x, **method))
