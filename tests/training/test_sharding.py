"""The mesh, the rules, how the state is laid out, and batches in order, the next on its way."""

import dataclasses
import threading
import time
from contextlib import closing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mhe_jax.config import InputError, MeshConfig
from mhe_jax.tasks import TASKS
from mhe_jax.training import sharding
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import make_initializer


def mesh_of(config, data, fsdp, tensor, devices=None):
    return sharding.make_mesh(
        dataclasses.replace(config, mesh=MeshConfig(data, fsdp, tensor)), devices
    )


def initializer_of(config, mesh, ema=False):
    model = TASKS[config.task].model(config.model)
    init = TASKS[config.task].initializer(model, config.data.sequence_length)
    return make_initializer(init, make_optimizer(config), mesh, ema)


def test_mesh_has_auto_axes_of_the_right_size(tiny):
    mesh = mesh_of(tiny(), -1, 2, 2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_batch_that_does_not_divide(tiny):
    with pytest.raises(InputError, match="data.batch_size is 8"):
        mesh_of(tiny(**{"optimizer.accumulate_steps": 2}), 8, 1, 1)


def test_axis_that_does_not_divide_is_named(tiny):
    mesh = mesh_of(tiny(), 2, 2, 2)
    boxed = {
        "a": nn.LogicallyPartitioned(jax.ShapeDtypeStruct((4, 3), jnp.float32), ("embed", "heads"))
    }
    with pytest.raises(InputError, match="mesh.tensor=2 must divide 3, an axis of a$"):
        sharding.parameter_shardings(boxed, mesh)


@pytest.mark.covering(2)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("task", ["mlm", "translation"])
def test_state_is_split_as_the_rules_say(tiny, task, scan, optimizer):
    config = tiny(task, **{"model.scan_layers": scan, "optimizer.name": optimizer})
    _, abstract = initializer_of(config, mesh_of(config, 2, 2, 2), ema=True)
    layer = "layers" if scan else "layer_0"
    attention = abstract.params["encoder"][layer]["self_attention"]
    first = (None,) if scan else ()
    specs = {
        "query": attention["query"]["kernel"].sharding.spec,
        "out": attention["out"]["kernel"].sharding.spec,
        "token": abstract.params["embeddings"]["token"].sharding.spec,
        "embedding": attention["query_head_embedding"].sharding.spec,
    }
    assert specs == {
        "query": PartitionSpec(*first, "fsdp", None),
        "out": PartitionSpec(*first, "tensor", None, "fsdp"),
        "token": PartitionSpec("tensor", "fsdp"),
        "embedding": PartitionSpec(*first, "tensor", None),
    }
    assert jax.tree.map(lambda x: x.sharding, abstract.ema_params) == jax.tree.map(
        lambda x: x.sharding, abstract.params
    )
    if optimizer != "adafactor":
        moments = [
            leaf.sharding.spec
            for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.opt_state)
            if sharding.path_parts(path)[-2:] == ("embeddings", "token")
        ]
        assert moments == [PartitionSpec("tensor", "fsdp")] * 2


def test_initial_numbers_do_not_depend_on_the_mesh(tiny):
    config = tiny("lm")
    states = []
    for mesh in (mesh_of(config, 1, 1, 1, jax.devices()[:1]), mesh_of(config, 2, 2, 2)):
        initialize, abstract = initializer_of(config, mesh)
        state = initialize(jax.random.key(5))
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state, abstract))
        states.append(jax.device_get(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *states)


def test_global_batch_and_rows(tiny):
    mesh = mesh_of(tiny(), 2, 2, 2)
    rows = np.arange(16).reshape(8, 2)
    batch = sharding.global_batch({"tokens": rows}, mesh)
    np.testing.assert_array_equal(batch["tokens"], rows)
    assert batch["tokens"].sharding.spec == sharding.BATCH
    assert [sharding.round_up_rows(n, mesh) for n in (1, 4, 5)] == [4, 4, 8]


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_what_does_not_train_needs_no_batch_that_divides(tiny, task, capsys):
    config = tiny(task, **{"mesh.data": 64, "optimizer.accumulate_steps": 3})
    assert sharding.mesh_at_hand(config, "scoring").shape == {"data": 8, "fsdp": 1, "tensor": 1}
    assert "scoring with mesh.data=8" in capsys.readouterr().err


def waited(condition):
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_one_ahead_and_in_order():
    put = []

    def to_device(batch):
        put.append(batch)
        return batch * 10

    with closing(sharding.feed(range(5), to_device)) as batches:
        for i, batch in enumerate(batches):
            assert batch == 10 * i
            assert waited(lambda i=i: put == list(range(min(i + 2, 5))))


def test_an_error_comes_in_its_place():
    def to_device(batch):
        if batch == 2:
            raise ValueError("no room")
        return batch

    batches = sharding.feed(range(5), to_device)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="no room"):
        next(batches)


def test_the_thread_ends():
    before = set(threading.enumerate())
    with closing(sharding.feed(iter(range(100)), str)) as batches:
        assert next(batches) == "0"
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
    assert list(sharding.feed([], str)) == []
