"""From kind to kind: exact where it can be, the best of its kind elsewhere."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import random_parameters
from scipy.optimize import linear_sum_assignment

from mhe_jax.attention import KINDS, Activations, Mask, convert, make_attention
from mhe_jax.attention.conversion import error, fit_output, module_of, moments_of, nearest
from mhe_jax.attention.nearest import Heads, Moments
from mhe_jax.config import InputError

H, D, T = 6, 5, 7
M = H * D
ORDER = [2, 4, 1, 5, 0, 3]
FIELDS = {
    "gqa": {"num_kv_heads": 3},
    "gta": {"num_kv_heads": 3},
    "collaborative": {"score_features": D - 1},
}
NOT_MADE = "skv", "el", "collaborative", "mfa", "mla", "mlra", "ghla", "tpa", "gta"
WIDTHS = {"gta": 4 * H}  # of all heads; gta's are even


def module(kind, use_bias, **fields):
    fields = {"qkv_features": WIDTHS.get(kind), **FIELDS.get(kind, {}), **fields}
    return make_attention(kind, num_heads=H, use_bias=use_bias, **fields)


@functools.cache
def inputs(seed=0, rows=3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, T, M)) + 0.3, jnp.float32)


def start(kind, use_bias=False, **fields):
    made = module(kind, use_bias, **fields)
    return made, random_parameters(made, inputs(), seed=2, embedding=0.3)


def apart(made, params, other, theirs, x=None, **how):
    x = inputs() if x is None else x
    y = made.apply({"params": params}, x, **how)
    z = other.apply({"params": theirs}, x, **how)
    return float(jnp.linalg.norm(y - z) / jnp.linalg.norm(y))


def heads_of(params, kind):
    """With a key and a value head for each."""
    return module_of(params, kind).heads(params).repeated()


def moved(heads):
    """The same function: other bases of scores and values, and another order."""
    draw = np.random.default_rng(3)
    R, S = (
        np.stack([draw.normal(size=(n, n)) for _ in range(H)])
        for n in (heads.key.shape[-1], heads.value.shape[-1])
    )
    parts = (
        heads.query @ np.linalg.inv(R).swapaxes(1, 2),
        heads.key @ R,
        heads.value @ S,
        np.linalg.inv(S) @ heads.out,
    )
    query, key, value, out = (part[ORDER] for part in parts)
    return Heads(query, key, value, out, heads.bias)


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
    "mha of thin keys": {"score_features": 2 * H},
    "gqa of thin keys": {"num_kv_heads": 3, "score_features": 3 * H},
    "sha": {},
    "mqa": {},
    "gqa": {"num_kv_heads": 2},
    "mhe_add": {},
    "mhe_add of groups": {"num_groups": 2},
    "mhe_mul": {},
    "mhe_mul of groups": {"num_groups": 2},
    "mva": {"score_features": 3},
    "mva of groups": {"num_groups": 3},
}
# Those that are the best for the order of heads that was chosen.
BEST = [name for name in FEW if name != "sha"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("real", [False, True], ids=["weights", "activations"])
@pytest.mark.parametrize("name", FEW)
def test_what_a_kind_can_be_is_found_again(name, real):
    """From its own heads, in another order and turned by maps that change nothing."""
    kind, fields = name.split()[0], FEW[name]
    made = make_attention(kind, num_heads=H, use_bias=False, **fields)
    params = random_parameters(made, inputs(), seed=2, embedding=0.3)
    heads = moved(heads_of(params, kind))
    moments = Moments.unit(heads)
    if real:
        x = inputs(5, 40)
        y = made.apply({"params": params}, x)
        moments = moments_of([Activations(x, x, Mask(), np.ones((40, T), bool), y)])
    target = made.clone(qkv_features=M)
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
    """Cross-attention, whose keys are of another width than its queries."""
    x, y = inputs(), jax.random.normal(jax.random.key(3), (3, 4, 17))
    theirs = nn.MultiHeadDotProductAttention(num_heads=H, qkv_features=M, out_features=13)
    given = x[..., : M - 1], y
    params = random_parameters(theirs, *given)
    found = convert(params, kind, **FIELDS.get(kind, {}))
    made = module(kind, True, qkv_features=M, out_features=13)
    assert jax.eval_shape(made.apply, {"params": found}, *given).shape == (3, T, 13)
    shapes = jax.eval_shape(made.init, jax.random.key(0), *given)["params"]
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, shapes)
    if kind == "mha":
        assert found["key"]["kernel"] is params["key"]["kernel"]


def uneven(seed=0, rows=40, width=M):
    """Inputs of which some directions are far larger than others, about a mean that is not 0."""
    draw, size = np.random.default_rng(seed), np.geomspace(3, 0.05, width)[:, None]
    mixing = np.random.default_rng(9).normal(size=(width, width)) * size
    x = draw.normal(size=(rows, T, width)) @ mixing / width**0.5 + 0.4
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize(
    ("source", "kind", "fields"),
    [
        *(("sha", kind, FIELDS.get(kind, {})) for kind in ("mqa", "gqa", "mhe_add", "mhe_mul")),
        ("sha", "mva", {}),
        *(("mhe_add", kind, FIELDS.get(kind, {})) for kind in ("mqa", "gqa", "mva")),
        *(("mhe_mul", kind, FIELDS.get(kind, {})) for kind in ("mqa", "gqa")),
        ("gqa", "mha", {}),
        ("mqa", "gqa", {"num_kv_heads": 2}),
    ],
)
@pytest.mark.covering(1)
@pytest.mark.parametrize("real", [False, True], ids=["weights", "activations"])
def test_a_kind_that_has_room_takes_another_exactly(source, kind, fields, real):
    made, params = start(source)
    x = uneven()
    found = convert(
        params, kind, source=source, activations=[Activations(x)] if real else (), **fields
    )
    other = module_of(found, kind)
    assert other.use_bias == (source == "mhe_add")
    for seen in (x,) if real else (x, inputs()):
        assert apart(made, params, other, found, seen, mask=Mask.causal()) < 1e-5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].not_linear])
def test_heads_that_are_not_linear_become_no_others(kind):
    _, params = start(kind)
    said = f"^{kind} is not made into other attention: {KINDS[kind].not_linear}$"
    with pytest.raises(InputError, match=said):
        convert(params, "mha", source=kind)


def test_heads_that_add_nothing_are_put_together_too():
    """As where W_o begins as 0."""
    _, params = start("mha")
    silent = {**params, "out": {"kernel": 0 * params["out"]["kernel"]}}
    found = convert(silent, "gqa", num_kv_heads=2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert not np.any(found["out"]["kernel"])


def test_thin_queries_and_keys_are_the_truncated_svd_of_each_head():
    _, params = start("mha")
    found = convert(params, "mha", score_features=2 * H)
    for role in ("value", "out"):
        np.testing.assert_array_equal(found[role]["kernel"], params[role]["kernel"])
    for h in range(H):
        query, key = (np.float64(params[role]["kernel"][:, h]) for role in ("query", "key"))
        u, s, vt = np.linalg.svd(query @ key.T / D**0.5)
        thin = [np.float64(found[role]["kernel"][:, h]) for role in ("query", "key")]
        assert thin[0].shape == (M, 2)
        np.testing.assert_allclose(
            thin[0] @ thin[1].T / 2**0.5, u[:, :2] * s[:2] @ vt[:2], atol=1e-6
        )
    made, back = module_of(found, "mha"), convert(found, "mha")
    assert made.score_features == 2 * H
    assert apart(made, found, module_of(back, "mha"), back, mask=Mask.causal()) < 1e-5
    bare, own = start("mva", score_features=D, use_key_bias=False)
    found = convert(own, "mha", source="mva")
    assert apart(bare, own, module_of(found, "mha"), found, mask=Mask.causal()) < 1e-5


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
        ("mhx", {}, "kind 'mhx' is not one of mha, sha"),
        ("mqa", {"num_groups": 2}, "mqa has no field 'num_groups'; it belongs to mhe_add"),
        ("gqa", {}, "num_kv_heads is not set: a divisor of num_heads=6"),
        ("gqa", {"num_kv_heads": 4}, "num_kv_heads=4 must divide num_heads=6"),
        ("mha", {"source": "mqa"}, "these are not the parameters of .* kind mqa"),
        *((kind, {}, f"^{kind} is not made from other") for kind in NOT_MADE[:-1]),
        ("mla", {"rotary_features": 2}, "rotary_features: a conversion takes num_kv_heads"),
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
    with pytest.raises(InputError, match="params hold NaN or infinity"):
        convert(jax.tree.map(lambda leaf: leaf * np.nan, params), "mqa")
    with pytest.raises(InputError, match="activations hold NaN or infinity"):
        convert(params, "mqa", activations=[Activations(inputs(2, 3) * np.nan)])


def test_a_layer_norm_in_between_is_refused():
    _, params = start("mha", normalize_qk=True)
    assert convert(params, "mha") == params
    with pytest.raises(ValueError, match="normalize_qk"):
        convert(params, "mqa")
