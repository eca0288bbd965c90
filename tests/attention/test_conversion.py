"""From kind to kind: exact where it can be, the best of its kind elsewhere."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversion_cases import (
    FIELDS,
    NOT_MADE,
    WIDTHS,
    D,
    H,
    M,
    T,
    apart,
    drawn,
    heads_of,
    inputs,
    module,
    moved,
    start,
    started,
)
from scipy.optimize import linear_sum_assignment

from mhe_jax.attention import KINDS, Activations, Mask, convert, make_attention
from mhe_jax.attention.conversion import module_of, nearest
from mhe_jax.attention.conversion.fitting import error, fit_output, moments_of
from mhe_jax.attention.nearest.scores import Moments
from mhe_jax.config import InputError

LINEAR = [kind for kind in KINDS if kind != "mva" and not KINDS[kind].not_linear]


@pytest.mark.parametrize(
    ("kind", "use_bias"), [*((kind, True) for kind in LINEAR), ("gqa", False), ("mhe_add", False)]
)
def test_every_kind_is_an_mha(kind, use_bias):
    made, params = start(kind, use_bias)
    found = convert(params, "mha", source=kind)
    other = module_of(found, "mha")
    assert other.use_bias == (use_bias or kind in ("mhe_add", "collaborative"))
    mask = Mask.causal()
    assert apart(made, params, other, found, mask=mask) < 1e-5


FEW = {
    "sha": {},
    "mqa": {},
    "gqa": {"num_kv_heads": 2},
    "skv": {},
    "el": {},
    "mhe_add": {},
    "mhe_add of groups": {"num_groups": 2},
    "mhe_add of score groups": {"score_groups": 3},
    "mhe_mul": {},
    "mhe_mul of groups": {"num_groups": 2},
    "mva": {"score_features": 3},
    "mva of groups": {"num_groups": 3},
    "collaborative": {"score_features": 3},
    "collaborative of groups": {"num_groups": 2, "score_features": 2},
    "gta": {"num_kv_heads": 2, "qkv_features": 4 * H},
}
# Those that are the best for the order of heads that was chosen.
BEST = [name for name in FEW if name not in ("sha", "skv", "gta")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("real", [False, True], ids=["weights", "activations"])
@pytest.mark.parametrize("name", FEW)
def test_what_a_kind_can_be_is_found_again(name, real):
    """From its own heads, in another order and turned by maps that change nothing."""
    kind, fields = name.split()[0], FEW[name]
    made = make_attention(kind, num_heads=H, use_bias=False, **fields)
    params = started(made)
    heads = moved(heads_of(params, kind))
    moments = Moments.unit(heads)
    if real:
        x = inputs(5, 40)
        y = made.apply({"params": params}, x)
        moments = moments_of([Activations(x, x, Mask(), np.ones((40, T), bool), y)])
    target = made.clone(qkv_features=fields.get("qkv_features", M))
    found = jax.tree.map(jnp.float32, nearest(target, heads, moments))
    assert apart(made, params, module_of(found, kind), found) < 1e-4


def misses(heads, params, target, moments):
    """For each head and each of the target's: ‖·‖² of their scores, and of what they add."""
    theirs = target.heads(params).repeated()
    mean = moments.query_mean[:, None]
    second = np.block(
        [[moments.query + mean @ mean.T, mean], [mean.T, np.ones((1, 1))]],
    )
    scores, added = np.zeros((H, H)), np.zeros((H, H))
    for a in range(H):
        for b in range(H):
            form = heads.forms[a] - theirs.forms[b]
            scores[a, b] = np.sum((second @ form) * (form @ moments.key))
            value = heads.maps[a] - theirs.maps[b]
            added[a, b] = np.sum((moments.value @ value) * value)
    return scores, added


