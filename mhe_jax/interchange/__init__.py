"""Trained runs for other programs, and back: `export(run, out, to)` writes one of `FORMATS`.

A format is a module here and its entry in `FORMATS`: `write(run, directory)` writes a loaded run
into an empty directory, which gets its name once it is whole, and returns an `Export`. What has no
home in the format is refused by an `InputError` that says why. A format is imported on demand,
since its libraries are an extra; `safetensors` is here, as `write_parameters`.

plain.py        parameters in one plain form, and tables.py, where they lie in other files
uptraining.py   a run with another attention, fitted on its activations
ctranslate2.py  stablehlo.py  huggingface/  transformers.py, with modeling_mhe.py
"""

import contextlib
import dataclasses
import importlib
import json
import shlex
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError, not_installed
from mhe_jax.config.files import CONFIG, TOKENIZER, check_new, publish
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of

FORMATS = {
    "safetensors": "parameters by name; eval.py takes it as a run",
    "huggingface": "model and tokenizer as transformers loads them",
    "transformers": "the same with PyTorch code of its own, for mva, mhe_add and mhe_mul",
    "ctranslate2": "language or translation model as CTranslate2 serves it",
    "stablehlo": "compiled by any XLA, without this code",
}
# What a format's `write` returns: what the result reports, what the files are, and how to use them.
Export = tuple[dict[str, Any], str, str]

WHAT = """\
`model.safetensors` has the parameters by name, in float32, layers unrolled; `config.json` every
setting of the training. `tokenizer.model`, if there is one, is a model of sentencepiece, or a
`tokenizer.json` of the library `tokenizers`."""
USE = """\
```
python eval.py DIRECTORY --checkpoint last
python train.py CONFIG --train.init_from DIRECTORY
```"""
CARD = """\
# {name}

{what}

{use}

## The model

- task `{task}`, {layers} of width {features}, a vocabulary of {vocabulary:,}
- {total:,} parameters, {attention:,} of them in attention
- {facts}

Made by

```
python -m mhe_jax export {place} OUT --to {to}
```
"""


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
    evaluation = dataclasses.replace(config.evaluation, quantize=None, **given)
    config = dataclasses.replace(config, evaluation=evaluation)
    write = write_parameters
    try:
        if to != "safetensors":
            write = importlib.import_module(f"mhe_jax.interchange.{to}").write
    except ModuleNotFoundError as error:
        raise not_installed(f"--to {to} needs {error.name}", "export") from error
    with publish(out, is_directory=True) as directory:
        # It starts jax, so only after all cheap checks.
        from mhe_jax.evaluation.run import Run

        loaded = Run.load(run, config)
        found, what, use = write(loaded, directory)
        (directory / "README.md").write_text(_card(loaded, to, what, use), encoding="utf-8")
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return {"format": to, "out": str(out), "steps": loaded.steps, "bytes": size, **found}


def write_parameters(run: Any, directory: Path) -> Export:
    """A run without an optimizer: its parameters bit for bit, config and tokenizer."""
    from mhe_jax.training.checkpoint.tensors import WEIGHTS, by_name, write_tensors

    tensors = by_name(run.params)
    metadata = {"steps": json.dumps(run.steps), "tokenizer": run.tokenizer.key}
    write_tensors(directory / WEIGHTS, tensors, metadata)
    for name in (CONFIG, TOKENIZER) if run.config.model.has_pieces else (CONFIG,):
        (directory / name).write_bytes((run.workdir / name).read_bytes())
    count = sum(array.size for array in tensors.values())
    return {"tensors": len(tensors), "parameters": count}, WHAT, USE


def _card(run: Any, to: str, what: str, use: str) -> str:
    """The README.md: what the model is, where it comes from, its scores, and how it is used."""
    from mhe_jax.attention.kinds import KINDS
    from mhe_jax.evaluation import in_words
    from mhe_jax.model import count_parameters

    config, model, name = run.config, run.config.model, run.workdir.resolve().name
    facts = []
    for kind in dict.fromkeys(config.kinds.values()):
        # The first sentence of its docstring.
        equation = str(KINDS[kind].__doc__).partition("\n\n")[0].partition(": ")[2]
        facts.append(f"`{kind}`: {' '.join(equation.split())}")
    # Of absolute paths the last part alone: the rest is the exporter's own.
    places = filter(None, (*config.data.train, config.train.init_from))
    short = [Path(at).name if Path(at).is_absolute() else at for at in places]
    facts.append(f"checkpoint of step {', '.join(map(str, run.steps))}")
    if short:
        facts.append(f"made from {', '.join(short)}")
    for path in sorted(run.workdir.glob("eval_*.json")):
        with contextlib.suppress(
            ValueError, AttributeError, TypeError, KeyError
        ):  # not such a result
            result = json.loads(path.read_bytes())
            if list(result["steps"]) == list(run.steps):  # of this checkpoint
                facts.append(f"{path.stem.removeprefix('eval_')}: {in_words(config, result)}")
    two = f" + {model.decoder_layers}" if "cross" in config.facts.roles else ""
    return CARD.format(
        name=name,
        what=what,
        use=use,
        task=config.task,
        layers=f"{model.num_layers}{two} layers",
        features=model.features,
        vocabulary=model.vocabulary_size,
        **count_parameters(run.params, model),
        facts="\n- ".join(facts),
        place=shlex.quote(name),
        to=to,
    )
