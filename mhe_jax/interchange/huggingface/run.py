"""A model of transformers as a run of ours: to be evaluated, or to start others from."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from mhe_jax import tasks
from mhe_jax.config import InputError
from mhe_jax.config.fields import save_json
from mhe_jax.config.files import CONFIG, TOKENIZER, publish_directory
from mhe_jax.config.rules import check
from mhe_jax.config.rules.trust import remember
from mhe_jax.interchange.huggingface.fields import read_object
from mhe_jax.interchange.huggingface.reading import read
from mhe_jax.model import count_parameters
from mhe_jax.training import sharding
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import initializer_of


def is_foreign(directory: Path) -> bool:
    """Whether there is a `config.json` of transformers, and not of a run."""
    try:
        return "model_type" in read_object(directory / CONFIG)
    except InputError:
        return False


def make_run(source: str | Path, new: str | Path) -> dict[str, Any]:
    """Makes the run `new` of the model in the directory `source`.

    It has the model's config, without text to train on; its tokenizer; and a checkpoint of step 0,
    its parameters in float32 with a fresh optimizer.

    Returns:
      The `task`, the numbers of `parameters` and `attention` parameters, and the special tokens
      that are `absent` in the vocabulary.

    Raises:
      InputError: as `read`; `new` is there already. Nothing has been written.
    """
    source, new = Path(source), Path(new)
    with publish_directory(new) as directory:
        config, params, tokenizer = read(source)
        config = dataclasses.replace(config, workdir=str(new))
        check(config, trains=False)
        mesh = sharding.mesh_at_hand(config, "converting")
        model = tasks.of(config).model(config.model)
        initialize, abstract = initializer_of(config, model, make_optimizer(config), mesh)
        state = initialize(jax.random.key(config.train.seed))
        placed = jax.device_put(params, sharding.shardings_of(abstract.params))
        checkpoints = Checkpoints(directory)
        try:
            checkpoints.save(state.replace(params=placed), 0, {"tokenizer": tokenizer.key})
            checkpoints.wait()
        finally:
            checkpoints.close()
        tokenizer.save(directory / TOKENIZER)
        save_json(config, directory / CONFIG)
    remember(new)
    counts = count_parameters(params, config.model)
    return {
        "task": config.task,
        "parameters": counts["total"],
        "attention": counts["attention"],
        "absent": list(tokenizer.absent),
    }
