"""Attention parameters of real initialised models, against the counts of the paper (1.2, 1.5)."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mhe_jax.config import AttentionConfig, ModelConfig
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS


def shape(kind, heads, **fields):
    return ModelConfig(
        vocabulary_size=7,
        max_length=4,
        attention=AttentionConfig(kind=kind, num_heads=heads),
        scan_layers=True,
        **fields,
    )


def counts(task, config):
    tokens = jnp.ones((1, 2), jnp.int32)
    inputs = (tokens,) if task == "lm" else (tokens, jnp.zeros((1, 1), jnp.int32))
    model = TASKS[task].model(config)
    return count_parameters(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])


@pytest.mark.parametrize("kind", ["mha", "mhe_mul", "sha"])
def test_encoder(kind):
    """12 layers of M = 768 with 12 heads, as paper."""
    config = shape(kind, 12, features=768, mlp_features=3072, num_layers=12)
    wanted = {"mha": 28_311_552, "mhe_mul": 8_875_008, "sha": 8_847_360}
    assert counts("mlm", config)["attention"] == wanted[kind]


def test_total_of_every_part():
    M, F, V, L = 64, 96, 7, 3
    config = shape("mha", 8, features=M, mlp_features=F, num_layers=L)
    norm, mlp = 2 * M, 2 * M * F + F + M
    layer = 4 * M * M + mlp + 2 * norm
    lm = (V + 4) * M + L * layer + norm
    assert counts("lm", config) == {"total": lm, "attention": L * 4 * M * M}
    head = M * M + M + norm + V
    assert counts("mlm", config)["total"] == lm + head
    decoder = L * (layer + 4 * M * M + norm) + norm
    assert counts("translation", config)["total"] == lm + decoder


def test_total_of_a_model_of_today():
    """No position table, no bias, one number a feature in a norm, three matrices in an MLP."""
    M, F, V, L = 64, 96, 7, 3
    of_model = {"mlp": "gated", "mlp_bias": False, "norm": "rms", "positions": "rotary"}
    config = shape("mha", 8, features=M, mlp_features=F, num_layers=L, **of_model)
    total = V * M + L * (4 * M * M + 3 * M * F + 2 * M) + M
    assert counts("lm", config) == {"total": total, "attention": L * 4 * M * M}
    untied = dataclasses.replace(config, tie_embeddings=False)
    assert counts("lm", untied)["total"] == total + V * M
