"""The formula of the log's MFU against the operations that the compiler counts."""

import jax
import pytest

from mhe_jax import tasks
from mhe_jax.analysis.ahead import abstract_batch
from mhe_jax.config import KroneckerConfig
from mhe_jax.config.fields import set_field
from mhe_jax.tasks import TASKS
from mhe_jax.training import sharding

ROWS, T, M, V = 8, 32, 128, 1000
NAMES = ["mlm", "lm", "translation", "classification"]


def config_of(tiny, task):
    fields = {
        "model.features": M,
        "model.mlp_features": 4 * M,
        "model.vocabulary_size": V,
        "model.num_layers": 2,
        "model.max_length": T,
        "model.attention.kind": "mha",
        "data.sequence_length": T,
        "data.length_buckets": (),
        "data.batch_size": ROWS,
        "data.tokens_per_batch": 2 * ROWS * T,
    }
    if task == "classification":
        fields["model.num_classes"] = 2
    config = tiny("mlm")
    for name, value in {"task": task, **fields}.items():
        config = set_field(config, name, value)
    return config


@pytest.mark.parametrize("task", NAMES)
def test_formula_counts_what_the_compiler_counts(tiny, task):
    check_counts(config_of(tiny, task), task)


def test_formula_counts_a_gate(tiny):
    """RMSNorm, a gated MLP, and as many operations of it as the compiler counts."""
    config = config_of(tiny, "lm")
    for name, value in {"mlp": "gated", "norm": "rms", "activation": "silu"}.items():
        config = set_field(config, f"model.{name}", value)
    check_counts(config, "lm")


def check_counts(config, task):
    model = TASKS[task].model(config.model)
    params = TASKS[task].initializer(model, T)(jax.random.key(0))
    sums = TASKS[task].sums(model)
    mesh = sharding.make_mesh(config, jax.devices()[:1])
    shapes = abstract_batch(config, mesh)

    def loss(params, batch):
        return sums(params, batch, jax.random.key(0))["loss"]

    counted = jax.jit(jax.grad(loss)).lower(params, shapes).cost_analysis()["flops"]
    # Softmax, normalization and the like are not in the formula.
    assert tasks.of(config).step_flops(config, ROWS) == pytest.approx(counted, rel=0.1)


def test_formula_by_hand(tiny):
    """Half of the keys where attention is causal, and a decoder of another depth."""
    F, L, decoder_layers = 4 * M, 2, 3
    config = config_of(tiny, "translation")
    config = set_field(config, "model.num_decoder_layers", decoder_layers)
    projections, mlp, logits = 2 * 4 * M * M, 4 * M * F, 2 * M * V
    full, half = projections + 4 * T * M, projections + 4 * (T // 2) * M
    encoder, decoder = L * (full + mlp), decoder_layers * (half + full + mlp)
    assert tasks.of(config).step_flops(config, ROWS) == 3 * ROWS * T * (encoder + decoder + logits)
    config = config_of(tiny, "lm")
    assert tasks.of(config).step_flops(config, ROWS) == 3 * ROWS * T * (L * (half + mlp) + logits)


def test_kronecker_products_count_as_the_matrices_they_stand_for(tiny):
    config = config_of(tiny, "lm")
    small = set_field(config, "model.kronecker.mlp", 4)
    assert small.model.kronecker == KroneckerConfig(mlp=4)
    assert tasks.of(small).step_flops(small, ROWS) == tasks.of(config).step_flops(config, ROWS)
