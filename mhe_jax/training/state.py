"""The train state, and its shapes and shardings before it exists."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.config import Config
from mhe_jax.training import sharding


class TrainState(flax.struct.PyTreeNode):
    """All that a step changes, and all that resuming needs beside the config.

    `step` counts finished updates; `key` is the `jax.random.key_data` of the run's key;
    `ema_params` is None without `optimizer.ema_decay`. Leaves are arrays, shapes or shardings.
    """

    step: Any
    params: Any
    opt_state: Any
    ema_params: Any
    key: Any

    @classmethod
    def create(cls, params: Any, optimizer, key: jax.Array, ema: bool) -> "TrainState":
        """Before the first step."""
        average = jax.tree.map(jnp.array, params) if ema else None
        step, key = jnp.zeros((), jnp.int32), jax.random.key_data(key)
        return cls(step, params, optimizer.init(params), average, key)


def make_initializer(
    init_params: Callable[[jax.Array], Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    ema: bool,
) -> tuple[Callable[[jax.Array], TrainState], TrainState]:
    """A jitted `key -> TrainState` with a sharded result, and its abstract result with shardings.

    `init_params` gives parameters boxed with logical names. Of the optimizer's state, what has a
    parameter's shape is sharded as it is; the rest (counts, Adafactor's rows) is small and whole.
    """

    def create(key: jax.Array) -> TrainState:
        params_key, run_key = jax.random.split(key)
        params = nn.unbox(init_params(params_key))
        return TrainState.create(params, optimizer, run_key, ema)

    key = jax.eval_shape(lambda: jax.random.key(0))
    with sharding.use_mesh(mesh):
        boxed = jax.eval_shape(init_params, key)
        abstract = jax.eval_shape(create, key)
    of_params, whole = sharding.parameter_shardings(boxed, mesh), sharding.replicated(mesh)
    # Where a part of the optimizer leaves a parameter to another part.
    left_out = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731

    def of_part(leaf, param, of_param):
        return leaf if left_out(leaf) else of_param if leaf.shape == param.shape else whole

    of_optimizer = optax.tree_utils.tree_map_params(
        optimizer,
        of_part,
        abstract.opt_state,
        abstract.params,
        of_params,
        transform_non_params=lambda _: whole,
        is_leaf=left_out,
    )
    of_average = of_params if ema else None
    shardings = TrainState(whole, of_params, of_optimizer, of_average, whole)
    abstract = jax.tree.map(lambda leaf, of: leaf.update(sharding=of), abstract, shardings)
    return sharding.OnMesh(create, mesh, out_shardings=shardings), abstract


def initializer_of(
    config: Config, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[Callable[[jax.Array], TrainState], TrainState]:
    """`make_initializer` of an experiment."""
    init_params = tasks.of(config).initializer(model, config.data.sequence_length)
    return make_initializer(init_params, optimizer, mesh, config.optimizer.ema_decay is not None)


def abstract_params(config: Config, mesh: Mesh) -> Any:
    """Shapes of a run's parameters, with the shardings they have on `mesh`."""
    model = tasks.of(config).model(config.model)
    return initializer_of(config, model, optax.identity(), mesh)[1].params
