"""NNX modules do what the Linen modules do, under NNX's transformations, and as Flax's own class.

Differences from `flax.nnx.MultiHeadAttention`, each held by a test here: the cache takes several
tokens a call and counts them for each row; `decode` without a value is False; a call of
self-attention may follow `init_cache` at any length; a query without keys gives 0.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from attention_cases import B, H, M, S, T, assert_close, every_kind, normal, random_parameters
from flax import nnx
from jax.sharding import PartitionSpec

import mhe_jax.attention.nnx as ours
from mhe_jax.attention import KINDS, Mask, convert, make_attention

make = functools.partial(ours.make_attention, kind="mva", num_heads=H, in_features=M)


def of_case(case, **fields):
    """The NNX module of a case, and its Linen module with the same parameters."""
    linen = case.module(**fields)
    names = {f.name for f in dataclasses.fields(linen) if f.init} - LEFT_OUT
    own = {name: getattr(linen, name) for name in names}
    return linen, ours.CLASSES[case.kind](in_features=case.width, rngs=nnx.Rngs(0), **own)


LEFT_OUT = {"name", "parent", "decode", "deterministic"}


@every_kind
def test_a_module_equals_its_linen_module(case):
    """Outputs and gradients: self, cross, causal, padding, and prefill and steps over the cache."""
    linen, module = of_case(case)
    x, y, out = (
        normal(1, B, T, case.width),
        normal(2, B, S, case.width),
        normal(3, B, T, case.width),
    )
    params = random_parameters(linen, x)
    assert jax.tree.map(np.shape, nnx.to_pure_dict(nnx.state(module, nnx.Param))) == jax.tree.map(
        np.shape, params
    )
    nnx.update(module, params)
    padding = Mask.padding(np.arange(S)[None] < np.array([[S], [S - 2]]))
    calls = {
        "self": ((x,), {}, {}),
        "causal": ((x,), {"mask": Mask.causal()}, {"is_causal": True}),
        "cross and padding": ((x, y), {"mask": padding}, {"mask": padding}),
    }

    @jax.jit
    def of_linen(params):
        def loss(params):
            found = [linen.apply({"params": params}, *a, **k) for a, k, _ in calls.values()]
            return sum(jnp.vdot(y, out) for y in found), found

        return jax.grad(loss, has_aux=True)(params)

    @nnx.jit
    def of_nnx(module):
        def loss(module):
            found = [module(*a, **k) for a, _, k in calls.values()]
            return sum(jnp.vdot(y, out) for y in found), found

        return nnx.grad(loss, has_aux=True)(module)

    (gradients, wanted), (own, found) = of_linen(params), of_nnx(module)
    assert_close(found, wanted, 1e-6)
    assert_close(nnx.to_pure_dict(own), gradients, 1e-6)

    @nnx.jit
    def decoded(module):
        module.init_cache(x.shape)
        parts = x[:, :2], x[:, 2:3], x[:, 3:]
        return jnp.concatenate([module(part, decode=True) for part in parts], 1)

    assert_close(decoded(module), wanted[1], 1e-5)
    np.testing.assert_array_equal(module.cache_index[...], [T] * B)


@pytest.mark.parametrize(
    ("theirs", "heads"), [({}, {}), ({"num_kv_heads": 1}, {"num_kv_heads": 1})]
)
def test_mha_takes_the_parameters_of_flax(theirs, heads):
    flax = nnx.MultiHeadAttention(H, M, rngs=nnx.Rngs(5), decode=False, **theirs)
    module = ours.MultiHeadAttention(H, M, rngs=nnx.Rngs(0), **heads)
    nnx.update(module, nnx.state(flax, nnx.Param))
    x, y = normal(1, B, T, M), normal(2, B, S, M)
    assert_close(module(x, y), flax(x, y))


def test_parameters_go_to_linen_and_through_convert():
    module, x = make(use_bias=False, rngs=nnx.Rngs(params=3)), normal(1, B, T, M)
    linen = make_attention("mva", num_heads=H, use_bias=False)
    state = nnx.state(module, nnx.Param)
    assert_close(linen.apply({"params": nnx.to_pure_dict(state)}, x), module(x), 1e-6)
    found = convert(nnx.to_pure_dict(state), "gqa", source="mva", num_kv_heads=1)
    grouped = make_attention("gqa", num_heads=H, num_kv_heads=1)
    assert grouped.apply({"params": found}, x).shape == x.shape
    # They begin as Linen's do.
    wide = ours.MultiHeadAttention(16, 256, rngs=nnx.Rngs(0))
    assert float(wide.query.kernel[...].std()) == pytest.approx(1 / 16, rel=0.05)


def test_a_cache_of_cross_attention_is_filled_once():
    module, x, y = make(rngs=nnx.Rngs(0)), normal(1, B, T, M), normal(2, B, S, M)
    wanted = module(x, y)
    nnx.jit(lambda module, y: module.fill_cache(y))(module, y)
    assert_close(module(x, decode=True), wanted, 1e-6)
    assert_close(module(x[:, :2], decode=True), wanted[:, :2], 1e-6)
    module.init_cache(x.shape)  # from now on of self-attention
    assert_close(module(x, decode=True), module(x, is_causal=True))


def test_train_and_eval_switch_dropout():
    module, x = make(dropout_rate=0.5, rngs=nnx.Rngs(0)), normal(1, B, T, M)
    module.eval()
    calm = module(x)
    assert_close(module(x), calm, 1e-9)
    module.train()
    first, second = module(x), module(x)
    assert not np.allclose(first, calm)
    assert not np.allclose(first, second)
    drawn = [module(x, rngs=rngs) for rngs in (nnx.Rngs(4), nnx.Rngs(4).dropout)]
    np.testing.assert_array_equal(*drawn)
    assert_close(module(x, deterministic=True), calm, 1e-9)
    assert_close(nnx.view(module, deterministic=True)(x), calm, 1e-9)


class Layers(nnx.Module):
    """Attention with a residual, by `nnx.scan` over stacked parameters or one after another."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs):
            return make(rngs=rngs)

        self.layers = stacked(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def layer(attention, x):
            return x + attention(x, is_causal=True)

        return layer(self.layers, x)


def test_scanned_and_rematerialised_layers_are_layers():
    model, x = Layers(nnx.Rngs(0)), normal(1, B, T, M)
    definition, state = nnx.split(model.layers)

    def unrolled(state, x):
        for layer in range(3):
            x = x + nnx.merge(definition, jax.tree.map(lambda leaf: leaf[layer], state))(  # noqa: B023
                x, is_causal=True
            )
        return x

    assert_close(nnx.jit(lambda model, x: model(x))(model, x), unrolled(state, x))
    gradients = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))(model, x)
    wanted = jax.grad(lambda state: unrolled(state, x).sum())(state)
    assert_close(nnx.to_pure_dict(gradients)["layers"], nnx.to_pure_dict(wanted), 3e-5)


