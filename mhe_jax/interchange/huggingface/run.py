"""A model of transformers as our run: to evaluate, or to start other runs from."""

import dataclasses
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError
from mhe_jax.config.files import CONFIG
from mhe_jax.config.places import check_scheme, path_of
from mhe_jax.interchange.huggingface.fields import read_object
from mhe_jax.interchange.huggingface.reading import read
from mhe_jax.model import count_parameters
from mhe_jax.training import sharding
from mhe_jax.training.run.fresh import check_new_run, write_run


def is_foreign(directory: Path) -> bool:
    """Whether `directory` has a `config.json` of transformers, and not of a run."""
    try:
        return "model_type" in read_object(directory / CONFIG)
    except InputError:
        return False


def make_run(source: str | Path, new: str | Path) -> dict[str, Any]:
    """Makes the run `new` from the model in the directory `source`.

    It has the model's config, without text to train on; its tokenizer; and a checkpoint of step 0,
    its parameters in float32 with a fresh optimizer.

    Returns:
      The `task`, the numbers of `parameters` and `attention` parameters, and the special tokens
      that are `absent` in the vocabulary.

    Raises:
      InputError: as `read`; `new` exists already. Nothing has been written.
    """
    check_scheme("", str(source), ())
    source, new = Path(source), path_of(new)
    check_new_run(new, source)
    config, params, tokenizer = read(source)
    config = dataclasses.replace(config, workdir=str(new))
    mesh = sharding.mesh_at_hand(config, "converting")
    write_run(config, params, mesh, tokenizer.key, tokenizer.model)
    counts = count_parameters(params, config.model)
    return {
        "task": config.task,
        "parameters": counts["total"],
        "attention": counts["attention"],
        "absent": list(tokenizer.absent),
    }