@pytest.mark.covering(1)
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("name", BEST)
def test_no_other_parameters_come_closer(name, use_bias):
    """For the order of heads that was chosen, no change makes scores or values come closer."""
    kind, fields = name.split()[0], FEW[name]
    _, params = start("mha", use_bias)
    heads = heads_of(params, "mha")
    x = inputs(5, 40) @ np.random.default_rng(1).normal(size=(M, M)).astype(np.float32)
    moments = moments_of([Activations(x, x, Mask(), np.ones((40, T), bool), x)])
    target = make_attention(kind, num_heads=H, qkv_features=M, use_bias=use_bias, **fields)
    found = nearest(target, heads, moments)
    scores, added = misses(heads, found, target, moments)
    pairs = linear_sum_assignment(scores / scores.mean() + added / added.mean())
    best = scores[pairs].sum(), added[pairs].sum()
    leaves, tree = jax.tree.flatten(found)
    draw = np.random.default_rng(7)
    for size in (1e-1, 1e-2, 1e-2, 1e-2, 1e-2):
        moves = [size * draw.normal(size=leaf.shape) * np.std(leaf) for leaf in leaves]
        for sign in (-1, 1):
            other = [leaf + sign * move for leaf, move in zip(leaves, moves, strict=True)]
            then = misses(heads, jax.tree.unflatten(tree, other), target, moments)
            assert then[0][pairs].sum() >= best[0] * (1 - 1e-9)
            assert then[1][pairs].sum() >= best[1] * (1 - 1e-9)


def test_moments_are_of_what_counts():
    """Padding is left out, and keys count about the mean of those of their row."""
    x = np.asarray(inputs(4, 5))
    valid = np.arange(T)[None] < np.array([3, 7, 5, 1, 7])[:, None]
    other = np.where(valid[..., None], x, 1e3)
    mask = Mask.padding(jnp.asarray(valid))
    found = moments_of(
        [
            Activations(other[:2], other[:2], jax.tree.map(lambda v: v[:2], mask), valid[:2]),
            Activations(other[2:], other[2:], jax.tree.map(lambda v: v[2:], mask), valid[2:]),
        ]
    )
    rows = x[valid].astype(np.float64)
    np.testing.assert_allclose(found.query_mean, rows.mean(0), atol=1e-6)
    np.testing.assert_allclose(found.query, np.cov(rows.T, bias=True), atol=1e-5)
    np.testing.assert_allclose(found.value, rows.T @ rows / len(rows), atol=1e-5)
    about = np.concatenate([row[v] - row[v].mean(0) for row, v in zip(x, valid, strict=True)])
    np.testing.assert_allclose(found.key, about.T @ about / len(rows), atol=1e-5)


@pytest.mark.parametrize("use_bias", [False, True])
def test_a_fit_is_the_least_squares_of_real_outputs(use_bias):
    """`W_o + (FᵀF + λ)⁻¹ Fᵀ (Y - F W_o)`, F the outputs of the heads; λ is 0.001 of their FᵀF."""
    source, params = start("mha", use_bias)
    x, others = inputs(5, 30), inputs(6, 30)
    valid = np.arange(T)[None] < np.arange(30)[:, None] % T + 1
    a = Activations(x, others, Mask.causal(), valid).completed(source, params)
    found = convert(params, "mqa")
    made = module_of(found, "mqa")
    n = H * D
    out = [found["out"][leaf] for leaf in ("kernel", "bias") if leaf in found["out"]]
    old = np.concatenate([np.reshape(np.float64(leaf), (-1, M)) for leaf in out])
    alone = {"kernel": jnp.eye(n).reshape(H, D, n), "bias": jnp.zeros(n)}
    alone = {**found, "out": {leaf: alone[leaf] for leaf in found["out"]}}
    F = made.clone(out_features=n).apply({"params": alone}, x, others, mask=a.mask)
    F = np.pad(F, ((0, 0), (0, 0), (0, len(old) - n)), constant_values=1)[valid].astype(float)
    Y = np.float64(a.output)[valid]
    held = 1e-3 * np.mean(np.sum(F**2, 0))
    new = old + np.linalg.solve(F.T @ F + held * np.eye(len(old)), F.T @ (Y - F @ old))
    fitted = fit_output(made, found, [a])
    np.testing.assert_allclose(fitted["out"]["kernel"].reshape(n, M), new[:n], atol=1e-5)
    if use_bias:
        np.testing.assert_allclose(fitted["out"]["bias"], new[n], atol=1e-5)
    relative = np.linalg.norm(Y - F @ new) / np.linalg.norm(Y)
    wild = dataclasses.replace(a, output=jnp.where(valid[..., None], a.output, 1e4))
    assert error(made, fitted, [wild]) == pytest.approx(relative, rel=1e-4)
    best = convert(params, "mqa", activations=[a])
    assert error(made, best, [a]) < error(made, found, [a])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_MADE])
