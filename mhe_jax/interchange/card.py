"""The README.md of an export: what the model is, where it comes from, and how it is used."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mhe_jax.attention.kinds import KINDS
from mhe_jax.config import Config
from mhe_jax.config.fields import load_json, parse_json
from mhe_jax.config.files import CONFIG
from mhe_jax.evaluation import in_words
from mhe_jax.evaluation.run import Run
from mhe_jax.model import count_parameters

HEADS = "each head is `softmax(Q_h K_hᵀ/√D) V_h` unless an equation of O says else; W_o joins them"

# Settings that name the parameters.
WHICH = ("checkpoint", "average_checkpoints")


def card(run: Run, to: str, what: str, use: str) -> str:
    """The text of a card, in Markdown.

    Args:
      run: whose model it is.
      to: the format.
      what: sentences on the files, and on what differs from the run.
      use: fenced lines of code or a command that use them, and any remarks on it.
    """
    config, counts = run.config, count_parameters(run.params, run.config.model)
    model, scores = config.model, scores_of(run)
    layers = f"{model.num_layers} layer{'s' * (model.num_layers != 1)}"
    if "cross" in config.facts.roles:
        layers = f"{model.num_layers} + {model.decoder_layers} layers"
    kinds = {kind: role for role, kind in reversed(config.kinds.items())}
    pieces = f"a vocabulary of {model.vocabulary_size:,}"
    texts = ", ".join(map(_short, config.data.train))
    facts = [
        f"- task `{config.task}`, {layers} of width {model.features}, {pieces}",
        f"- {counts['total']:,} parameters, {counts['attention']:,} of them in attention",
        *(f"- `{kind}`: {equation(kind)}" for kind in kinds),
        f"- {HEADS}",
        *([f"- trained on {texts}"] if texts else []),
        *([f"- began with {_short(config.train.init_from)}"] if config.train.init_from else []),
        f"- checkpoint of step {', '.join(map(str, run.steps))}"
        + (" (their mean)" if len(run.steps) > 1 else ""),
        *(f"- {split}: {numbers}" for split, (numbers, _) in scores.items()),
    ]
    made = [command for _, command in scores.values()]
    which = {name: getattr(config.evaluation, name) for name in WHICH}
    flags = _flags(which, load_json(run.workdir / CONFIG))
    name = run.workdir.resolve().name
    made.append(f"python -m mhe_jax export {shlex.quote(name)} OUT --to {to}{flags}")
    model_and_origin = ["## The model", "", *facts, "", "Made by", "", "```", *made, "```", ""]
    return "\n".join([f"# {name}", "", what, "", use, "", *model_and_origin])


def _short(place: str) -> str:
    """An absolute path by its last part, as a card names it; the rest is the exporter's own."""
    return Path(place).name if Path(place).is_absolute() else place


def equation(kind: str) -> str:
    """The first sentence of a kind's docstring, which is its equation."""
    paragraph = (KINDS[kind].__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.partition(": ")[2].split())


def scores_of(run: Run) -> dict[str, tuple[str, str]]:
    """The result in each eval_*.json of the run, in words, and the command that made it.

    A file that is not such a result is left out.
    """
    found = {}
    for path in sorted(run.workdir.glob("eval_*.json")):
        try:
            result: dict[str, Any] = parse_json(path)
            words, command = in_words(run.config, result), command_of(run.workdir, result)
        except (OSError, ValueError, AttributeError, TypeError):
            continue
        found[path.stem.removeprefix("eval_")] = words, command
    return found


def command_of(run: Path, result: dict[str, Any]) -> str:
    """The command that makes `result` again: eval.py with what differs from the run's config."""
    flags = _flags(result, load_json(run / CONFIG))
    return f"python eval.py {shlex.quote(run.resolve().name)}{flags}"


def _flags(found: Mapping[str, Any], config: Config) -> str:
    """The settings in `found` that are others than in the config of a run."""
    usual = dataclasses.asdict(config.evaluation)
    split = found.get("split", config.evaluation.split)
    usual["sources"] = usual["sources"] or getattr(config.data, split)
    flags = ""
    for name, value in usual.items():
        given = found.get(name, value)
        if isinstance(value, tuple):
            value, given = list(value), list(given)
        if given != value:
            values = given if isinstance(given, list) else [given]
            flags += f" --{name} {shlex.join(_short(str(value)) for value in values)}"
    return flags
