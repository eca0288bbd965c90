"""Scanned and unrolled layers, remat, LayerNorm before or after, roles, and tree conversion."""

import dataclasses
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.config import AttentionByRole, AttentionOverride
from mhe_jax.model import stack_layers, unroll_layers
from mhe_jax.tasks import TASKS
from mhe_jax.training.sharding import RULES

NAMES = ("mlm", "lm", "translation")


@pytest.mark.parametrize(
    ("task", "norm_position"),
    [("mlm", "post"), ("lm", "pre"), ("translation", "pre")],
)
def test_scanned_equals_unrolled(tiny, task, norm_position):
    config = tiny.config("mhe_mul", scan_layers=True, norm_position=norm_position)
    params = tiny.params(task, config)
    unrolled_config = dataclasses.replace(config, scan_layers=False)
    unrolled = unroll_layers(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(unrolled, tiny.params(task, unrolled_config))
    chex.assert_trees_all_equal(stack_layers(unrolled), params)
    np.testing.assert_allclose(
        tiny.logits(task, config, params),
        tiny.logits(task, unrolled_config, unrolled),
        atol=1e-5,
        rtol=1e-5,
    )


def test_conversion_keeps_logical_names(tiny):
    config = tiny.config("mhe_add")
    trees = {}
    for scan_layers in (True, False):
        model = TASKS["translation"].model(dataclasses.replace(config, scan_layers=scan_layers))
        with nn.logical_axis_rules(RULES):
            trees[scan_layers] = jax.eval_shape(
                model.init, jax.random.key(0), *tiny.inputs("translation")
            )["params"]
    spec = nn.get_partition_spec
    assert spec(jax.eval_shape(unroll_layers, trees[True])) == spec(trees[False])
    assert spec(jax.eval_shape(stack_layers, trees[False])) == spec(trees[True])
    chex.assert_trees_all_equal_shapes_and_dtypes(
        nn.unbox(jax.eval_shape(unroll_layers, trees[True])), nn.unbox(trees[False])
    )


def test_layers_are_stacked_by_their_numbers():
    """Of which 10 comes after 9, not after 1."""
    tree = {f"layer_{i}": {"x": jnp.asarray(i)} for i in (*range(10, 13), *range(10))}
    assert stack_layers(tree)["layers"]["x"].tolist() == list(range(13))


@pytest.mark.parametrize(("task", "scan_layers"), [("mlm", True), ("lm", False)])
def test_remat_changes_nothing(tiny, task, scan_layers):
    """Values and gradients, under dropout: the recomputation must draw the same masks."""
    rates = {"attention": {"dropout_rate": 0.3}, "dropout_rate": 0.3}
    layers = {"scan_layers": scan_layers, "num_layers": 1 + scan_layers}
    config = tiny.config("mhe_mul", **rates, **layers)
    params = tiny.params(task, config)
    results = []
    for remat in (False, True):
        model = TASKS[task].model(dataclasses.replace(config, remat=remat))

        def loss(params, model=model):
            logits = model.apply(
                {"params": params},
                *tiny.inputs(task),
                deterministic=False,
                rngs={"dropout": jax.random.key(3)},
            )
            return jnp.sum(jnp.sin(logits))

        results.append(tiny.jit(jax.value_and_grad(loss))(params))
    chex.assert_trees_all_close(*results, atol=1e-5, rtol=1e-5)


def test_remat_recomputes(tiny):
    found = {}
    for remat in (False, True):
        text = str(_gradient(tiny, "lm", tiny.config(num_layers=1, remat=remat)))
        found[remat] = "remat" in text or "checkpoint" in text
    assert found == {False: False, True: True}


@pytest.mark.parametrize(("kind", "engine"), [("mha", "xla"), ("mha", "blocked"), ("mhe_add", "")])
def test_a_scanned_layer_keeps_products(tiny, kind, engine):
    """What products and attention give, and a byte for each chance of dropout, once a layer.

    With `remat` its input alone. Nothing of the size of scores where attention goes in blocks, nor
    where its dropout is made of a word for each query and key.
    """
    how = {"engine": engine} if engine else {"form": "shared"}
    rates = {"dropout_rate": 0.3, "attention": {"dropout_rate": 0.3, **how}}
    B, T, H, D, M, F, L = 2, 7, 4, 3, 12, 20, 3
    kept, masks = {}, {}
    for remat in (False, True):
        config = tiny.config(kind, num_layers=L, scan_layers=True, remat=remat, **rates)
        scan, _ = [
            eqn for eqn in _gradient(tiny, "lm", config).eqns if eqn.primitive.name == "scan"
        ]
        stacked = [v.aval for v in scan.outvars if v.aval.shape[:1] == (L,)]
        for found, of_bytes in ((kept, False), (masks, True)):
            found[remat] = sorted(
                math.prod(a.shape[1:]) for a in stacked if (a.dtype == bool) == of_bytes
            )
    assert (kept[True], masks[True]) == ([B * T * M], [])
    of_scores = [B * T * T] if engine == "xla" else []
    assert masks[False] == sorted([B * T * M] * 2 + of_scores)
    activations = [B * T * M] * 2 + [B * T * F]  # input, output of attention, hidden of the MLP
    heads = B * T * H * D
    of_attention = {
        "xla": [heads] * 4 + [B * H * T * T],  # q, k, v, output; scores
        "blocked": [heads] * 4,
        # q, k, v of one head; denominators; output and the column of dropout's sums
        "": [B * T * D] * 3 + [B * T * H] + [heads + B * T * H],
    }[engine]
    assert kept[False] == sorted(activations + of_attention)


def _gradient(tiny, task, config):
    """The traced gradient of a sum of outputs, under dropout."""
    model = TASKS[task].model(config)

    def loss(params):
        rngs = {"dropout": jax.random.key(3)}
        return model.apply(
            {"params": params}, *tiny.inputs(task), deterministic=False, rngs=rngs
        ).sum()

    return jax.make_jaxpr(jax.grad(loss))(tiny.params(task, config)).jaxpr


def test_post_norm_ends_in_the_norm_of_the_last_layer(tiny):
    config = tiny.config(norm_position="post")
    params = tiny.params("mlm", config)
    norm = params["encoder"]["layer_1"]["mlp_norm"]
    norm["scale"], norm["bias"] = jnp.ones(12), jnp.zeros(12)
    x = TASKS["mlm"].model(config).apply({"params": params}, tiny.inputs("mlm")[0], method="encode")
    np.testing.assert_allclose(x.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(x.std(-1), 1, atol=1e-4)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_kind_for_each_role(tiny, scan_layers):
    roles = AttentionByRole(
        encoder=AttentionOverride(kind="skv"),
        decoder=AttentionOverride(kind="mhe_add"),
        cross=AttentionOverride(kind="gqa", num_kv_heads=2),
    )
    config = tiny.config(attention_by_role=roles, scan_layers=scan_layers)
    params = tiny.params("translation", config)
    layer = "layers" if scan_layers else "layer_0"
    encoder, decoder = params["encoder"][layer], params["decoder"][layer]
    assert set(encoder["self_attention"]) == {"query", "key_value", "out"}
    heads = {f"{role}_head_embedding" for role in ("query", "key", "value")}
    assert set(decoder["self_attention"]) == {"query", "key", "value", "out"} | heads
    assert decoder["cross_attention"]["key"]["kernel"].shape[-3:] == (12, 2, 3)
    assert np.isfinite(tiny.logits("translation", config, params)).all()


def test_scanned_layers_start_different_from_each_other(tiny):
    model = TASKS["lm"].model(tiny.config("mhe_mul", scan_layers=True))
    params = tiny.jit(model.init)(jax.random.key(0), *tiny.inputs("lm"))["params"]
    layers = params["decoder"]["layers"]
    for leaf in (
        layers["mlp"]["up"]["kernel"],
        layers["self_attention"]["query_head_embedding"],
    ):
        assert leaf.shape[0] == 2
        assert (leaf[0] != leaf[1]).all()
    std = layers["self_attention"]["out"]["kernel"].std()
    np.testing.assert_allclose(std, 12**-0.5, rtol=0.15)
