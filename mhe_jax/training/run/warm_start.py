"""A run that starts from another one: `train.init_from`.

From a run of the same task all parameters are taken. An encoder starts from any other encoder, of
which it takes what is below `embeddings` and `encoder`; so does a task of labels from a run with
other labels or another number of classes or spans. The parameters are those of the best checkpoint
(the last one, if there was no validation split), and the tokenizer is taken too. The rest is new:
optimizer, step, the head that is not taken, and rows of learned positions beyond the other run's
`max_length`; if that is longer, only the rows that fit are taken.
"""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import leaves, to_dict
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.data import AnyTokenizer, load_tokenizer
from mhe_jax.model.stack import stack_layers, unroll_layers
from mhe_jax.training.checkpoint.reading import restore_params
from mhe_jax.training.state import TrainState, abstract_params

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
    given = _config_of(run, config)
    theirs, ours = leaves(to_dict(given)["model"]), leaves(to_dict(config)["model"])
    for name, value in ours.items():
        may_differ = MAY_DIFFER.fullmatch(name) or (
            config.facts.is_encoder and NOT_OF_ENCODERS.fullmatch(name)
        )
        if theirs[name] != value and not may_differ:
            raise InputError(
                f"model.{name} is {value!r}: must be {theirs[name]!r}, as in train.init_from={run}"
            )


def _config_of(run: str, config: Config) -> Config:
    """The config of a run from which `config` can start."""
    given = config_of(run, "train.init_from")
    encoders = config.facts.is_encoder and given.facts.is_encoder
    if given.task != config.task and not encoders:
        takes = "an encoder, such as of mlm" if config.facts.is_encoder else f"task {config.task}"
        raise InputError(
            f"train.init_from is {run!r}: a run of task {given.task}: takes a run of {takes}"
        )
    return given


def read_start(config: Config, mesh: Mesh) -> dict[str, Any]:
    """The parameters that are taken from another run, by name, with layers as `config` has them."""
    run = str(config.train.init_from)
    given = _config_of(run, config)
    found, _, _ = read_run(run, given, mesh)
    if given.model.scan_layers != config.model.scan_layers:
        found = (stack_layers if config.model.scan_layers else unroll_layers)(found)
    ours, theirs = (
        (c.task, c.model.num_classes, c.model.num_spans, c.data.labels) for c in (config, given)
    )
    return found if ours == theirs else {name: found[name] for name in ENCODER}


def read_run(run: str | Path, config: Config, mesh: Mesh) -> tuple[Any, int, AnyTokenizer]:
    """Parameters of a run's best checkpoint, its step, and the tokenizer.

    Of a run without a validation split, or that has not trained yet, as `factorize` and `convert`
    leave it, the last. InputError if there is none that can be read, or of another tokenizer.
    """
    which = "best or last" if config.data.validation else "last"
    tokenizer = load_tokenizer(config, path_of(run) / TOKENIZER)
    found, steps = restore_params(run, which, abstract_params(config, mesh), tokenizer=tokenizer)
    return found, max(steps, default=0), tokenizer


def start_from(taken: dict[str, Any], state: TrainState) -> TrainState:
    """`state` with the parameters of another run, as `read_start` gives them."""
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
