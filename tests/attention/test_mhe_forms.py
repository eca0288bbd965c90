"""Forms are one function of the same parameters: which is taken, and the algebra of MHE."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    MHE,
    B,
    Case,
    D,
    H,
    S,
    T,
    assert_close,
    mask_for,
    normal,
    random_parameters,
)

from mhe_jax.attention import KINDS, Mask, Rotary, make_attention, recording
from mhe_jax.attention.engines import Options, cudnn
from mhe_jax.attention.module import Call
from mhe_jax.config import FORMS_OF_KINDS

ADD, MUL = Case("mhe_add"), Case("mhe_mul")
GRADIENTS = {}


def run(case, form, mask, *inputs):
    """Output and gradients of (parameters, inputs)."""
    params = random_parameters(case.module(), *inputs)
    cotangent = normal(9, B, T, case.width)
    if (case, form) not in GRADIENTS:
        module = case.module(form=form)

        def loss(params, inputs, mask):
            output = module.apply({"params": params}, *inputs, mask=mask)
            return (output * cotangent).sum(), output

        GRADIENTS[case, form] = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (of_params, of_inputs), output = GRADIENTS[case, form](params, inputs, mask)
    return output, of_params, of_inputs


@pytest.mark.parametrize("name", ["none", "a head's row empty"])
def test_the_key_embedding_of_mhe_add_has_no_gradient(name):
    q, k = normal(1, B, T, ADD.width), normal(2, B, S, ADD.width)
    _, dense = mask_for(ADD, name, T, S)
    _, folded, _ = run(ADD, "folded", jnp.asarray(dense), q, k)
    assert not np.any(folded["key_head_embedding"])
    _, materialized, _ = run(ADD, "materialized", jnp.asarray(dense), q, k)
    size = np.abs(materialized["query_head_embedding"]).max()
    assert size > 0
    assert np.abs(materialized["key_head_embedding"]).max() <= 1e-6 * size


@pytest.mark.parametrize("kind", MHE)
def test_every_other_embedding_matters(kind):
    q, k = normal(1, B, T, ADD.width), normal(2, B, S, ADD.width)
    _, dense = mask_for(ADD, "none", T, S)
    _, grads, _ = run(Case(kind), "folded", jnp.asarray(dense), q, k)
    for role in ("query", "key", "value"):
        if (kind, role) != ("mhe_add", "key"):
            assert np.abs(grads[f"{role}_head_embedding"]).min() > 0


@pytest.mark.parametrize("form", ["materialized", "folded"])
def test_mhe_mul_is_multi_query_attention_of_other_weights(form):
    q, k = normal(1, B, T, MUL.width), normal(2, B, S, MUL.width)
    module = MUL.module(form=form)
    p = random_parameters(module, q, k)
    of_query = (1 + p["query_head_embedding"]) * (1 + p["key_head_embedding"])
    of_value = 1 + p["value_head_embedding"]
    multi_query = {
        "query": {
            "kernel": p["query"]["kernel"][:, None] * of_query[None],
            "bias": p["query"]["bias"][None] * of_query,
        },
        "key": {"kernel": p["key"]["kernel"][:, None], "bias": p["key"]["bias"][None]},
        "value": {"kernel": p["value"]["kernel"][:, None], "bias": p["value"]["bias"][None]},
        "out": {
            "kernel": p["out"]["kernel"] * of_value[:, :, None],
            "bias": p["out"]["bias"],
        },
    }
    mask, _ = mask_for(MUL, "one row empty", T, S)
    wanted = Case("mqa").module().apply({"params": multi_query}, q, k, mask=mask)
    assert_close(module.apply({"params": p}, q, k, mask=mask), wanted)


@pytest.mark.parametrize("kind", MHE)
def test_equal_embeddings_of_zero_are_single_head_attention(kind):
    q, k = normal(1, B, T, ADD.width), normal(2, B, S, ADD.width)
    p = random_parameters(Case(kind).module(), q, k, embedding=0.0)
    single = {name: p[name] for name in ("query", "key", "value", "out")}
    wanted = Case("sha").module().apply({"params": single}, q, k)
    assert_close(Case(kind).module().apply({"params": p}, q, k), wanted)


FORMED = [(kind, {}) for kind in FORMS_OF_KINDS]
FORMED += [("mla", {"latent_features": 33, "latent_groups": 3, "query_rank": 5})]


@pytest.mark.parametrize(("kind", "fields"), FORMED, ids=str)
def test_forms_start_from_the_same_parameters(kind, fields):
    """And give the same output; 'auto' starts by a form that is compiled in no time."""
    x = normal(1, B, 32, ADD.width)
    started, programs = {}, {}
    for form in ("auto", *KINDS[kind].forms):
        module = Case(kind).module(form=form, **fields)
        start = functools.partial(module.init_with_output, jax.random.key(0))
        with recording() as made:
            started[form] = jax.jit(start)(x)
        assert not made  # what runs is what is applied
        programs[form] = len(str(jax.make_jaxpr(start)(x)))
    output, parameters = started.pop("auto")
    for other, of_form in started.values():
        jax.tree.map(np.testing.assert_array_equal, parameters, of_form)
        assert_close(other, output)
    assert programs["auto"] <= programs["materialized"]


WIDE = {"latent_features": 66}
HEADS_DIFFER = Mask.array(jnp.ones((1, H, 1, 1), bool))


@pytest.mark.parametrize(
    ("kind", "fields", "call", "form"),
    [
        ("mhe_add", {}, {}, "shared"),
        ("mhe_add", {}, {"queries": 31}, "folded"),
        ("mhe_add", {}, {"dtype": jnp.float16}, "folded"),
        ("mhe_add", {}, {"mask": HEADS_DIFFER}, "folded"),
        ("mhe_add", {}, {"options": Options(sow=print)}, "folded"),
        ("mhe_add", {}, {"options": Options(dropout_rate=0.1)}, "shared"),
        (
            "mhe_add",
            {},
            {"options": Options(dropout_rate=0.1, broadcast_dropout=False)},
            "folded",
        ),
        ("mhe_add", {"engine": "cudnn"}, {}, "folded"),
        ("mhe_add", {"engine": "xla"}, {"queries": 31}, "folded"),
        ("mhe_add", {"engine": "pallas"}, {"queries": 31}, "shared"),
        ("mhe_add", {"normalize_qk": True}, {}, "materialized"),
        ("mhe_add", {"rotary": Rotary()}, {}, "materialized"),
        ("mhe_add", {"form": "materialized"}, {}, "materialized"),
        ("mhe_mul", {}, {}, "folded"),
        ("mhe_mul", {"rotary": Rotary()}, {}, "materialized"),
        ("mva", {"rotary": Rotary()}, {}, "shared"),
        ("mhe_mul", {"normalize_qk": True}, {}, "materialized"),
        ("mva", {}, {"queries": 1}, "shared"),
        ("mva", {"normalize_qk": True}, {}, "shared"),
        ("mva", {}, {"mask": HEADS_DIFFER}, "materialized"),
        # T (2r - 2D) < 2Dr, with r = 4D = 44: T < 14.67.
        ("mla", {"decode": True}, {"queries": 14}, "absorbed"),
        ("mla", {"decode": True}, {"queries": 15}, "materialized"),
        ("mla", {}, {"queries": 1}, "materialized"),
        ("mla", {"decode": True, "normalize_qk": True}, {"queries": 1}, "materialized"),
        ("mla", {"decode": True, "engine": "blocked"}, {"queries": 1}, "absorbed"),
        # With R = 5 keys and values are r + R wide: T (2r + 2R - 2D - R) < 2Dr, T < 13.64.
        ("mla", {"decode": True, "rotary": Rotary()}, {"queries": 13}, "absorbed"),
        ("mla", {"decode": True, "rotary": Rotary()}, {"queries": 14}, "materialized"),
        # Of three latents, with r = 66: T (2r/3 - 2D) < 2Dr/3, T < 22.
        ("mla", {"decode": True, "latent_groups": 3, **WIDE}, {"queries": 21}, "absorbed"),
        ("mla", {"decode": True, "latent_groups": 3, **WIDE}, {"queries": 22}, "materialized"),
        ("mla", {"decode": True, "latent_features": 11}, {"queries": 999}, "absorbed"),
        # T (4(D + 1) - 2D) < 4D.
        ("tpa", {"decode": True}, {"queries": 1}, "factored"),
        ("tpa", {"decode": True}, {"queries": 2}, "materialized"),
        ("tpa", {}, {"queries": 1}, "materialized"),
        ("tpa", {"decode": True, "normalize_qk": True}, {"queries": 1}, "materialized"),
        ("tpa", {"decode": True, "engine": "blocked"}, {"queries": 1}, "materialized"),
        ("tpa", {"decode": True, "engine": "xla"}, {"queries": 1}, "factored"),
        ("tpa", {"decode": True, "rotary": Rotary()}, {"queries": 1}, "factored"),
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
        ("mhe_add", {"engine": "mosaic"}, {}, "shared"),
        ("mhe_add", {}, {"dtype": jnp.dtype("float32")}, "shared"),
        ("mhe_add", {}, {"options": Options(dropout_rate=0.1)}, "shared"),
        ("mhe_add", {}, {"options": Options(precision="highest")}, "shared"),
        ("mhe_add", {}, {"mask": Mask.causal()}, "folded"),
        ("mhe_add", {}, {"mask": Mask.causal() & Mask.lengths(5)}, "folded"),
        ("mhe_add", {}, {"mask": Mask.causal() & Mask.local(3)}, "folded"),
        # In memory these are as large as the scores.
        ("mhe_add", {}, {"mask": Mask.causal(jnp.zeros(1, int))}, "shared"),
        ("mhe_add", {}, {"mask": Mask.padding(jnp.ones((1, 32), bool))}, "shared"),
        ("mhe_add", {}, {"mask": Mask.segments(*jnp.ones((2, 1, 32), int))}, "shared"),
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
        ({"dtype": "bfloat16"}, "float16", "shared"),
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


def test_every_kind_in_forms_has_them_of_the_config():
    """So that a rule of the config refuses what a module would refuse."""
    found = {kind: module.forms for kind, module in KINDS.items() if hasattr(module, "forms")}
    assert found == FORMS_OF_KINDS
    assert all(forms[-1] == "materialized" for forms in found.values())


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mhe_mul", {"form": "shared"}, "'shared' is not one of auto, folded, materialized"),
        ("mva", {"form": "folded"}, "'folded' is not one of auto, shared, materialized"),
        ("mhe_add", {"form": "shared", "normalize_qk": True}, "normalize_qk is not possible"),
        ("mhe_add", {"form": "shared", "rotary": Rotary()}, "rotary is not .* depends on the dist"),
        ("mhe_add", {"form": "folded", "rotary": Rotary()}, "rotary is not .* depends on the dist"),
        ("mhe_mul", {"form": "folded", "rotary": Rotary()}, "rotary is not .* 1 \\+ e_k of two"),
        ("mhe_add", {"num_groups": 2}, "num_groups=2 must divide num_heads=3"),
        ("mhe_add", {"score_groups": 2}, "score_groups=2 must divide num_heads=3"),
        ("mhe_add", {"score_groups": 3, "num_groups": 3}, "does not go with num_groups=3"),
        ("mla", {"form": "folded"}, "'folded' is not one of auto, absorbed, materialized"),
        ("mla", {"form": "absorbed", "normalize_qk": True}, "'absorbed' .*: normalize_qk is not"),
        ("mla", {"latent_groups": 2}, "=2 must divide latent_features=44 and num_heads=3"),
        ("mla", {"latent_groups": 3, "latent_features": 8}, "=3 must divide latent_features=8 and"),
        ("tpa", {"form": "factored", "normalize_qk": True}, "'factored' .*: normalize_qk is not"),
        ("tpa", {"form": "factored", "engine": "blocked"}, "'blocked' is not one of auto, xla, wh"),
    ],
)
def test_what_is_refused(kind, fields, message):
    module = Case(kind).module(**fields)
    with pytest.raises(ValueError, match=message):
        module.init(jax.random.key(0), normal(1, B, T, ADD.width))


def test_an_engine_of_one_form_gives_its_own_reason():
    if jax.default_backend() == "tpu":
        pytest.skip("pallas is for a TPU")
    with pytest.raises(ValueError, match="pallas: needs a TPU"):
        ADD.module(engine="pallas").init(jax.random.key(0), normal(1, B, T, ADD.width))


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


@pytest.mark.parametrize(
    ("kind", "other", "queries"), [("mhe_add", "folded", 32), ("mva", "materialized", 2)]
)
def test_modes_of_differentiation(kind, other, queries):
    """'auto' takes 'shared' from `queries` on: no forward mode but of a gradient."""
    x = normal(1, 1, queries, 6)
    direction = normal(2, 1, queries, 6)
    module = make_attention(kind, num_heads=2)
    params = {"params": random_parameters(module, x)}

    def loss(x, form="auto"):
        return (module.clone(form=form).apply(params, x) ** 2).sum()

    def forward(f):
        return jax.jit(lambda x, along: jax.jvp(f, (x,), (along,))[1])

    with pytest.raises(TypeError, match="forward-mode"):
        forward(loss)(x, direction)
    by_other = functools.partial(loss, form=other)
    along = forward(by_other)(x, direction)
    assert_close(along, np.sum(jax.jit(jax.grad(loss))(x) * direction), 1e-4)
    of_other = forward(jax.grad(by_other))(x, direction)
    assert_close(forward(jax.grad(loss))(x, direction), of_other, 1e-4)
    jax.eval_shape(forward(loss), x[:, : queries - 1], direction[:, : queries - 1])