def test_orbax_saves_and_restores(tmp_path):
    module, x = make(rngs=nnx.Rngs(0)), normal(1, B, T, M)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(module, nnx.Param))
        checkpointer.wait_until_finished()
        abstract = nnx.state(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(1))), nnx.Param)
        restored = checkpointer.restore(tmp_path / "state", abstract)
    other = make(rngs=nnx.Rngs(2))
    nnx.update(other, restored)
    np.testing.assert_array_equal(other(x), module(x))


def test_weights_are_sown():
    module, x = make(rngs=nnx.Rngs(0)), normal(1, B, T, M)
    _, sown = nnx.capture(module, nnx.Intermediate)(x, sow_weights=True)
    (weights,) = sown["attention_weights"]
    assert weights.shape == (B, H, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_parameters_lie_on_a_mesh_by_their_logical_axes():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), nn.logical_axis_rules([("heads", "tensor")]):
        module = make(rngs=nnx.Rngs(0), num_heads=4, in_features=32)
        assert module.value.kernel.sharding.spec == PartitionSpec(None, "tensor", None)
    x = normal(1, B, T, 32)
    assert_close(module(x), make(rngs=nnx.Rngs(0), num_heads=4, in_features=32)(x))
    given = {"kernel_metadata": {"mine": 1}, "out_kernel_metadata": {"mine": 2}}
    told = make(rngs=nnx.Rngs(0), **given)
    assert (told.query.kernel.mine, told.out.kernel.mine) == (1, 2)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: make(rngs=nnx.Rngs(0), in_features=0), "in_features=0"),
        (lambda: make(rngs=nnx.Rngs(0), in_features=M + 1), f"qkv_features={M + 1}"),
        (lambda: make(rngs=nnx.Rngs(0), kind="mvb"), "mvb"),
        (lambda: make(rngs=nnx.Rngs(0), query_rank=3), "query_rank"),
        (lambda: make(rngs=nnx.Rngs(0), attention_fn=print), "attention_fn"),
        (lambda: make(rngs=nnx.Rngs(0))(normal(1, B, T, M), decode=True), "init_cache"),
        (lambda: make(rngs=nnx.Rngs(0), dropout_rate=0.1)(normal(1, B, T, M)), "deterministic"),
        (
            lambda: make(rngs=nnx.Rngs(0), dropout_rate=0.1, keep_rngs=False)(
                normal(1, B, T, M), deterministic=False
            ),
            "keep_rngs",
        ),
        (lambda: nnx.view(make(rngs=nnx.Rngs(0)), decode=True), "max_length"),
    ],
)
def test_bad_input_names_the_field(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()


def test_each_kind_has_a_class():
    assert list(ours.CLASSES) == list(KINDS)
    assert ours.MultiValueAttention is ours.CLASSES["mva"]
    with pytest.raises(AttributeError, match="MultiHeads"):
        ours.MultiHeads  # noqa: B018
