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

    `step` counts finished updates; `key` is the `jax.random.key_data` of the run's key, from which
    step n draws its dropout by folding n in; `ema_params` is None without `optimizer.ema_decay`.
    The leaves are arrays, or their shapes or shardings.
    """

    step: Any
    params: Any
    opt_state: Any
    ema_params: Any
    key: Any

    @classmethod
    def create(
        cls, params: Any, optimizer: optax.GradientTransformation, key: jax.Array, ema: bool
    ) -> "TrainState":
        """Before the first step."""
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            ema_params=jax.tree.map(jnp.array, params) if ema else None,
            key=jax.random.key_data(key),
        )


def make_initializer(
    init_params: Callable[[jax.Array], Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    ema: bool,
) -> tuple[Callable[[jax.Array], TrainState], TrainState]:
    """A jitted `key -> TrainState` with a sharded result, and its abstract result with shardings.

    `init_params` gives parameters boxed with logical names; with `ema` there is their average too.
    The state is a function of the key alone, whatever the mesh. Parts of the optimizer's state that
    have a parameter's shape are sharded as it is; the others (counts, Adafactor's rows and columns)
    are small and whole.
    """

    def create(key: jax.Array) -> TrainState:
        params_key, run_key = jax.random.split(key)
        params = nn.unbox(init_params(params_key))
        return TrainState.create(params, optimizer, run_key, ema)

    key = jax.eval_shape(lambda: jax.random.key(0))
    with sharding.use_mesh(mesh):
        boxed = jax.eval_shape(init_params, key)
        abstract = jax.eval_shape(create, key)
    of_params = sharding.parameter_shardings(boxed, mesh)
    whole = sharding.replicated(mesh)
    of_optimizer = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, param, of_param: of_param if leaf.shape == param.shape else whole,
        abstract.opt_state,
        abstract.params,
        of_params,
        transform_non_params=lambda _: whole,
    )
    shardings = TrainState(
        step=whole,
        params=of_params,
        opt_state=of_optimizer,
        ema_params=of_params if ema else None,
        key=whole,
    )
    abstract = jax.tree.map(
        lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of),
        abstract,
        shardings,
    )
    create_sharded = jax.jit(create, out_shardings=shardings)

    def initialize(key: jax.Array) -> TrainState:
        with sharding.use_mesh(mesh):
            return create_sharded(key)

    return initialize, abstract


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
