"""A run with given parameters that has not trained yet, as `factorize` and `convert` leave it."""

from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.config import Config
from mhe_jax.config.fields import save_json
from mhe_jax.config.files import CONFIG, TOKENIZER, check_new, publish_directory
from mhe_jax.config.places import path_of
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint import Checkpoints, check_path
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import initializer_of


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
            checkpoints.wait()
        finally:
            checkpoints.close()
        if pieces is not None:
            (directory / TOKENIZER).write_bytes(pieces)
        save_json(config, directory / CONFIG)
