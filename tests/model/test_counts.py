"""Attention parameters of real initialised models, against the counts of the paper (1.2, 1.5)."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mhe_jax.config import AttentionConfig, ModelConfig
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS

# Xue & Aletras 2023: 12 layers, M=768, H=12; what is printed, in millions. MHA's last digit is
# the paper's: 28,311,552 rounds to 28.31.
ENCODER = {
    "sha": (8_847_360, "8.85"),
    "mhe_add": (8_875_008, "8.88"),
    "mhe_mul": (8_875_008, "8.88"),
    "el": (14_155_776, "14.16"),
    "mqa": (15_335_424, "15.34"),
    "skv": (21_233_664, "21.23"),
    "mha": (28_311_552, "28.32"),
}
# Layers of each side, M, H; parameters of MHA and of MHE-Mul.
TRANSLATION = [
    (6, 512, 8, 18_874_368, 6_515_712),
    (6, 512, 16, 18_874_368, 5_630_976),
    (6, 512, 4, 18_874_368, 8_285_184),
    (4, 512, 8, 12_582_912, 4_343_808),
    (8, 512, 8, 25_165_824, 8_687_616),
    (6, 768, 12, 42_467_328, 13_312_512),
    (6, 1024, 16, 75_497_472, 22_468_608),
]


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


@pytest.mark.parametrize("kind", ENCODER)
def test_encoder(kind):
    exact, printed = ENCODER[kind]
    config = shape(kind, 12, features=768, mlp_features=3072, num_layers=12)
    got = counts("mlm", config)["attention"]
    assert got == exact
    if kind != "mha":
        assert abs(got / 1e6 - float(printed)) <= 0.005
    else:
        assert f"{got / 1e6:.2f}" == "28.31" != printed


@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
@pytest.mark.parametrize("cell", TRANSLATION, ids=str)
def test_translation(cell, kind):
    layers, features, heads, mha, mhe_mul = cell
    config = shape(kind, heads, features=features, mlp_features=4 * features, num_layers=layers)
    assert counts("translation", config)["attention"] == {"mha": mha, "mhe_mul": mhe_mul}[kind]


def test_unrolled_layers_count_the_same():
    config = shape("mhe_mul", 8, features=64, mlp_features=96, num_layers=3)
    unrolled = dataclasses.replace(config, scan_layers=False)
    for task in ("mlm", "lm", "translation"):
        assert counts(task, config) == counts(task, unrolled)


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
