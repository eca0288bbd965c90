"""A trained run, its matrices factorized: a new run, to be evaluated or trained further.

The new run has the config of the old one with these ranks, its tokenizer, and a checkpoint of step
0: the best parameters of the old run, each matrix as the sum of Kronecker products that comes
closest to it, and a fresh optimizer. So the same command, with these ranks, resumes from there. A
rank above the full one counts as the full one, which changes nothing but rounding.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from mhe_jax.config import Config, InputError, KroneckerConfig
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.shapeshifter import factorize as parameters
from mhe_jax.training import sharding
from mhe_jax.training.run.fresh import check_new_run, write_run
from mhe_jax.training.run.warm_start import read_run
from mhe_jax.training.state import abstract_params


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
