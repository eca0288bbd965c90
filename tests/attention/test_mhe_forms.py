"""Forms are one function of the same parameters: which is taken, and the algebra of MHE."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    B,
    Case,
    D,
    H,
    S,
    T,
    assert_close,
    normal,
    random_parameters,
)

from mhe_jax.attention import Mask, Rotary, make_attention, recording
from mhe_jax.attention.engines import Options, cudnn
from mhe_jax.attention.module import Call
from mhe_jax.config import FORMS_OF_KINDS

ADD = Case("mhe_add")


FORMED = [(kind, {}) for kind in FORMS_OF_KINDS]
FORMED += [("mla", {"latent_features": 33, "latent_groups": 3, "query_rank": 5})]


@pytest.mark.parametrize(("kind", "fields"), FORMED, ids=str)
def test_forms_start_from_the_same_parameters(kind, fields):
    """And 'auto' starts by a form that is compiled in no time."""
    x = normal(1, B, 32, ADD.width)
    started, programs = {}, {}
    for form in ("auto", *FORMS_OF_KINDS[kind]):
        start = functools.partial(Case(kind).module(form=form, **fields).init, jax.random.key(0))
        with recording() as made:
            traced = jax.jit(start).trace(x)
        assert not made  # what runs is what is applied
        started[form], programs[form] = traced.lower().compile()(x), len(str(traced.jaxpr))
    parameters = started.pop("auto")
    for of_form in started.values():
        jax.tree.map(np.testing.assert_array_equal, parameters, of_form)
    assert programs["auto"] <= programs["materialized"]


WIDE = {"latent_features": 66}
HEADS_DIFFER = Mask.array(jnp.ones((1, H, 1, 1), bool))
DROPS_DIFFER = Options(dropout_rate=0.1, broadcast_dropout=False)


@pytest.mark.parametrize(
    ("kind", "fields", "call", "form"),
    [
        ("mhe_add", {}, {}, "shared"),
        ("mhe_add", {}, {"queries": 31}, "folded"),
        ("mhe_add", {}, {"dtype": jnp.float16}, "folded"),
        ("mhe_add", {}, {"mask": HEADS_DIFFER}, "folded"),
        ("mhe_add", {}, {"options": Options(sow=print)}, "folded"),
        ("mhe_add", {}, {"options": Options(dropout_rate=0.1)}, "shared"),
        ("mhe_add", {}, {"options": DROPS_DIFFER}, "folded"),
        ("mhe_add", {"engine": "cudnn"}, {}, "folded"),
        ("mhe_add", {"normalize_qk": True}, {}, "materialized"),
        ("mhe_add", {"rotary": Rotary()}, {}, "materialized"),
        ("mhe_mul", {}, {}, "folded"),
        ("mva", {"rotary": Rotary()}, {}, "shared"),
        ("mva", {}, {"queries": 1}, "shared"),
        ("mva", {}, {"mask": HEADS_DIFFER}, "materialized"),
        # T (2r - 2D) < 2Dr, with r = 4D = 44: T < 14.67.
        ("mla", {"decode": True}, {"queries": 14}, "absorbed"),
        ("mla", {"decode": True}, {"queries": 15}, "materialized"),
        ("mla", {}, {"queries": 1}, "materialized"),
        ("mla", {"decode": True, "normalize_qk": True}, {"queries": 1}, "materialized"),
        # With R = 5 keys and values are r + R wide: T (2r + 2R - 2D - R) < 2Dr, T < 13.64.
        ("mla", {"decode": True, "rotary": Rotary()}, {"queries": 13}, "absorbed"),
        ("mla", {"decode": True, "rotary": Rotary()}, {"queries": 14}, "materialized"),
        # Of three latents, with r = 66: T (2r/3 - 2D) < 2Dr/3, T < 22.
        ("mla", {"decode": True, "latent_groups": 3, **WIDE}, {"queries": 21}, "absorbed"),
        ("mla", {"decode": True, "latent_groups": 3, **WIDE}, {"queries": 22}, "materialized"),
        # Of four, each read by all heads, with r = 88: the same, twice as wide as a head.
        ("mlra", {"decode": True, "latent_features": 88}, {"queries": 21}, "absorbed"),
        ("mlra", {"decode": True, "latent_features": 88}, {"queries": 22}, "materialized"),
        # T (4(D + 1) - 2D) < 4D.
        ("tpa", {"decode": True}, {"queries": 1}, "factored"),
        ("tpa", {"decode": True}, {"queries": 2}, "materialized"),
        ("tpa", {}, {"queries": 1}, "materialized"),
        ("tpa", {"decode": True, "normalize_qk": True}, {"queries": 1}, "materialized"),
        ("tpa", {"decode": True, "engine": "blocked"}, {"queries": 1}, "materialized"),
    ],
    ids=str,
)
def test_auto_takes_the_first_form_that_can_do_the_call(kind, fields, call, form):
    given = {"queries": 32, "dtype": jnp.dtype("float32"), "mask": Mask(), "options": Options()}
    assert Case(kind).module(**fields).resolve(Call(D, D * H, **(given | call))) == form


@pytest.mark.parametrize(
    ("kind", "fields", "call", "form"),
    [
        ("mhe_add", {}, {}, "folded"),
        ("mhe_add", {"engine": "xla"}, {}, "shared"),
        ("mhe_add", {}, {"dtype": jnp.dtype("float32")}, "shared"),
        ("mhe_add", {}, {"options": Options(dropout_rate=0.1)}, "shared"),
        ("mhe_add", {}, {"mask": Mask.causal() & Mask.local(3)}, "folded"),
        # In memory these are as large as the scores.
        ("mhe_add", {}, {"mask": Mask.causal(jnp.zeros(1, int))}, "shared"),
        ("mhe_add", {}, {"mask": Mask.array(jnp.ones((1, 1, 32, 32), bool))}, "shared"),
        ("mhe_add", {}, {"mask": Mask.local(3) & Mask.lengths(5)}, "shared"),
        # Its other form needs columns for the bias of the keys, and was not measured.
        ("mva", {}, {}, "shared"),
    ],
    ids=str,
)
def test_auto_takes_the_folded_form_where_cudnn_runs_it(monkeypatch, kind, fields, call, form):
    given = {"queries": 32, "dtype": jnp.dtype("bfloat16"), "mask": Mask(), "options": Options()}

    def resolved():
        return Case(kind).module(**fields).resolve(Call(D, D * H, **(given | call)))

    monkeypatch.setattr(cudnn, "platform", lambda: "gpu")
    monkeypatch.setattr(cudnn, "missing", lambda *heads: None)
    assert resolved() == form
    for name, elsewhere in (
        ("gpu_capability", lambda: 7.5),
        ("missing", lambda *heads: "is not there"),
        ("parts_of_heads", lambda: 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cudnn, name, elsewhere)
            assert resolved() == "shared"


@pytest.mark.parametrize(
    ("fields", "inputs", "form"),
    [
        ({"dtype": "float16"}, "float32", "folded"),
        ({}, "float16", "shared"),
        ({"param_dtype": "float16"}, "float16", "folded"),
    ],
    ids=str,
)
def test_the_type_of_the_computation_decides(fields, inputs, form):
    module = Case("mhe_add").module(**fields)
    x = jnp.zeros((B, 32, ADD.width), inputs)
    params = jax.eval_shape(module.init, jax.random.key(0), x)
    with recording() as made:
        jax.eval_shape(module.apply, params, x)
    assert [choice.split()[0] for choice in made["mhe_add"]] == [form]


def test_the_last_form_takes_every_call():
    assert all(forms[-1] == "materialized" for forms in FORMS_OF_KINDS.values())


TURNS = {"rotary": Rotary(), "qkv_features": 30}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mhe_mul", {"form": "shared"}, "'shared' is not one of auto, folded, materialized"),
        ("mhe_add", {"form": "shared", "normalize_qk": True}, "normalize_qk is not possible"),
        ("mhe_add", {"form": "shared", **TURNS}, "rotary is not .* depends on the dist"),
        ("mhe_mul", {"form": "folded", **TURNS}, "rotary is not .* 1 \\+ e_k of two"),
        ("mhe_add", {"num_groups": 2}, "num_groups=2 must divide num_heads=3"),
        ("mhe_add", {"score_groups": 2}, "score_groups=2 must divide num_heads=3"),
        ("mhe_add", {"score_groups": 3, "num_groups": 3}, "does not go with num_groups=3"),
        ("mla", {"form": "absorbed", "normalize_qk": True}, "'absorbed' .*: normalize_qk is not"),
        ("mla", {"latent_groups": 2}, "latent_groups=2 must divide num_heads=3"),
        ("mla", {"latent_groups": 3}, "latent_groups=3 must divide latent_features=44"),
        ("mlra", {"latent_branches": 3}, "latent_branches=3 must divide latent_groups=4"),
        ("mlra", {"latent_branches": 2}, "their quotient num_heads=3"),
        ("mlra", {"latent_features": 30}, "latent_groups=4 must divide latent_features=30"),
        ("ghla", {"num_groups": 2}, "num_groups=2 must divide num_heads=3"),
        ("ghla", {"num_kv_heads": 3, "num_groups": 1}, "num_kv_heads=3 must divide num_groups=1"),
        ("ghla", {"latent_features": 22}, "latent_features=22 must divide 33"),
        ("gta", {"num_kv_heads": 1}, "gta ties half of a key to its value, .* 11 wide"),
        ("tpa", {"form": "factored", "normalize_qk": True}, "'factored' .*: normalize_qk is not"),
        ("tpa", {"form": "factored", "engine": "blocked"}, "'blocked' is not one of auto, xla, wh"),
    ],
)
def test_what_is_refused(kind, fields, message):
    module = Case(kind).module(**fields)
    with pytest.raises(ValueError, match=message):
        module.init(jax.random.key(0), normal(1, B, T, ADD.width))


@pytest.mark.parametrize(
    ("kind", "form"),
    [("mhe_add", "folded"), ("mhe_mul", "folded"), ("mla", "absorbed"), ("tpa", "factored")],
)
def test_no_head_has_keys_or_values_of_its_own(kind, form):
    """Nothing of size B·S·H·D appears on the key side: what these forms are for."""
    long = 1021
    q, k = normal(1, B, T, ADD.width), normal(2, B, long, ADD.width)

    def program(form):
        module = Case(kind, form).module()
        params = {"params": random_parameters(module, q, k)}
        return str(jax.make_jaxpr(module.apply)(params, q, k))

    heads = f"f32[{B},{long},{H},{ADD.width // H}]"
    assert heads in program("materialized")
    assert heads not in program(form)


def test_modes_of_differentiation():
    """Those of a gradient, also of 'shared', which 'auto' takes."""
    x, direction = normal(1, 1, 2, 6), normal(2, 1, 2, 6)
    module = make_attention("mva", num_heads=2)
    params = {"params": random_parameters(module, x)}

    def loss(x, form="auto"):
        return (module.clone(form=form).apply(params, x) ** 2).sum()

    def forward(f):
        return jax.jit(lambda x, along: jax.jvp(f, (x,), (along,))[1])

    by_other = functools.partial(loss, form="materialized")
    along = forward(by_other)(x, direction)
    assert_close(along, np.sum(jax.jit(jax.grad(loss))(x) * direction), 1e-4)
    of_other = forward(jax.grad(by_other))(x, direction)
    assert_close(forward(jax.grad(loss))(x, direction), of_other, 1e-4)


KEY_REUSE = Case("mfa", more=(("reuse_keys", True),))


def test_key_reuse_starts_from_values_that_are_keys_and_leaves_them():
    module, (q, k) = KEY_REUSE.module(use_bias=False), (normal(1, B, T, 33), normal(2, B, S, 33))
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
