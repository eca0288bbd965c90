"""Runs out of other runs: `train.init_from`, `factorize`, `convert`.

With `train.init_from`, the best parameters of a run of the same task are taken, and its tokenizer.
An encoder takes what is below `embeddings` and `encoder` of any other encoder; so does a task of
labels from a run with other labels or another number of classes or spans. The rest is new.

A new run has the config of the old one with its changes, its tokenizer, and a checkpoint of step 0:
a fresh optimizer, and the best parameters of the old run.
"""

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.config import Config, InputError, KroneckerConfig
from mhe_jax.config.fields import leaves, save_json, to_dict
from mhe_jax.config.files import CONFIG, TOKENIZER, check_new, publish
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.data import AnyTokenizer, load_tokenizer
from mhe_jax.model.stack import stack_layers, unroll_layers
from mhe_jax.shapeshifter import factorize as parameters
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint import Checkpoints, check_path, restore_params
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import TrainState, abstract_params, initializer_of

ENCODER = ("embeddings", "encoder")
# Fields of the model that may differ: the parameters that are taken mean the same.
MAY_DIFFER = re.compile(
    r"(attention\.|attention_by_role\.\w+\.)?dropout_rate|max_length"
    r"|attention(_by_role\.\w+)?\.(form|engine)|kronecker\.apply|remat|scan_layers|dtype"
)
# Also fields that an encoder does not have, or that belong to its head.
NOT_OF_ENCODERS = re.compile(
    r"num_(classes|spans|decoder_layers)|pooling|attention_by_role\.(decoder|cross)\..*"
)


def check_init_from(config: Config) -> None:
    """Raises InputError unless the run of `train.init_from` fits; only its config is read."""
    run = config.train.init_from
    if run is None:
        return
    given, encodes = config_of(run, "train.init_from"), config.facts.is_encoder
    if given.task != config.task and not (encodes and given.facts.is_encoder):
        takes = "an encoder, such as of mlm" if encodes else f"task {config.task}"
        raise InputError(
            f"train.init_from is {run!r}: a run of task {given.task}: takes a run of {takes}"
        )
    theirs, ours = leaves(to_dict(given)["model"]), leaves(to_dict(config)["model"])
    for name, value in ours.items():
        may_differ = MAY_DIFFER.fullmatch(name) or (encodes and NOT_OF_ENCODERS.fullmatch(name))
        if theirs[name] != value and not may_differ:
            raise InputError(
                f"model.{name} is {value!r}: must be {theirs[name]!r}, as in train.init_from={run}"
            )


def start_from(run: str, config: Config, state: TrainState, mesh: Mesh) -> TrainState:
    """`state` with the parameters of `run` that the module names, layers as `config` has them."""
    given = config_of(run, "train.init_from")
    found, _, _ = read_run(run, given, mesh)
    if given.model.scan_layers != config.model.scan_layers:
        found = (stack_layers if config.model.scan_layers else unroll_layers)(found)
    ours, theirs = (
        (c.task, c.model.num_classes, c.model.num_spans, c.data.labels) for c in (config, given)
    )
    taken = found if ours == theirs else {name: found[name] for name in ENCODER}
    params = {**state.params, **taken}
    embeddings: Any = params["embeddings"]
    if "position" in embeddings:
        # Of learned positions the rows that both have are taken, and the others drawn.
        own, drawn = embeddings["position"], state.params["embeddings"]["position"]
        rows = jnp.concatenate([own[: len(drawn)], drawn[len(own) :]])
        params["embeddings"] = {**embeddings, "position": rows}
    placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, state.params)
    # Steps donate their inputs: the average needs arrays of its own.
    ema = None if state.ema_params is None else jax.tree.map(jnp.copy, placed)
    return state.replace(params=placed, ema_params=ema)


def read_run(run: str | Path, config: Config, mesh: Mesh) -> tuple[Any, int, AnyTokenizer]:
    """Parameters of a run's best checkpoint, its step, and the tokenizer it must be of."""
    tokenizer = load_tokenizer(config, path_of(run) / TOKENIZER)
    found, steps = restore_params(run, "best", abstract_params(config, mesh), tokenizer=tokenizer)
    return found, max(steps, default=0), tokenizer


def check_new_run(new: Path, source: Path) -> None:
    """Raises InputError, before anything is computed, unless a run can be made at `new`."""
    check_new(new, source)
    check_path(new)


def write_run(config: Config, params: Any, mesh: Mesh, key: str, pieces: bytes | None) -> None:
    """Makes the directory `config.workdir`, whole or not at all: a run that has taken no step."""
    model = tasks.of(config).model(config.model)
    initialize, abstract = initializer_of(config, model, make_optimizer(config), mesh)
    chex.assert_trees_all_equal_shapes(params, abstract.params)
    placed = jax.device_put(params, sharding.shardings_of(abstract.params))
    state = initialize(jax.random.key(config.train.seed)).replace(params=placed)
    if state.ema_params is not None:
        state = state.replace(ema_params=placed)
    with publish(path_of(config.workdir), is_directory=True) as directory:
        with contextlib.closing(Checkpoints(directory)) as checkpoints:
            checkpoints.save(state, 0, {"tokenizer": key})
            checkpoints.wait()
        if pieces is not None:
            (directory / TOKENIZER).write_bytes(pieces)
        save_json(config, directory / CONFIG)


def factorize(run: str | Path, new: str | Path, kronecker: KroneckerConfig) -> dict[str, Any]:
    """Makes the run `new` out of `run`.

    Returns:
      `errors`: ‖W - Σ A ⊗ B‖ / ‖W‖ (Frobenius) by the path of each matrix W; the numbers of `dense`
      and `factorized` parameters; the `step` of the run whose parameters these are.
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
