"""Logical names on every parameter, and the same numbers on a mesh of eight devices."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from mhe_jax.attention import KINDS
from mhe_jax.tasks import TASKS
from mhe_jax.training.sharding import RULES


def boxed_shapes(tiny, task, config):
    model = TASKS[task].model(config)
    with nn.logical_axis_rules(RULES):
        return jax.eval_shape(model.init, jax.random.key(0), *tiny.inputs(task))["params"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_name_for_every_axis(tiny, kind, scan_layers):
    config = tiny.config(
        kind,
        attention={"use_bias": True},
        scan_layers=scan_layers,
        tie_embeddings=False,
        num_token_types=2,
        norm_position="post",
    )
    known = {name for name, _ in RULES} | {None}
    for task in ("mlm", "translation"):
        boxed = boxed_shapes(tiny, task, config)
        is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
        for path, box in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box):
            assert is_box(box), path
            assert len(box.names) == len(box.value.shape), path
            assert set(box.names) <= known, path
            scanned = any(getattr(key, "key", None) == "layers" for key in path)
            assert ("layers" in box.names) == scanned, path


def test_without_rules_parameters_are_plain(tiny):
    model = TASKS["lm"].model(tiny.config())
    shapes = jax.eval_shape(model.init, jax.random.key(0), *tiny.inputs("lm"))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(("task", "scan_layers"), [("lm", True), ("translation", False)])
def test_eight_devices_compute_what_one_does(tiny, task, scan_layers):
    config = tiny.config("mhe_mul", scan_layers=scan_layers, num_layers=1 + scan_layers)
    params = tiny.params(task, config)
    model = TASKS[task].model(config)
    inputs = tuple(np.concatenate([x, x[::-1]]) for x in tiny.inputs(task))
    weights = np.random.default_rng(0).normal(size=(1, 1, 26)).astype(np.float32)

    def run(params, inputs):
        def loss(params):
            logits = model.apply({"params": params}, *inputs)
            return (logits * weights).sum() / 10, logits

        if task != "lm":
            return loss(params)[1]
        (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, gradients

    want = tiny.jit(run)(params, inputs)
    axes = ("data", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    specs = nn.get_partition_spec(boxed_shapes(tiny, task, config))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    placed = jax.device_put(params, shardings)
    batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
    rows = jax.device_put(inputs, batch)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        jitted = tiny.jit(run)
        assert "sdy.sharding_constraint" in jitted.lower(placed, rows).as_text()
        got = jitted(placed, rows)
    assert len(jax.tree.leaves(got)[0].sharding.device_set) == 8
    for one, eight in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(eight, one, atol=1e-5, rtol=1e-4)
