"""Small models of ours with random parameters, none of which is 0 or 1 by its beginning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from random_parameters import random_parameters

from mhe_jax import tasks
from mhe_jax.config import AttentionConfig, Config, DataConfig, ModelConfig
from mhe_jax.config.fields import set_field

# Fields without which a kind cannot be made, and others of it.
KINDS = {
    "mha": {},
    "sha": {},
    "mqa": {},
    "gqa": {"num_kv_heads": 2},
    "skv": {},
    "el": {},
    "mhe_add": {},
    "mhe_mul": {},
    "mva": {"score_features": 3},
    "collaborative": {"score_features": 3},
}


def model_config(task, kind="mha", **fields):
    """A config of a model of width 16 with 4 heads of 4, and a vocabulary of 37 in 40 rows."""
    config = Config(
        task=task,
        model=ModelConfig(
            vocabulary_size=37,
            vocabulary_multiple=8,
            features=16,
            mlp_features=23,
            num_layers=2,
            max_length=13,
            attention=AttentionConfig(kind=kind, num_heads=4, **KINDS.get(kind, {})),
            norm_position="pre" if task == "lm" else "post",
            num_classes=3 if task == "classification" else None,
        ),
        data=DataConfig(train=("train.txt",), sequence_length=13),
    )
    for name, value in fields.items():
        config = set_field(config, f"model.{name.replace('__', '.')}", value)
    return config


def random_params(config):
    """Parameters that nothing trained."""
    task = tasks.of(config)
    init = task.initializer(task.model(config.model), config.data.sequence_length)
    return random_parameters(init)


def tokens_of(config, shape, seed=1, first=5):
    """Ids of ordinary tokens."""
    generator = np.random.default_rng(seed)
    return generator.integers(first, config.model.vocabulary_size, shape).astype(np.int32)


def apply(config, params, *args):
    """What the model of a config gives, as NumPy arrays."""
    return np.asarray(_compiled(config)({"params": jax.tree.map(jnp.asarray, params)}, *args))


@functools.lru_cache(4)
def _compiled(config):
    return jax.jit(tasks.of(config).model(config.model).apply)
