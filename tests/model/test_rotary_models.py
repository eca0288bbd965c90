"""Models with rotary positions: what reads them, and rows of several texts."""

import jax
import numpy as np
import pytest
from test_packed import ROTARY

from mhe_jax.attention import Rotary
from mhe_jax.model.layers import attention_module
from mhe_jax.tasks import TASKS


def config_of(tiny, kind="mha", **changes):
    return tiny.config(kind, **ROTARY | changes)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_self_attention_is_rotated_as_the_config_says(tiny, role):
    fields = {"rotary_base": 50.0, "rotary_pairs": "interleaved", "rotary_scaling": 3.0}
    got = attention_module(config_of(tiny, **fields), role).rotary
    assert got == (None if role == "cross" else Rotary(50.0, "interleaved", 3.0))
    assert attention_module(tiny.config(), role).rotary is None


@pytest.mark.covering(1)
@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("task", ["mlm", "lm", "translation"])
def test_rotary_positions_are_those_of_attention(tiny, task, scan_layers):
    """No table of positions; another base changes the logits."""
    config = config_of(tiny, scan_layers=scan_layers)
    params = tiny.params(task, config)
    assert set(params["embeddings"]) == {"token"} | ({"norm"} & set(params["embeddings"]))
    other = config_of(tiny, scan_layers=scan_layers, rotary_base=50.0)
    logits = (tiny.logits(task, one, params) for one in (config, other))
    assert np.abs(np.subtract(*logits)).max() > 1e-4


def test_no_parameter_stays_without_a_gradient(tiny):
    """The key embeddings of self-attention too; of cross-attention, not rotated, they cancel."""
    config = config_of(tiny, "mhe_add")
    task = "translation"
    model, params = TASKS[task].model(config), tiny.params(task, config)

    def loss(params):
        return (model.apply({"params": params}, *tiny.inputs(task)) ** 2).mean()

    gradients = tiny.jit(jax.grad(loss))(params)
    size = max(np.abs(g).max() for g in jax.tree.leaves(gradients))
    for path, g in jax.tree_util.tree_leaves_with_path(gradients):
        names = [key.key for key in path]
        cancels = names[-1] == "key_head_embedding" and "cross_attention" in names
        assert (np.abs(g).max() > 1e-6 * size) != cancels, names
