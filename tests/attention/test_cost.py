"""The cost table against the published counts and against real modules."""

import functools
import typing

import jax
import jax.numpy as jnp
import pytest

from mhe_jax.attention import KINDS, Rotary, cost, make_attention
from mhe_jax.config import FIELDS_OF_KINDS, Kind
from mhe_jax.report import published


def module(kind, heads, num_kv_heads=None, **fields):
    given = {"num_kv_heads": num_kv_heads} if kind in FIELDS_OF_KINDS["num_kv_heads"] else {}
    return make_attention(kind, num_heads=heads, **({"use_bias": False} | given | fields))


def test_every_kind_is_registered_and_has_a_cost():
    assert set(KINDS) == set(typing.get_args(Kind))
    for kind in KINDS:
        assert cost.parameters(module(kind, 4, num_kv_heads=2), 32) > 0


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [*((kind, {}) for kind in KINDS), ("mfa", {"query_rank": 5}), ("mfa", {"reuse_keys": True})],
)
def test_parameters_and_cache_of_real_modules(kind, fields, use_bias):
    M, H, K = 42, 3, 3
    of_kind = module(kind, H, K, use_bias=use_bias, decode=True, **fields)
    x = jnp.zeros((2, 5, M))
    shapes = jax.eval_shape(of_kind.init, jax.random.key(0), x)
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    assert count == cost.parameters(of_kind, M)
    cached = sum(leaf.size for name, leaf in shapes["cache"].items() if name != "cache_index")
    assert cached == 2 * 5 * cost.cached_numbers(of_kind, M)


def test_encoder_counts_round_to_the_printed_figures_but_for_the_last_digit_of_mha():
    computed = {
        kind: cost.parameters(module(kind, published.ENCODER_HEADS), published.ENCODER_FEATURES)
        for kind in published.ENCODER_MILLIONS
    }
    computed = {k: f"{n * published.ENCODER_LAYERS / 1e6:.2f}" for k, n in computed.items()}
    assert computed.pop("mha") == "28.31"
    printed = dict(published.ENCODER_MILLIONS)
    assert printed.pop("mha") == "28.32"
    assert computed == printed


@pytest.mark.parametrize("row", published.TRANSLATION, ids=lambda row: row.name)
@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
def test_translation_counts_equal_the_printed_ones(kind, row):
    one = cost.parameters(module(kind, row.heads), row.features)
    assert one * published.TRANSLATION_SUBLAYERS * row.layers == getattr(row, kind)


@pytest.mark.parametrize(
    ("kind", "fields", "parameters", "cached"),
    [
        ("collaborative", {}, 1_287_936, 64 + 768 + 12),
        ("mfa", {}, 786_432, 128),
        ("mfa", {"query_rank": 256}, 1_081_344, 128),
        ("mfa", {"reuse_keys": True}, 786_432 - 768 * 64 + 64 * 64 + 64, 64),
        ("gta", {"num_kv_heads": 3}, 1_351_680, 224),
    ],
)
def test_counts_of_rivals(kind, fields, parameters, cached):
    """M = 768, 12 heads of 64; the scale of mfa's norm is numbers too."""
    of_kind = make_attention(kind, num_heads=12, use_bias=False, **fields)
    scale = fields.get("query_rank", 64) if kind == "mfa" else 0
    assert cost.parameters(of_kind, 768) == parameters + scale
    assert cost.cached_numbers(of_kind, 768) == cached


def test_flops_of_mhe_add_that_cannot_share_its_scores():
    """H score matrices where positions are rotary or keys have norms, one elsewhere."""
    M, H, T = 64, 4, 16
    flops = functools.partial(cost.forward_flops, features=M, keys=T)
    by_heads = flops(module("mhe_mul", H))
    assert flops(module("mhe_add", H)) == by_heads - 2 * T * (M - M // H - H)
    assert flops(module("mhe_add", H, rotary=Rotary())) == by_heads
    assert flops(module("mhe_add", H, normalize_qk=True)) == by_heads


def test_flops_count_the_matrix_products_of_the_compiled_module():
    """Against XLA's own count of a module, whose softmax and scaling are the only difference."""
    M, H, T = 64, 4, 16
    for kind, fields in (
        ("mha", {}),
        ("mqa", {}),
        ("mhe_mul", {}),
        ("collaborative", {"score_features": 24}),
        ("mfa", {"query_rank": 24}),
        ("mfa", {"reuse_keys": True}),
        ("gta", {"num_kv_heads": 2}),
    ):
        of_kind = module(kind, H, **fields)
        x = jnp.zeros((1, T, M))
        variables = of_kind.init(jax.random.key(0), x)
        compiled = jax.jit(of_kind.apply).lower(variables, x).compile()
        counted = compiled.cost_analysis()["flops"]
        expected = T * cost.forward_flops(of_kind, M, keys=T)
        assert expected <= counted <= 1.1 * expected, (kind, fields)


def test_operations_of_shared_scores_for_each_key():
    """One score for all heads of a group, their sums over values, and their denominators."""
    M, H, D = 30, 6, 5
    for kind, fields, scored in (
        ("mhe_add", {}, D),
        ("mhe_add", {"num_groups": 2}, 2 * D),
        ("mhe_add", {"score_groups": 3}, 3 * D),
        ("mva", {"score_features": 7}, 7),
        ("mva", {"num_groups": 2, "score_features": 7}, 2 * 7),
    ):
        of_kind = module(kind, H, **fields)
        one, two = (cost.forward_flops(of_kind, M, keys) for keys in (10, 11))
        assert two - one == 2 * (scored + H * D + H), (kind, fields)


def test_a_field_that_is_missing_is_named():
    with pytest.raises(ValueError, match="num_kv_heads is not set: it must divide num_heads=4"):
        cost.parameters(module("gqa", 4), 32)
