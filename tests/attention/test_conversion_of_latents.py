"""To `collaborative`, `mfa`, `gta`, `mla` and `tpa`: exact where they have room, else near."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversion_cases import FIELDS, D, H, M, T, apart, drawn, inputs, start

from mhe_jax.attention import KINDS, Activations, Mask, convert, make_attention
from mhe_jax.attention.conversion import module_of
from mhe_jax.attention.conversion.fitting import error, fit_output

RANKS = {"query_rank": H, "key_rank": H, "value_rank": H}


def uneven(seed=0, rows=40, width=M):
    """Inputs of which some directions are far larger than others, about a mean that is not 0."""
    draw, size = np.random.default_rng(seed), np.geomspace(3, 0.05, width)[:, None]
    mixing = np.random.default_rng(9).normal(size=(width, width)) * size
    x = draw.normal(size=(rows, T, width)) @ mixing / width**0.5 + 0.4
    return jnp.asarray(x, jnp.float32)


def missed(params, kind, **fields):
    """The error of a conversion of an `mha`, weighted by the inputs that it is measured on."""
    made = module_of(params, "mha")
    seen = [Activations(uneven()).completed(made, params)]
    found = convert(params, kind, activations=seen, **fields)
    return error(module_of(found, kind), found, seen)


@pytest.mark.parametrize(
    ("source", "kind", "fields"),
    [
        *(("sha", kind, FIELDS.get(kind, {})) for kind in ("mqa", "gqa", "mhe_add", "mhe_mul")),
        ("sha", "mva", {}),
        ("el", "skv", {}),
        *(("mhe_add", kind, FIELDS.get(kind, {})) for kind in ("mqa", "gqa", "mva")),
        *(("mhe_mul", kind, FIELDS.get(kind, {})) for kind in ("mqa", "gqa")),
        ("gqa", "mha", {}),
        ("mha", "collaborative", {"score_features": M}),
        ("mha", "collaborative", {"score_features": 3 * D, "num_groups": 2}),
        ("mhe_mul", "collaborative", {"score_features": D}),
        ("mhe_add", "collaborative", {"score_features": D}),
        ("mha", "mla", {"latent_features": M + 1}),
        ("mha", "mla", {"latent_features": M + 4, "query_rank": M + 1}),
        ("mqa", "mla", {"latent_features": 2 * D + 1}),
        ("gqa", "mla", {"latent_features": 3 * (2 * D + 1), "latent_groups": 3}),
        ("mqa", "mfa", {"query_rank": M + 1}),
        ("mhe_mul", "mfa", {"query_rank": D + 1}),
        ("mqa", "gqa", {"num_kv_heads": 2}),
        ("mha", "tpa", RANKS),
        ("mha", "tpa", {"query_rank": H + 1, "key_rank": H + 2, "value_rank": H}),
        ("gqa", "tpa", {"query_rank": H, "key_rank": 3, "value_rank": 3}),
        ("mhe_mul", "tpa", {"query_rank": H, "key_rank": 1, "value_rank": 1}),
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
    assert other.use_bias == (kind in ("mla", "mfa", "tpa") or source == "mhe_add")
    for seen in (x,) if real else (x, inputs()):
        assert apart(made, params, other, found, seen, mask=Mask.causal()) < 1e-5


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("collaborative", {"score_features": M}),
        ("mla", {"latent_features": M + 1, "query_rank": M + 1}),
        ("tpa", RANKS),
    ],
)
def test_biases_are_kept(kind, fields):
    """Of queries, of values and of the output; cross-attention, with keys of another width."""
    x, y = uneven(1), uneven(2, width=17)
    made = make_attention("mha", num_heads=H)
    params = drawn(jax.eval_shape(made.init, jax.random.key(0), x, y)["params"])
    found = convert(params, kind, activations=[Activations(x, y)], **fields)
    other = module_of(found, kind)
    seen = [Activations(x, y).completed(made, params)]
    assert error(other, found, seen) < 1e-5


def test_queries_without_a_latent_have_no_bias():
    """Without W_dq `mla` has none to take it: what it does is fitted by the inputs, by W_uq."""
    _, params = start("mha", True)
    found = convert(params, "mla", latent_features=M + 1)
    assert set(found["query"]) == {"kernel"}
    made = module_of(params, "mha")
    lost = apart(made, params, module_of(found, "mla"), found, uneven())
    assert missed(params, "mla", latent_features=M + 1) < 0.5 * lost


@pytest.mark.parametrize(("kind", "use_bias"), [("collaborative", True), ("gta", False)])
def test_heads_that_are_linear_become_others_exactly(kind, use_bias):
    fields = {"score_features": 3, "num_groups": 2} if kind == "collaborative" else {}
    made, params = start(kind, use_bias, **fields)
    for other, more in (("mha", {}), ("tpa", RANKS)):
        found = convert(params, other, source=kind, **more)
        assert apart(made, params, module_of(found, other), found) < 1e-5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].not_linear])
def test_heads_that_are_not_linear_become_no_others(kind):
    _, params = start(kind)
    assert convert(params, kind, source=kind) == params
    said = f"^{kind} is not made into other attention: {KINDS[kind].not_linear}$"
    with pytest.raises(ValueError, match=said):
        convert(params, "mha", source=kind)


def projected(params, kernel):
    """The error of the heads of an `mha` whose keys and values are made of `y kernel`."""
    made, P = module_of(params, "mha"), kernel @ np.linalg.pinv(kernel)
    found = {
        **params,
        **{
            role: {"kernel": jnp.float32(np.einsum("mn,nhd->mhd", P, params[role]["kernel"]))}
            for role in ("key", "value")
        },
    }
    seen = [Activations(uneven()).completed(made, params)]
    found = fit_output(made, found, seen)
    return error(made, found, seen)


def test_a_latent_is_closer_than_the_joint_svd_of_weights():
    r = 9
    _, params = start("mha")
    stack = np.concatenate(
        [np.asarray(params[role]["kernel"]).reshape(M, M) for role in ("key", "value")], 1
    )
    u = np.linalg.svd(stack)[0]
    ours = missed(params, "mla", latent_features=r)
    assert ours < 0.7 * projected(params, u[:, :r])
    assert ours < 0.5 * projected(params, np.random.default_rng(0).normal(size=(M, r)))


def test_scores_count_as_the_values_behind_them():
    """A head that adds nothing gets no room, however large its scores are."""
    _, params = start("mha")
    params = jax.tree.map(np.array, params)
    params["value"]["kernel"][:, 1:] = 0
    params["query"]["kernel"][:, 1:] *= 100
    found = convert(params, "mla", latent_features=2 * D + 1)
    assert apart(module_of(params, "mha"), params, module_of(found, "mla"), found) < 1e-5


@pytest.mark.parametrize(
    ("kind", "field", "values", "fields"),
    [
        ("collaborative", "score_features", (3, 24), {}),
        ("mla", "latent_features", (5, 25), {}),
        ("mla", "query_rank", (3, 24), {"latent_features": 17}),
        ("mfa", "query_rank", (2, 10), {}),
        ("gta", "num_kv_heads", (1, 6), {}),
        ("tpa", "query_rank", (1, 6), {"key_rank": 4, "value_rank": 4}),
        ("tpa", "key_rank", (1, 6), {"value_rank": H}),
        ("tpa", "value_rank", (1, 6), {"key_rank": H}),
    ],
)
def test_more_room_brings_it_closer(kind, field, values, fields):
    _, params = start("mha", True, qkv_features=4 * H)
    few, many = (missed(params, kind, **{field: value}, **fields) for value in values)
    assert many < 0.9 * few


@pytest.mark.parametrize("kind", ["gqa", "gta"])
def test_heads_that_add_nothing_are_put_together_too(kind):
    """As where W_o begins as 0."""
    _, params = start("mha", qkv_features=4 * H)
    silent = {**params, "out": {"kernel": 0 * params["out"]["kernel"]}}
    found = convert(silent, kind, num_kv_heads=2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert not np.any(found["out"]["kernel"])


def test_the_norm_is_held_for_inputs_of_any_size():
    """As far as a constant that is 1,000 times as large as its latent can hold it."""
    made, params = start("mha")
    found = convert(params, "mla", latent_features=M + 1, query_rank=M + 1)
    for factor, most in ((0.01, 1e-5), (1, 1e-5), (10, 1e-3)):
        other = module_of(found, "mla")
        assert apart(made, params, other, found, factor * inputs(3)) < most
    for name in ("latent", "query_latent"):
        constant = found[name]["bias"][-1]
        assert np.log2(constant) % 1 == 0  # bfloat16 holds it exactly
    half = other.clone(dtype=jnp.bfloat16)
    theirs = made.clone(dtype=jnp.bfloat16)
    x = inputs(4)
    exact = made.apply({"params": params}, x)

    def off(module, params):
        y = module.apply({"params": params}, x).astype(jnp.float32)
        return float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))

    assert off(half, found) < 2 * off(theirs, params) < 0.02


@pytest.mark.parametrize("kind", ["mla", "tpa"])
def test_every_parameter_can_learn(kind):
    """But the kernels of a constant, whose norm hides it, none is at rest."""
    made, params = start("mha")
    found = convert(params, kind)
    other, x = module_of(found, kind), inputs()

    @jax.jit
    @jax.grad
    def gradients(params):
        return jnp.sum((other.apply({"params": params}, x) - 1) ** 2)

    grads = gradients(found)
    of_kind = {"mla": ("latent", "query"), "tpa": ("query", "key", "value", "query_basis")}
    for name in of_kind[kind]:
        assert np.linalg.norm(grads[name]["kernel"]) > 1e-3


def test_inputs_that_are_wider_than_all_heads_cannot_be_cut_into_them():
    _, params = start("mha", qkv_features=2 * H)
    with pytest.raises(ValueError, match=f"^qkv_features=12 must be {M}, .* el cuts"):
        convert(params, "el")


@pytest.mark.parametrize("kind", ["mla", "gta", "skv"])
def test_keys_and_values_of_two_inputs_have_no_home_in_one(kind):
    x, y, z = inputs(), jnp.ones((3, 4, 17)), jnp.ones((3, 4, 11))
    made = make_attention("mha", num_heads=H, qkv_features=4 * H)
    params = drawn(jax.eval_shape(made.init, jax.random.key(0), x, y, z)["params"])
    fields = {"num_kv_heads": 2} if kind == "gta" else {}
    with pytest.raises(ValueError, match=f"^{kind} projects .* 11 wide"):
        convert(params, kind, **fields)