def test_flax_parameters_of_another_width_and_other_inputs(kind):
    """Cross-attention, whose keys are of another width than its queries; `el` has no keys of it."""
    x, y = (
        inputs(),
        jax.random.normal(jax.random.key(3), (3, 4, M if kind in ("el", "skv") else 17)),
    )
    width = WIDTHS.get(kind, M)
    theirs = nn.MultiHeadDotProductAttention(num_heads=H, qkv_features=width, out_features=13)
    given = x[..., : M - 1], y
    params = drawn(jax.eval_shape(theirs.init, jax.random.key(1), *given)["params"])
    found = convert(params, kind, **FIELDS.get(kind, {}))
    made = module(kind, True, qkv_features=width, out_features=13)
    assert jax.eval_shape(made.apply, {"params": found}, *given).shape == (3, T, 13)
    shapes = jax.eval_shape(made.init, jax.random.key(0), *given)["params"]
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, shapes)
    if kind == "mha":
        assert found["key"]["kernel"] is params["key"]["kernel"]


def test_mha_of_scores_that_are_too_wide_is_the_nearest():
    """`mva` with its bias of keys is one column too wide for a head of the same width."""
    made, params = start("mva")
    found = convert(params, "mha", source="mva")
    assert 1e-3 < apart(made, params, module_of(found, "mha"), found) < 0.5
    made, params = start("mva", score_features=D - 1)
    found = convert(params, "mha", source="mva")
    assert apart(made, params, module_of(found, "mha"), found) < 1e-5


@pytest.mark.parametrize("kind", ["mqa", "sha", "mhe_mul"])
def test_queries_and_keys_are_equally_large(kind):
    """Column by column: their products alone say nothing of how each of them learns."""
    _, params = start("mha", False)
    found = convert(params, kind)
    query, key = (np.asarray(found[role]["kernel"], np.float64) for role in ("query", "key"))
    query, key = query.reshape(len(query), -1, key.shape[-1]), key.reshape(len(key), -1)
    query = query / key.shape[-1] ** 0.5  # the scale of the scores
    sizes = np.sqrt(np.mean(np.sum(query**2, 0), 0))
    np.testing.assert_allclose(sizes, np.sqrt(np.sum(key**2, 0)), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("mhx", {}, "kind 'mhx' cannot be made: takes one of mha, sha"),
        (
            "mqa",
            {"num_groups": 2},
            "mqa has no field 'num_groups' to be converted with; it has none",
        ),
        ("gqa", {}, "num_kv_heads=None must divide num_heads=6"),
        ("gqa", {"num_kv_heads": 4}, "num_kv_heads=4 must divide num_heads=6"),
        (
            "mha",
            {"source": "mqa"},
            "these are not the parameters of an attention module of kind mqa",
        ),
        ("mla", {"latent_features": 1}, "latent_features is 1: takes 2 or more, for one feature"),
        ("mla", {"latent_groups": 4}, "latent_groups=4 must divide num_heads=6"),
        ("mla", {"query_rank": 1}, "query_rank is 1: takes 2 or more"),
        *((kind, {}, f"{kind} is not made from others: .{{10}}") for kind in NOT_MADE),
        ("mla", {"rotary_features": 2}, "mla has no field 'rotary_features' to be converted with"),
    ],
)
def test_what_cannot_be_is_said(kind, fields, said):
    _, params = start("mha")
    with pytest.raises(ValueError, match=said):
        convert(params, kind, **fields)


def test_parameters_of_something_else_are_named():
    _, params = start("mha", use_bias=True)
    for other in ({"params": params}, {}):
        with pytest.raises(ValueError, match="not the parameters of .* of kind mha: {"):
            convert(other, "mqa")
    with pytest.raises(ValueError, match="params hold NaN or infinity"):
        convert(jax.tree.map(lambda leaf: leaf * np.nan, params), "mqa")


@pytest.mark.parametrize(
    ("activations", "said"),
    [
        ([inputs(2, 3)], "activations must be a list of Activations"),
        ([Activations(inputs(2, 3)[0])], f"query has shape .* takes .batch, length, {M}."),
        ([Activations(inputs(2, 3) * np.nan)], "activations hold NaN or infinity"),
    ],
)
def test_activations_that_cannot_be_are_refused(activations, said):
    _, params = start("mha")
    with pytest.raises(InputError, match=said):
        convert(params, "mqa", activations=activations)


def test_a_layer_norm_in_between_is_refused():
    _, params = start("mha", normalize_qk=True)
    assert convert(params, "mha") == params
    with pytest.raises(ValueError, match="normalize_qk"):
        convert(params, "mqa")
