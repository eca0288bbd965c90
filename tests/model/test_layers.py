"""The layers against their equations, and the config against the attention that comes of it."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from mhe_jax.attention import KINDS, Mask
from mhe_jax.config import FIELDS_OF_KINDS
from mhe_jax.model.layers import MLP, Layer, attention_module, normalization
from mhe_jax.model.stack import Stack


def random_like(shapes, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape).astype(np.float32))  # noqa: E731
    return jax.tree.map(draw, shapes)


def norm(x, p, epsilon):
    """In NumPy, in float64."""
    x, p = np.asarray(x, np.float64), jax.tree.map(np.asarray, p)
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return (centred / deviation * p["scale"] + p["bias"]).astype(np.float32)


def mlp(x, p, activation):
    x, p = np.asarray(x), jax.tree.map(np.asarray, p)
    x = np.asarray(activation(x @ p["up"]["kernel"] + p["up"]["bias"]))
    return x @ p["down"]["kernel"] + p["down"]["bias"]


def rms_norm(x, p, epsilon):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * np.asarray(p["scale"])


# Hendrycks & Gimpel 2016, the exact one and its approximation; the last is x · sigmoid(x).
FORMULAS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + scipy.special.erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("name", ["encoder", "language_model", "decoder"])
def test_equations(tiny, name, norm_position):
    config = tiny.config(norm_position=norm_position, layer_norm_epsilon=0.1, activation="relu")
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 5, 12)).astype(np.float32))
    encoded = jnp.asarray(rng.normal(size=(2, 7, 12)).astype(np.float32))
    valid = jnp.arange(7)[None] < jnp.array([[7], [4]])
    mask = Mask.padding(valid[:, :5])
    layer, arguments = {
        "encoder": (Layer(config), (x, mask)),
        "language_model": (Layer(config, "decoder"), (x,)),
        "decoder": (Layer(config, "decoder", True), (x, None, encoded, Mask.padding(valid))),
    }[name]
    p = random_like(jax.eval_shape(layer.init, jax.random.key(0), *arguments))["params"]

    def attend(sublayer, role, *inputs, mask):
        variables = {"params": p[sublayer]}
        inputs = [jnp.asarray(y) for y in inputs]
        return np.asarray(attention_module(config, role, "").apply(variables, *inputs, mask=mask))

    own = ("encoder", mask) if name == "encoder" else ("decoder", Mask.causal())
    sublayers = {"self_attention": lambda y: attend("self_attention", own[0], y, mask=own[1])}
    if name == "decoder":
        sublayers["cross_attention"] = lambda y: attend(
            "cross_attention", "cross", y, encoded, mask=Mask.padding(valid)
        )
    sublayers["mlp"] = lambda y: mlp(y, p["mlp"], nn.relu)

    want = np.asarray(x)
    for sublayer, function in sublayers.items():
        normed = lambda y, q=p[f"{sublayer}_norm"]: norm(y, q, 0.1)  # noqa: E731
        if norm_position == "pre":
            want = want + function(normed(want))
        else:
            want = normed(want + function(want))
    np.testing.assert_allclose(layer.apply({"params": p}, *arguments), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_dropout_takes_what_a_sublayer_adds_and_nothing_else(tiny, name, norm_position):
    """Where all of it is dropped, what came in is left, and under `post` its norms."""
    config = tiny.config(norm_position=norm_position, layer_norm_epsilon=0.1, dropout_rate=1.0)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, 12)).astype(np.float32))
    layer = Layer(config, name, cross=name == "decoder")
    arguments = (x,) if name == "encoder" else (x, None, x[:, ::-1], Mask())
    p = random_like(jax.eval_shape(layer.init, jax.random.key(0), *arguments))["params"]
    rngs = {"dropout": jax.random.key(0)}
    drop = tiny.jit(
        lambda p: layer.apply({"params": p}, *arguments, deterministic=False, rngs=rngs)
    )
    got, want = drop(p), np.asarray(x)
    if norm_position == "post":
        for sublayer in ("self_attention", *(["cross_attention"] * (name == "decoder")), "mlp"):
            want = norm(want, p[f"{sublayer}_norm"], 0.1)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("sort", "activation", "bias"),
    [("plain", name, True) for name in FORMULAS]
    + [("gated", "silu", True), ("gated", "gelu", False)],
)
def test_mlp(tiny, sort, activation, bias):
    module = MLP(tiny.config(mlp=sort, activation=activation, mlp_bias=bias))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 12)).astype(np.float32))
    p = random_like(jax.eval_shape(module.init, jax.random.key(0), x))["params"]
    shapes = {"up": (12, 20), "down": (20, 12)} | ({"gate": (12, 20)} if sort == "gated" else {})
    want = {n: {"kernel": s} | ({"bias": s[1:]} if bias else {}) for n, s in shapes.items()}
    assert jax.tree.map(lambda leaf: leaf.shape, p) == want

    def through(name, y):
        return y @ np.asarray(p[name]["kernel"]) + np.asarray(p[name].get("bias", 0.0))

    y = FORMULAS[activation](through("gate" if sort == "gated" else "up", np.asarray(x)))
    y = through("down", y * through("up", np.asarray(x)) if sort == "gated" else y)
    np.testing.assert_allclose(module.apply({"params": p}, x), y, atol=1e-5)


def test_rms_norm(tiny):
    """A mean that is not 0 stays; all of it in float32."""
    config = tiny.config(norm="rms", layer_norm_epsilon=0.1)
    x = 0.3 + np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    p = random_like(jax.eval_shape(normalization(config).init, jax.random.key(0), x))["params"]
    assert list(p) == ["scale"]
    got = normalization(config).apply({"params": p}, x)
    np.testing.assert_allclose(got, rms_norm(x, p, 0.1), rtol=1e-5)
    half = dataclasses.replace(config, dtype="bfloat16")
    got = normalization(half).apply({"params": p}, jnp.asarray(x, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    want = rms_norm(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64), p, 0.1)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8)


def test_layer_norm_of_bfloat16_is_computed_in_float32(tiny):
    """A large common offset: subtracting the mean in bfloat16 would lose what is left."""
    module = normalization(tiny.config(dtype="bfloat16"))
    x = jnp.asarray(300 + 2 * np.random.default_rng(0).normal(size=(1, 4, 12)), jnp.bfloat16)
    p = {"scale": jnp.ones(12), "bias": jnp.zeros(12)}
    got = module.apply({"params": p}, x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), norm(x, p, 1e-6), atol=0.02)


# Values of the fields that belong to some kinds only, but for that of the head embeddings.
OF_KINDS = {
    "num_kv_heads": 2,
    "form": "materialized",
    "num_groups": 2,
    "score_groups": 4,
    "score_features": 8,
    "use_key_bias": False,
    "query_rank": 7,
    "reuse_keys": True,
    "key_rank": 3,
    "value_rank": 5,
    "latent_features": 4,
    "latent_groups": 2,
    "latent_branches": 2,
    "rotary_features": 6,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_config_reaches_the_attention(tiny, kind):
    assert OF_KINDS.keys() | {"head_embedding_stddev"} == FIELDS_OF_KINDS.keys()
    mhe = kind in FIELDS_OF_KINDS["head_embedding_stddev"]
    # 16 is not the width 12 of the model; el cuts the hidden states and cannot have it.
    width = None if kind == "el" else 16
    special = {"head_embedding_stddev": 0.5} if mhe else {}
    of_kind = {f: v for f, v in OF_KINDS.items() if kind in FIELDS_OF_KINDS[f]}
    if "score_groups" in of_kind:
        of_kind["num_groups"] = 1  # they do not go together
    of_config = tiny.config(
        kind,
        attention={
            "qkv_features": width,
            "engine": "xla",
            "dropout_rate": 0.25,
            "use_bias": True,
            "normalize_qk": True,
            **special,
            **of_kind,
        },
        dtype="bfloat16",
    )
    module = attention_module(of_config, "cross", "cross_attention", decode=True)
    assert type(module) is KINDS[kind]
    got = {field: getattr(module, field) for field in ("num_heads", "qkv_features", "engine")}
    assert got == {"num_heads": 4, "qkv_features": width or 12, "engine": "xla"}
    assert module.dropout_rate == 0.25
    assert module.use_bias and module.normalize_qk and module.force_fp32_for_softmax  # noqa: PT018
    assert (module.dtype, module.decode, module.name) == ("bfloat16", True, "cross_attention")
    assert {f: getattr(module, f) for f in OF_KINDS if hasattr(module, f)} == of_kind
    if mhe:
        table = module.head_embedding_init(jax.random.key(0), (100, 100), jnp.float32)
        np.testing.assert_allclose(table.std(), 0.5, rtol=0.05)
    default = attention_module(tiny.config(kind), "cross", "x")
    assert not default.use_bias
    assert not default.decode
    if mhe:
        assert default.form == "auto"
        assert default.head_embedding_init is KINDS[kind].head_embedding_init


@pytest.mark.parametrize("scan_layers", [True, False])
def test_each_layer_draws_a_dropout_mask_of_its_own(tiny, scan_layers):
    """Each of two layers adds dropout(1): with the same mask twice no feature could get it once."""
    config = tiny.config(scan_layers=scan_layers, dropout_rate=0.5)
    stack = Stack(config, 2)
    x = jnp.zeros((2, 5, 12))
    shapes = jax.eval_shape(stack.init, jax.random.key(0), x)["params"]

    def constant(path, leaf):
        names = [key.key for key in path]
        one = names[-2:] == ["down", "bias"] or (names[-1] == "scale")
        return jnp.full(leaf.shape, float(one))

    params = jax.tree_util.tree_map_with_path(constant, shapes)
    rngs = {"dropout": jax.random.key(0)}
    out = stack.apply({"params": params}, x, deterministic=False, rngs=rngs)
    levels = max(len(np.unique(np.round(row, 4))) for row in np.asarray(out).reshape(-1, 12))
    assert levels == 3
