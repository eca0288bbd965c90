"""Trained runs for other programs, and back: `export(run, out, to)` writes one of `FORMATS`.

A format is a module here and its entry in `FORMATS`: `write(run, directory)` writes a loaded run
into an empty directory, which gets its name once it is whole, and returns what the result and the
card say of it (`card.Export`). What has no home in the format is refused by an `InputError` that
says why. A format is imported on demand, since its libraries are an extra.

plain.py        parameters in one plain form, from which other layouts are made
card.py         the README.md of an export: what the model is, and where it comes from
uptraining.py   a run with another attention, fitted on its activations
safetensors.py  ctranslate2.py  stablehlo.py  huggingface/
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError, not_installed
from mhe_jax.config.files import check_new, publish_directory
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of

FORMATS = {
    "safetensors": "parameters by name; eval.py takes it as a run",
    "huggingface": "model and tokenizer as transformers loads them",
    "ctranslate2": "language or translation model as CTranslate2 serves it",
    "stablehlo": "compiled by any XLA, without this code",
}


def export(
    run: str | Path,
    out: str | Path,
    to: str,
    *,
    checkpoint: str | None = None,
    average_checkpoints: int | None = None,
) -> dict[str, Any]:
    """Writes a trained run as the new directory `out`, which appears whole or not at all.

    Args:
      run: directory of the run.
      out: a new directory, not in the run.
      to: one of `FORMATS`.
      checkpoint: 'best', 'last' or a step; None takes what the run's config evaluates.
      average_checkpoints: with 'last', the number of checkpoints to average; None likewise.

    Returns:
      `format`, `out`, `steps` of the checkpoints, `bytes` of all files, and what the format adds.

    Raises:
      InputError: no such run, format or checkpoint; a run that the format has no home for; `out`
        exists already, is inside the run or cannot be written; an extra is not installed.
    """
    run, out = path_of(run), path_of(out)
    if to not in FORMATS:
        raise InputError(f"--to is {to!r}: takes one of {', '.join(FORMATS)}")
    config = config_of(run)
    check_new(out, run)
    given = {"checkpoint": checkpoint, "average_checkpoints": average_checkpoints}
    given = {name: value for name, value in given.items() if value is not None}
    evaluation = dataclasses.replace(config.evaluation, **given)
    config = dataclasses.replace(config, evaluation=evaluation)
    try:
        module = "huggingface.writing" if to == "huggingface" else to
        writer = importlib.import_module(f"mhe_jax.interchange.{module}")
    except ModuleNotFoundError as error:
        raise not_installed(f"--to {to} needs {error.name}", "export") from error
    with publish_directory(out) as directory:
        # These start jax, so only after all cheap checks.
        from mhe_jax.evaluation.run import Run
        from mhe_jax.interchange.card import write_card

        loaded = Run.load(run, config)
        found, what, use = writer.write(loaded, directory)
        write_card(loaded, directory, to, what, use)
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return {"format": to, "out": str(out), "steps": loaded.steps, "bytes": size, **found}
