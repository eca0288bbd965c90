"""The cost table against the published counts and against real modules."""

import typing

import jax
import jax.numpy as jnp
import pytest

from mhe_jax.attention import KINDS, cost, make_attention
from mhe_jax.config import Kind
from mhe_jax.evaluation import published


def test_every_kind_is_registered_and_has_a_cost():
    assert set(KINDS) == set(typing.get_args(Kind))
    for kind in KINDS:
        assert cost.parameters(kind, cost.Shape.of(32, 4, kv_heads=2)) > 0


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_cache_of_real_modules(kind, use_bias):
    M, H, K = 33, 3, 3
    fields = {"num_kv_heads": K} if kind == "gqa" else {}
    module = make_attention(kind, num_heads=H, use_bias=use_bias, decode=True, **fields)
    x = jnp.zeros((2, 5, M))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    shape = cost.Shape.of(M, H, K)
    assert count == cost.parameters(kind, shape, use_bias)
    cached = sum(leaf.size for name, leaf in shapes["cache"].items() if name != "cache_index")
    assert cached == 2 * 5 * cost.cached_numbers(kind, shape)


def test_encoder_counts_round_to_the_printed_figures_but_for_the_last_digit_of_mha():
    shape = cost.Shape.of(published.ENCODER_FEATURES, published.ENCODER_HEADS)
    computed = {
        kind: f"{cost.parameters(kind, shape) * published.ENCODER_LAYERS / 1e6:.2f}"
        for kind in published.ENCODER_MILLIONS
    }
    assert computed.pop("mha") == "28.31"
    printed = dict(published.ENCODER_MILLIONS)
    assert printed.pop("mha") == "28.32"
    assert computed == printed


@pytest.mark.parametrize("row", published.TRANSLATION, ids=lambda row: row.name)
@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
def test_translation_counts_equal_the_printed_ones(kind, row):
    one = cost.parameters(kind, cost.Shape.of(row.features, row.heads))
    assert one * published.TRANSLATION_SUBLAYERS * row.layers == getattr(row, kind)


def test_flops_count_the_matrix_products_of_the_compiled_module():
    """Against XLA's own count of a module, whose softmax and scaling are the only difference."""
    M, H, T = 64, 4, 16
    for kind in ("mha", "mqa", "mhe_mul"):
        module = make_attention(kind, num_heads=H, use_bias=False)
        x = jnp.zeros((1, T, M))
        variables = module.init(jax.random.key(0), x)
        compiled = jax.jit(module.apply).lower(variables, x).compile()
        counted = compiled.cost_analysis()["flops"]
        expected = T * cost.forward_flops(kind, cost.Shape.of(M, H), keys=T)
        assert expected <= counted <= 1.1 * expected, kind


def test_operations_of_shared_scores_for_each_key():
    """One score for all heads of a group, their sums over values, and their denominators."""
    M, H, D = 30, 6, 5
    for kind, fields, scored in (
        ("mhe_add", {}, D),
        ("mhe_add", {"groups": 2}, 2 * D),
        ("mhe_add", {"score_groups": 3}, 3 * D),
        ("mva", {"score_features": 7}, 7),
        ("mva", {"groups": 2, "score_features": 7}, 2 * 7),
    ):
        shape = cost.Shape(M, H, D, **fields)
        one, two = (cost.forward_flops(kind, shape, keys) for keys in (10, 11))
        assert two - one == 2 * (scored + H * D + H), (kind, fields)


def test_errors_name_what_is_allowed():
    with pytest.raises(ValueError, match="gqa needs kv_heads"):
        cost.parameters("gqa", cost.Shape.of(32, 4))
    with pytest.raises(ValueError, match="'mla' is not one of mha, sha"):
        cost.parameters("mla", cost.Shape.of(32, 4))
