"""Models as others write them, converted in one call."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import B, H, M, S, T, assert_close, normal
from flax import nnx

import mhe_jax.attention.nnx as ours
from mhe_jax.attention import Activations, Mask, convert, make_attention
from mhe_jax.attention.models import convert_model

# Flax still has the class, and models still have it.
pytestmark = pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated")

X, Y = normal(1, B, T, M), normal(2, B, S, M)
theirs = functools.partial(nn.MultiHeadDotProductAttention, num_heads=H)


class Unnamed(nn.Module):
    """Two layers without names, with dropout and a causal mask."""

    @nn.compact
    def __call__(self, x, deterministic=True):
        for _ in range(2):
            mask = nn.make_causal_mask(x[..., 0])
            y = theirs(dropout_rate=0.3)(x, mask=mask, deterministic=deterministic)
            x = nn.LayerNorm()(x + y)
        return x


class Scanned(nn.Module):
    """Layers by `nn.scan` and `nn.remat`, made in `setup`, and another method."""

    def setup(self):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.SelfAttention(num_heads=H, use_bias=False)(x), None

        scan = functools.partial(nn.scan, variable_axes={"params": 0}, split_rngs={"params": True})
        self.layers = scan(nn.remat(Layer), length=3)()
        self.out = nn.Dense(3)

    def __call__(self, x):
        return self.out(self.encode(x))

    def encode(self, x):
        return self.layers(x, None)[0]


class Crossed(nn.Module):
    """Cross-attention, with a field, keyword arguments and parameters that are shared."""

    width: int = M

    @nn.compact
    def __call__(self, x, y):
        attention = theirs(qkv_features=self.width, name="cross")
        return attention(x, inputs_k=y) + attention(x * 2, inputs_k=y)


class Outer(nn.Module):
    """Holds a model as a part."""

    model: nn.Module

    @nn.compact
    def __call__(self, *batch):
        return self.model(*batch) * 2


LINEN = {"unnamed": (Unnamed(), (X,)), "scanned": (Scanned(), (X,)), "crossed": (Crossed(), (X, Y))}


@pytest.mark.parametrize("name", LINEN)
def test_a_linen_model_is_converted_in_one_call(name):
    model, batch = LINEN[name]
    params = model.init(jax.random.key(0), *batch)["params"]
    wanted = model.apply({"params": params}, *batch)
    # Exact: each head has keys and values of its own.
    same, exact = convert_model(model, params, "gqa", [batch], num_kv_heads=H)
    assert_close(same.apply({"params": exact}, *batch), wanted, 1e-5)
    # Another kind has other parameters, of which all are used, also by `init` and inside a model.
    made, found = convert_model(model, {"params": params}, "mva", [batch, batch])
    shapes = jax.tree.map(np.shape, found)
    assert jax.tree.map(np.shape, made.init(jax.random.key(0), *batch)) == shapes
    assert {"key_bias", "query"} <= {k.key for path, _ in leaves(found) for k in path}
    output = jax.jit(made.apply)(found, *batch)
    within = Outer(made).apply({"params": {"model": found["params"]}}, *batch)
    assert_close(within, output * 2)
    assert not np.allclose(output, wanted, atol=1e-3)
    assert np.square(output - wanted).mean() < np.square(wanted).mean() / 2


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def test_each_scanned_layer_is_converted_from_what_it_sees():
    model, batches = Scanned(), [X, Y]
    params = model.init(jax.random.key(0), X)["params"]
    _, found = convert_model(model, params, "mva", batches)
    inside = lambda tree: tree["layers"]["SelfAttention_0"]  # noqa: E731
    for layer in range(3):
        own = jax.tree.map(lambda a: a[layer], inside(params))  # noqa: B023
        wanted = convert(own, "mva", activations=[Activations(x) for x in batches])
        assert_close(jax.tree.map(lambda a: a[layer], inside(found)), wanted, 1e-4)  # noqa: B023
        module = theirs(use_bias=False)
        batches = [x + module.apply({"params": own}, x) for x in batches]


def test_methods_and_dropout_stay():
    params = Scanned().init(jax.random.key(0), X)["params"]
    model, found = convert_model(Scanned(), params, "gqa", [X], num_kv_heads=H)
    wanted = Scanned().apply({"params": params}, X, method="encode")
    assert_close(model.apply({"params": found}, X, method="encode"), wanted, 1e-5)
    params = Unnamed().init(jax.random.key(0), X)["params"]
    model, found = convert_model(Unnamed(), params, "mva", [{"x": X}])
    run = functools.partial(model.apply, {"params": found}, X)
    dropped = [run(deterministic=False, rngs={"dropout": jax.random.key(k)}) for k in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert not np.allclose(dropped[0], dropped[2])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(H, M, decode=False, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(M, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x), is_causal=True)


class Model(nnx.Module):
    """Layers in a list, stacked layers, and cross-attention of another width."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs):
            return Block(rngs)

        self.stacked = stacked(rngs)
        self.cross = nnx.MultiHeadAttention(
            H, M, in_kv_features=11, dropout_rate=0.5, decode=False, rngs=rngs
        )

    def __call__(self, x, y):
        for block in self.blocks:
            x = block(x)
        scan = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.cross(scan(self.stacked, x), y)


