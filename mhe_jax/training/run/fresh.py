"""Runs that are made, not trained: by `convert`, and by `factorize` out of a trained one.

A factorized run has the config of the old one with these ranks, its tokenizer, and a checkpoint of
step 0: the best parameters of the old run, each matrix as the sum of Kronecker products that comes
closest to it, and a fresh optimizer. So the same command, with these ranks, resumes from there. A
rank above the full one counts as the full one, which changes nothing but rounding.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import chex
import jax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.config import Config, InputError, KroneckerConfig
from mhe_jax.config.fields import save_json
from mhe_jax.config.files import CONFIG, TOKENIZER, check_new, publish_directory
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.shapeshifter import factorize as parameters
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint.manager import Checkpoints
from mhe_jax.training.checkpoint.store import check_path
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.run.warm_start import read_run
from mhe_jax.training.state import abstract_params, initializer_of


def check_new_run(new: Path, source: Path) -> None:
    """Raises InputError, before anything is computed, unless a run can be made at `new`."""
    check_new(new, source)
    check_path(new)


def write_run(config: Config, params: Any, mesh: Mesh, key: str, pieces: bytes | None) -> None:
    """Makes the directory `config.workdir`, whole or not at all.

    It has the config; the tokenizer, of this `key` and with these `pieces`, if it has some; and a
    checkpoint of step 0, with `params` (as their average too) and a fresh optimizer.
    """
    model = tasks.of(config).model(config.model)
    initialize, abstract = initializer_of(config, model, make_optimizer(config), mesh)
    chex.assert_trees_all_equal_shapes(params, abstract.params)
    placed = jax.device_put(params, sharding.shardings_of(abstract.params))
    state = initialize(jax.random.key(config.train.seed)).replace(params=placed)
    if state.ema_params is not None:
        state = state.replace(ema_params=placed)
    with publish_directory(path_of(config.workdir)) as directory:
        with contextlib.closing(Checkpoints(directory)) as checkpoints:
            checkpoints.save(state, 0, {"tokenizer": key})
        if pieces is not None:
            (directory / TOKENIZER).write_bytes(pieces)
        save_json(config, directory / CONFIG)


def factorize(run: str | Path, new: str | Path, kronecker: KroneckerConfig) -> dict[str, Any]:
    """Makes the run `new` out of `run`.

    Returns:
      `errors`: ‖W - Σ A ⊗ B‖ / ‖W‖ (Frobenius) by the path of each matrix W; the numbers of `dense`
      and `factorized` parameters; the `step` of the run whose parameters these are.

    InputError where something of that is not there or not allowed; nothing has been written.
    """
    run, new = path_of(run), path_of(new)
    dense = config_of(run)
    check_new_run(new, run)
    if kronecker == KroneckerConfig(apply=kronecker.apply):
        raise InputError("no number of terms is given: takes --attention, --mlp, --embedding")
    if dense.model.kronecker != KroneckerConfig(apply=dense.model.kronecker.apply):
        raise InputError(f"{dense.workdir} is factorized already: takes a run with dense matrices")
    model = dataclasses.replace(dense.model, kronecker=kronecker)
    config = dataclasses.replace(dense, model=model, workdir=str(new))
    check(config, trains=False)
    mesh = sharding.mesh_at_hand(config, "factorizing")
    params, step, tokenizer = read_run(run, dense, mesh)

    found, errors = parameters.factorize(params, abstract_params(config, mesh))
    pieces = (run / TOKENIZER).read_bytes() if dense.model.has_pieces else None
    write_run(config, found, mesh, tokenizer.key, pieces)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, found)]
    return {"step": step, "dense": sizes[0], "factorized": sizes[1], "errors": errors}
