"""Tiny models, their inputs and their parameters, by task.

Sizes differ from each other, so that a swapped axis cannot pass: B=2, S=7, T=5, H=4, D=3, M=12,
F=20, V=26. Parameters are drawn at random, biases and norms too: nothing is 0 or 1 by chance.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.attention import KINDS
from mhe_jax.config import AttentionConfig, ModelConfig
from mhe_jax.tasks import TASKS

NAMES = ("mlm", "lm", "translation")
# Compiling is most of the time of these tests. So unrolled layers run eagerly, each operation
# compiled once for all tests, and what is scanned is compiled with little optimization.
FAST_COMPILE = {"xla_backend_optimization_level": 0}

TOKENS = np.array([[3, 14, 5, 9, 2, 6, 25], [8, 7, 9, 4, 0, 0, 0]])
TARGETS = np.array([[2, 5, 6, 19, 11], [2, 16, 1, 0, 0]])
MASKED = np.array([[1, 4, 6], [0, 3, 3]])


@functools.cache
def program(task, config):
    """What the model of a task computes, compiled where layers are scanned."""
    apply = TASKS[task].model(config).apply
    return Tiny.jit(apply) if config.scan_layers else apply


@functools.cache
def drawn(task, config, seed):
    model = TASKS[task].model(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *Tiny.inputs(task))["params"]
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = 0.3 * rng.normal(size=leaf.shape).astype(np.float32)
        return jnp.asarray(value + (path[-1].key == "scale"))

    return jax.tree_util.tree_map_with_path(draw, shapes)


class Tiny:
    """What tests build models from."""

    tasks = NAMES
    kinds = tuple(KINDS)
    # Fields without which a kind cannot be made; `gta` takes no heads of width 3.
    fields: ClassVar = {
        "gqa": {"num_kv_heads": 2},
        "gta": {"num_kv_heads": 2, "qkv_features": 16},
    }

    @classmethod
    def config(cls, kind="mha", attention=None, **changes) -> ModelConfig:
        fields = cls.fields.get(kind, {})
        of_attention = AttentionConfig(kind=kind, num_heads=4, **fields | (attention or {}))
        base = ModelConfig(
            vocabulary_size=26,
            features=12,
            mlp_features=20,
            num_layers=2,
            max_length=9,
            attention=of_attention,
        )
        return dataclasses.replace(base, **changes)

    @staticmethod
    def inputs(task):
        first = jnp.asarray(TOKENS)
        return {
            "mlm": (first, jnp.asarray(MASKED)),
            "lm": (first,),
            "translation": (first, jnp.asarray(TARGETS)),
        }[task]

    @classmethod
    def params(cls, task, config, seed=0):
        """Random parameters of the model's shapes, in a tree of the caller's own."""
        return jax.tree.map(lambda leaf: leaf, drawn(task, config, seed))

    @staticmethod
    def jit(function):
        return jax.jit(function, compiler_options=FAST_COMPILE)

    @classmethod
    def maybe_jit(cls, function, config):
        """`function`, compiled where layers are scanned."""
        return cls.jit(function) if config.scan_layers else function

    @classmethod
    def logits(cls, task, config, params, inputs=None, **fields):
        inputs = cls.inputs(task) if inputs is None else inputs
        return program(task, config)({"params": params}, *map(jnp.asarray, inputs), **fields)


@pytest.fixture(scope="session")
def tiny():
    return Tiny
