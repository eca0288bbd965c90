"""One update, and one evaluation, under jit over the mesh.

Losses are sums and counts, divided once: so accumulation, padded rows and any spread over devices
give the numbers of the one big batch.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mhe_jax import tasks
from mhe_jax.config import Config
from mhe_jax.tasks.task import Batch, SumsFunction
from mhe_jax.training import sharding
from mhe_jax.training.optimizer import make_schedule
from mhe_jax.training.state import TrainState


def make_train_step(
    sums_function: SumsFunction,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    state_shardings: TrainState,
    *,
    schedule: Callable[[jax.Array], jax.Array] | None = None,
    accumulate_steps: int = 1,
    ema_decay: float | None = None,
    skip_nonfinite: bool = False,
    rules: sharding.Rules = sharding.RULES,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """`(state, batch) -> (state, metrics)`; the input state is donated.

    With A = `accumulate_steps` the batch is run in A parts, and the gradients of *sums* are added:

        g = Σ_a ∇ loss_sum_a / Σ_a count_a

    which is the gradient of the big batch, however unevenly the counts lie in the parts. Part a of
    step n draws its dropout from fold_in(fold_in(key, n), a). With `ema_decay` the average becomes
    d · ema + (1 - d) · params, d = min(ema_decay, (1 + n) / (10 + n)) after n updates before.

    Metrics: every sum of `sums_function`, `gradient_norm` (before clipping), `learning_rate` where
    there is a `schedule` (the optimizer's), and `finite`: whether loss, gradient and update are
    finite throughout. If they are not, the new state must not be kept; with `skip_nonfinite` it is
    the old one except for the step (the optimizer and its schedule do not count such a step).
    """
    A = accumulate_steps

    def loss(params, batch, key):
        sums = sums_function(params, batch, key)
        return sums["loss"], sums

    sums_and_gradients = jax.value_and_grad(loss, has_aux=True)

    def step(state: TrainState, batch: Batch):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        if A == 1:
            part_key = jax.random.fold_in(key, 0)
            (_, sums), gradients = sums_and_gradients(state.params, batch, part_key)
        else:
            # Every A-th row is in the same part, so that rows stay on their devices.
            parts = jax.tree.map(lambda x: x.reshape(-1, A, *x.shape[1:]).swapaxes(0, 1), batch)
            split = NamedSharding(mesh, PartitionSpec(None, *sharding.BATCH))
            parts = jax.lax.with_sharding_constraint(parts, split)

            def add(carry, numbered):
                a, part = numbered
                found = sums_and_gradients(state.params, part, jax.random.fold_in(key, a))
                return jax.tree.map(jnp.add, carry, found), None

            abstract = jax.eval_shape(
                sums_and_gradients, state.params, jax.tree.map(lambda x: x[0], parts), key
            )
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
            ((_, sums), gradients), _ = jax.lax.scan(add, zeros, (jnp.arange(A), parts))

        count = jnp.maximum(sums["count"], 1.0)
        gradients = jax.tree.map(lambda g: g / count, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        gradient_norm = optax.tree.norm(gradients)
        of_all = jnp.stack([sums["loss"], gradient_norm, optax.tree.norm(updates)])
        finite = jnp.isfinite(of_all).all()
        metrics = {**sums, "gradient_norm": gradient_norm, "finite": finite}
        updates_before = state.step
        if schedule is not None:
            # state.step also counts updates that were left out.
            used = optax.tree_utils.tree_get_all_with_path(state.opt_state, "ScaleByScheduleState")
            updates_before = used[0][1].count  # the same in all parts of an optimizer
            metrics["learning_rate"] = schedule(updates_before)
        ema = None
        if ema_decay is not None:
            # The smaller d of the first steps forgets the initial parameters.
            d = jnp.minimum(ema_decay, (1.0 + updates_before) / (10.0 + updates_before))
            ema = jax.tree.map(lambda e, p: d * e + (1 - d) * p, state.ema_params, params)
        new = TrainState(state.step + 1, params, opt_state, ema, state.key)
        if skip_nonfinite:
            kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
            new = kept.replace(step=new.step)
        return new, metrics

    return sharding.OnMesh(
        step,
        mesh,
        rules,
        in_shardings=(state_shardings, NamedSharding(mesh, sharding.BATCH)),
        out_shardings=(state_shardings, sharding.replicated(mesh)),
        donate_argnums=0,
    )


def train_step_of(
    config: Config,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    state_shardings: TrainState,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The train step of an experiment."""
    c = config.optimizer
    return make_train_step(
        tasks.of(config).sums(model, c.label_smoothing),
        optimizer,
        mesh,
        state_shardings,
        schedule=make_schedule(c, config.train.num_steps),
        accumulate_steps=c.accumulate_steps,
        ema_decay=c.ema_decay,
        skip_nonfinite=config.train.skip_nonfinite > 0,
        rules=sharding.RULES_BY_LENGTH[config.mesh.length],
    )


def make_eval_step(
    sums_function: SumsFunction, mesh: Mesh, param_shardings: Any, rules=sharding.RULES
) -> Callable[[Any, Batch], dict[str, jax.Array]]:
    """`(params, batch) -> sums`, without dropout."""
    return sharding.OnMesh(
        lambda params, batch: sums_function(params, batch, None),
        mesh,
        rules,
        in_shardings=(param_shardings, NamedSharding(mesh, sharding.BATCH)),
        out_shardings=sharding.replicated(mesh),
    )