class Decoder(nn.Module):
    """As models set them: fields of attention that follow those of the model."""

    decode: bool = False
    train: bool = False

    @nn.compact
    def __call__(self, x):
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        how = {"dropout_rate": 0.5, "deterministic": not self.train, "decode": self.decode}
        return x + theirs(**how)(x, mask=mask)


@pytest.mark.parametrize("kind", ["mha", "mva"])
def test_a_converted_model_decodes_and_drops_out_when_its_fields_say_so(kind):
    model = Decoder()
    params = model.init(jax.random.key(0), X)["params"]
    converted, params = convert_model(model, params, kind, [X])
    wanted = converted.apply({"params": params}, X)
    rngs = {"dropout": jax.random.key(1)}
    dropped = converted.clone(train=True).apply({"params": params}, X, rngs=rngs)
    assert float(jnp.max(jnp.abs(dropped - wanted))) > 0.1
    decoder = converted.clone(decode=True)
    cache = decoder.init(jax.random.key(2), X)["cache"]
    for t in range(T):
        given = {"params": params, "cache": cache}
        y, changed = decoder.apply(given, X[:, t : t + 1], mutable=["cache"])
        cache = changed["cache"]
        assert_close(y, wanted[:, t : t + 1], 1e-5)
    with pytest.raises(ValueError, match="takes decode=False"):
        convert_model(Decoder(decode=True), {"params": params, "cache": cache}, kind, [X[:, :1]])


def test_an_nnx_model_is_converted_in_one_call():
    model, y = Model(nnx.Rngs(0)), normal(3, B, S, 11)
    model.eval()
    wanted = model(X, y)
    same, _ = convert_model(model, None, "gqa", [(X, y)], num_kv_heads=H)
    assert_close(same(X, y), wanted, 1e-5)
    made, params = convert_model(model, None, "mva", [(X, y)])
    assert isinstance(made.blocks[1].attention, ours.MultiValueAttention)
    assert made.stacked.attention.value.kernel.shape[0] == 3
    assert_close(nnx.to_pure_dict(nnx.state(made, nnx.Param)), nnx.to_pure_dict(params), 1e-9)
    output = nnx.jit(lambda model, x, y: model(x, y))(made, X, y)
    assert np.square(output - wanted).mean() < np.square(wanted).mean() / 2
    np.testing.assert_array_equal(model(X, y), wanted)  # the model given stays
    made.train()
    assert not np.allclose(made(X, y), made(X, y))  # dropout goes on
    back, _ = convert_model(made, None, "mha", [(X, y)])
    back.eval()
    assert isinstance(back.cross, ours.MultiHeadAttention)


def of_own_softmax(query, *_, **__):
    return query


@pytest.mark.parametrize(
    ("model", "batches", "named"),
    [
        (nn.Dense(3), [X], "batches"),
        (theirs(), [], "batches"),
        (theirs(attention_fn=of_own_softmax), [X], "attention_fn"),
        (theirs(), [(X, X, X * 2)], "values"),
        (theirs(normalize_qk=True), [X], "normalize_qk"),
    ],
)
def test_what_cannot_be_converted_says_why(model, batches, named):
    params = model.init(jax.random.key(0), X)["params"]
    with pytest.raises(ValueError, match=named):
        convert_model(model, params, "mva", batches)


def test_a_model_of_ours_is_converted_too():
    module = make_attention("mhe_mul", num_heads=H, use_bias=False)
    params = module.init(jax.random.key(0), X)["params"]
    made, found = convert_model(module, params, "mha", [{"inputs_q": X, "mask": Mask.causal()}])
    wanted = module.apply({"params": params}, X)
    assert_close(made.apply({"params": found}, X), jnp.asarray(wanted), 1e-5)
