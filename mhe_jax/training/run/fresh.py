"""Runs that are made, not trained: by `convert`, and by `factorize` out of a trained one.

A factorized run has the config of the old one with these ranks, its tokenizer, and a checkpoint of
step 0: the best parameters of the old run, each matrix as the sum of Kronecker products that comes
closest to it, and a fresh optimizer. So the same command, with these ranks, resumes from there. A
rank above the full one counts as the full one, which changes nothing but rounding.
"""

import dataclasses
from pathlib import Path
from typing import Any

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
from mhe_jax.training.checkpoint import Checkpoints, check_path
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.run.warm_start import read_run
from mhe_jax.training.state import abstract_params, initializer_of


def check_new_run(new: Path, source: Path) -> None:
    """Raises InputError, before anything is computed, unless a run can be made at `new`."""
    check_new(new, source)
    check_path(new)


def write_run(config: Config, params: Any, mesh: Mesh, key: str, pieces: bytes | None) -> None:
    """Makes the directory `config.workdir`, whole or not at all.

    It has the config; the tokenizer; and a checkpoint of step 0, with `params` and a fresh
    optimizer. If the run keeps an average of the parameters, `params` is that too.

    Args:
      config: of the run.
      params: arrays of the shapes of its model.
      mesh: on which the state is made.
      key: of the tokenizer.
      pieces: its file; None where the model has none.

    Raises:
      InputError: the directory is there already, or cannot be written.
      ValueError: the parameters are not of the model.
    """
    model = tasks.of(config).model(config.model)
    initialize, abstract = initializer_of(config, model, make_optimizer(config), mesh)
    shapes = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (params, abstract.params)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{shapes[0]} are not the parameters of the model, {shapes[1]}")
    placed = jax.device_put(params, sharding.shardings_of(abstract.params))
    state = initialize(jax.random.key(config.train.seed)).replace(params=placed)
    if state.ema_params is not None:
        state = state.replace(ema_params=placed)
    with publish_directory(path_of(config.workdir)) as directory:
        checkpoints = Checkpoints(directory)
        try:
            checkpoints.save(state, 0, {"tokenizer": key})
        finally:
            checkpoints.close()
        if pieces is not None:
            (directory / TOKENIZER).write_bytes(pieces)
        save_json(config, directory / CONFIG)


def factorize(run: str | Path, new: str | Path, kronecker: KroneckerConfig) -> dict[str, Any]:
    """Makes the run `new` out of `run`.

    Returns:
      `errors`: ‖W - Σ A ⊗ B‖ / ‖W‖ (Frobenius) by the path of each matrix W; the numbers of `dense`
      and `factorized` parameters; the `step` of the run whose parameters these are.

    Raises:
      InputError: there is no such run, or its checkpoint cannot be read or is of another
        tokenizer; `new` is there already; no rank is given, or one that is not allowed. Nothing has
        been written.
    """
    run, new = path_of(run), path_of(new)
    dense = config_of(run)
    check_new_run(new, run)
    config = _factorized(dense, new, kronecker)
    mesh = sharding.mesh_at_hand(config, "factorizing")
    params, step, tokenizer = read_run(run, dense, mesh)

    found, errors = parameters.factorize(params, abstract_params(config, mesh))
    pieces = (run / TOKENIZER).read_bytes() if dense.model.has_pieces else None
    write_run(config, found, mesh, tokenizer.key, pieces)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, found)]
    return {"step": step, "dense": sizes[0], "factorized": sizes[1], "errors": errors}


def _factorized(dense: Config, new: Path, kronecker: KroneckerConfig) -> Config:
    if kronecker == KroneckerConfig(apply=kronecker.apply):
        raise InputError("no number of terms is given: takes --attention, --mlp, --embedding")
    if dense.model.kronecker != KroneckerConfig(apply=dense.model.kronecker.apply):
        raise InputError(f"{dense.workdir} is factorized already: takes a run with dense matrices")
    model = dataclasses.replace(dense.model, kronecker=kronecker)
    config = dataclasses.replace(dense, model=model, workdir=str(new))
    check(config, trains=False)
    return config
