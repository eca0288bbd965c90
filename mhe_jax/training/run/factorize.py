"""A trained run, its matrices factorized: a new run, to be evaluated or trained further.

The new run has the config of the old one with these ranks, its tokenizer, and a checkpoint of step
0: the best parameters of the old run, each matrix as the sum of Kronecker products that comes
closest to it, and a fresh optimizer. So the same command, with these ranks, goes on from there. A
rank above the full one counts as the full one, which changes nothing but rounding.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax

from mhe_jax import tasks
from mhe_jax.config import Config, InputError, KroneckerConfig
from mhe_jax.config.fields import save_json
from mhe_jax.config.files import CONFIG, TOKENIZER
from mhe_jax.config.loading import config_of
from mhe_jax.config.rules import check
from mhe_jax.config.rules.trust import is_own, remember
from mhe_jax.shapeshifter import factorize as parameters
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.run.warm_start import read_run
from mhe_jax.training.state import initializer_of


def factorize(run: str | Path, new: str | Path, kronecker: KroneckerConfig) -> dict[str, Any]:
    """Makes the run `new` out of `run`; see above.

    Returns:
      `errors`: ‖W - Σ A ⊗ B‖ / ‖W‖ (Frobenius) by the path of each matrix W; the numbers of `dense`
      and `factorized` parameters; the `step` of the run whose parameters these are.

    Raises:
      InputError: there is no such run, or its checkpoint cannot be read or is of another
        tokenizer; `new` is there already; no rank is given, or one that is not allowed. Nothing has
        been written.
    """
    run, new = Path(run), Path(new)
    dense = config_of(run)
    config = _factorized(dense, new, kronecker)
    mesh = sharding.mesh_at_hand(config, "factorizing")
    params, step, tokenizer = read_run(run, dense, mesh)

    model = tasks.of(config).model(config.model)
    initialize, abstract = initializer_of(config, model, make_optimizer(config), mesh)
    found, errors = parameters.factorize(params, abstract.params)
    shardings = sharding.shardings_of(abstract.params)
    state = initialize(jax.random.key(config.train.seed))
    state = state.replace(params=jax.device_put(found, shardings))
    if state.ema_params is not None:
        state = state.replace(ema_params=jax.device_put(found, shardings))

    checkpoints = Checkpoints(new)
    try:
        checkpoints.save(state, 0, {"tokenizer": tokenizer.key})
        checkpoints.wait()
    finally:
        checkpoints.close()
    if dense.model.has_pieces:
        shutil.copyfile(run / TOKENIZER, new / TOKENIZER)
    save_json(config, new / CONFIG)
    if is_own(run):
        remember(new)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, found)]
    return {"step": step, "dense": sizes[0], "factorized": sizes[1], "errors": errors}


def _factorized(dense: Config, new: Path, kronecker: KroneckerConfig) -> Config:
    if kronecker == KroneckerConfig(apply=kronecker.apply):
        raise InputError("no rank is given: takes --attention, --mlp or --embedding, or several")
    if dense.model.kronecker != KroneckerConfig(apply=dense.model.kronecker.apply):
        raise InputError(f"{dense.workdir} is factorized already: takes a run with dense matrices")
    if new.exists() and any(new.iterdir()):
        raise InputError(f"{new} is there already: takes a new directory")
    model = dataclasses.replace(dense.model, kronecker=kronecker)
    config = dataclasses.replace(dense, model=model, workdir=str(new))
    check(config, trains=False)
    return config
