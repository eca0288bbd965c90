"""Optimizers, learning-rate schedules, and which parameters decay or never move."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from mhe_jax.config import Config, OptimizerConfig, Role
from mhe_jax.model.layers import attention_module
from mhe_jax.model.stack import role_of
from mhe_jax.training.sharding import path_parts

HEAD_EMBEDDING = "_head_embedding"
# Ends of the names of parameters without weight decay: biases, scales, and the embeddings of heads
# and of groups of heads.
NO_DECAY = ("bias", "scale", HEAD_EMBEDDING, "_group_embedding")


def make_schedule(config: OptimizerConfig, num_steps: int) -> Callable[[Any], jax.Array]:
    """The learning rate of update n = 1 .. N, as a function of the n - 1 updates before it.

    With W warmup steps, n <= W:   peak · n / W                      peak at n = W
    after them, `constant`:        peak
                `inverse_sqrt`:    peak · √(max(W, 1) / n)           Vaswani et al. 2017, 5.3
                `linear`:          peak · (N - n) / (N - W)          0 at the last step
                `cosine`:          peak · (1 + cos(π (n - W) / (N - W))) / 2

    >>> config = OptimizerConfig(schedule="linear", learning_rate=1.0, warmup_steps=2)
    >>> [round(float(make_schedule(config, 6)(n)), 2) for n in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    peak, W, N = config.learning_rate, config.warmup_steps, num_steps
    decay = {
        "constant": lambda n, _: jnp.ones_like(n),
        "inverse_sqrt": lambda n, _: jnp.sqrt(max(W, 1) / n),
        "linear": lambda _, done: 1 - done,
        "cosine": lambda _, done: (1 + jnp.cos(jnp.pi * done)) / 2,
    }[config.schedule]

    def schedule(count) -> jax.Array:
        n = jnp.asarray(count, jnp.float32) + 1
        done = jnp.clip((n - W) / max(N - W, 1), 0, 1)
        return peak * jnp.where(n <= W, n / max(W, 1), decay(n, done))

    return schedule


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Gradients to updates: clip by the global norm, then AdamW, Muon or Adafactor.

    Muon makes the momentum of each kernel of the layers orthogonal, as a matrix of its inputs and
    outputs (Jordan 2024; scaled as in Liu et al. 2025, arXiv 2502.16982, 2.2). AdamW moves all
    else: embeddings, norms, biases, embeddings of heads, and the matrix of the logits.

    Adafactor's learning rate is relative to the root mean square of each parameter array, as in
    Shazeer & Stern 2018; a scanned stack is one array there, so steps differ from unrolled ones.

    No weight decay on biases, scales and embeddings of heads and groups of heads; no update for the
    key embeddings of `mhe_add`, which cannot matter (their gradient is left out of the norm, too).
    Updates of head embeddings are `head_embedding_rate` times as large.
    """
    c = config.optimizer
    schedule = make_schedule(c, config.train.num_steps)
    adamw = functools.partial(
        optax.adamw,
        b1=c.beta1,
        b2=c.beta2,
        eps=c.epsilon,
        weight_decay=c.weight_decay,
        mask=decayed,
    )
    if c.name == "adamw":
        update = adamw(schedule)
    elif c.name == "muon":
        rate = c.learning_rate if c.adam_rate is None else c.adam_rate
        others = make_schedule(dataclasses.replace(c, learning_rate=rate), config.train.num_steps)
        # The root mean square of its updates is AdamW's: both have one scale of learning rates.
        muon = optax.contrib.muon(
            schedule,
            weight_decay=c.weight_decay,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=0.2,
        )
        update = optax.partition({"muon": muon, "adamw": adamw(others)}, parts_of_muon)
    else:
        update = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
            optax.add_decayed_weights(c.weight_decay, mask=decayed),
            optax.scale_by_learning_rate(schedule),
        )
    if c.head_embedding_rate != 1:  # a state of its own, which a run cannot begin or end
        heads = functools.partial(_by_name, test=lambda parts: parts[-1].endswith(HEAD_EMBEDDING))
        update = optax.chain(update, optax.masked(optax.scale(c.head_embedding_rate), heads))
    clip = optax.identity() if c.clip_norm is None else optax.clip_by_global_norm(c.clip_norm)
    return optax.chain(optax.masked(optax.set_to_zero(), lambda p: frozen(p, config)), clip, update)


def matrices(params: Any) -> Any:
    """The axes of inputs and of outputs of each kernel; scanned layers have one more, of layers."""

    def axes(path, leaf):
        parts = path_parts(path)
        first = int("layers" in parts)
        # [H, D, M] makes the output of attention of two axes; all others have one of inputs.
        last = first + 1 + (parts[-2] == "out" and leaf.ndim == first + 3)
        inputs, outputs = tuple(range(first, last)), tuple(range(last, leaf.ndim))
        return optax.contrib.MuonDimensionNumbers(inputs, outputs)

    return jax.tree_util.tree_map_with_path(axes, params)


def parts_of_muon(params: Any) -> Any:
    """'muon' for the kernels of the layers, and 'adamw' for all else."""

    def part(parts: tuple[str, ...]) -> str:
        in_layer = any(name == "layers" or name.startswith("layer_") for name in parts)
        return "muon" if in_layer and parts[-1] == "kernel" else "adamw"

    return _by_name(params, part)


def decayed(params: Any) -> Any:
    """True where weight decay applies."""
    return _by_name(params, lambda parts: not parts[-1].endswith(NO_DECAY))


def frozen(params: Any, config: Config) -> Any:
    """True for parameters without an update: what their attention kind calls `untrained`."""
    untrained = {role: attention_module(config.model, role).untrained() for role in get_args(Role)}
    return _by_name(params, lambda parts: parts[-1] in untrained[role_of(parts)])


def _by_name(params: Any, test: Callable[[tuple[str, ...]], Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: test(path_parts(path)), params)
