"""A run that starts from the encoder of another one.

What is taken are the parameters below `embeddings` and `encoder` of its best checkpoint (the last
one, where it had no validation split) and its tokenizer; the head is new, and so are optimizer and
step.
"""

import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mhe_jax.config import Config, InputError
from mhe_jax.config.fields import leaves, to_dict
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.loading import config_of
from mhe_jax.data import AnyTokenizer, load_tokenizer
from mhe_jax.training.checkpoint import restore_params
from mhe_jax.training.state import TrainState, abstract_params

TAKEN = ("embeddings", "encoder")
# Fields of the model under which the encoder's parameters mean the same.
MAY_DIFFER = re.compile(
    r"(attention\.|attention_by_role\.\w+\.)?dropout_rate|num_(classes|spans|decoder_layers)|pooling"
    r"|attention(_by_role\.\w+)?\.(form|engine)|attention_by_role\.(decoder|cross)\..*"
    r"|kronecker\.apply|remat|dtype"
)


def check_init_from(config: Config) -> None:
    """Raises InputError unless the encoder of `train.init_from` fits, naming what differs.

    Nothing is read but the config of that run.
    """
    if config.train.init_from is None:
        return
    given = _encoder_config(config.train.init_from)
    theirs, ours = leaves(to_dict(given)["model"]), leaves(to_dict(config)["model"])
    for name, value in ours.items():
        if theirs[name] != value and not MAY_DIFFER.fullmatch(name):
            raise InputError(
                f"model.{name} is {value!r}: train.init_from={config.train.init_from} has "
                f"{theirs[name]!r}, and must fit"
            )


def _encoder_config(run: str) -> Config:
    config = config_of(run, "train.init_from")
    if not config.facts.is_encoder:
        raise InputError(
            f"train.init_from is {run!r}: a run of task "
            f"{config.task}: takes one of an encoder, as of mlm or shuffle_random"
        )
    return config


def read_encoder(run: str, mesh: Mesh) -> dict[str, Any]:
    """The parameters that are taken from another run.

    Raises:
      InputError: that run has no checkpoint that can be read, or another tokenizer than it.
    """
    found, _, _ = read_run(run, _encoder_config(run), mesh)
    return {name: found[name] for name in TAKEN}


def read_run(run: str | Path, config: Config, mesh: Mesh) -> tuple[Any, int, AnyTokenizer]:
    """Parameters of a run's best checkpoint (the last, without validation), its step, tokenizer.

    Raises:
      InputError: as `read_encoder`.
    """
    which = "best" if config.data.validation else "last"
    tokenizer = load_tokenizer(config, Path(run) / TOKENIZER)
    found, steps = restore_params(run, which, abstract_params(config, mesh), tokenizer=tokenizer)
    return found, max(steps, default=0), tokenizer


def start_from(taken: dict[str, Any], state: TrainState) -> TrainState:
    """`state` with the encoder of another run, as `read_encoder` gives it."""
    params = {**state.params, **taken}
    # Steps give up what they are given: the average needs arrays of its own.
    ema = (
        None
        if state.ema_params is None
        else {**state.ema_params, **jax.tree.map(jax.numpy.copy, taken)}
    )
    return state.replace(params=params, ema_params=ema)
