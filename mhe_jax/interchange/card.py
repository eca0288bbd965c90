"""The README.md of an export: what the model is, where it comes from, and how it is used."""

import contextlib
import json
import shlex
from pathlib import Path

from mhe_jax.attention.kinds import KINDS
from mhe_jax.evaluation import in_words
from mhe_jax.evaluation.run import Run
from mhe_jax.model import count_parameters

HEADS = "each head is `softmax(Q_h K_hᵀ/√D) V_h` unless an equation of O says else; W_o joins them"


def card(run: Run, to: str, what: str, use: str) -> str:
    """The text of a card, in Markdown.

    Args:
      run: whose model it is.
      to: the format.
      what: sentences on the files, and on what differs from the run.
      use: fenced lines of code or a command that use them, and any remarks on it.
    """
    config, counts = run.config, count_parameters(run.params, run.config.model)
    model = config.model
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
        *(f"- {split}: {numbers}" for split, numbers in scores_of(run).items()),
    ]
    name = run.workdir.resolve().name
    command = f"python -m mhe_jax export {shlex.quote(name)} OUT --to {to}"
    origin = ["## The model", "", *facts, "", "Made by", "", "```", command, "```", ""]
    return "\n".join([f"# {name}", "", what, "", use, "", *origin])


def _short(place: str) -> str:
    """An absolute path by its last part, as a card names it; the rest is the exporter's own."""
    return Path(place).name if Path(place).is_absolute() else place


def equation(kind: str) -> str:
    """The first sentence of a kind's docstring, which is its equation."""
    paragraph = (KINDS[kind].__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.partition(": ")[2].split())


def scores_of(run: Run) -> dict[str, str]:
    """The result in each eval_*.json of the run, in words."""
    found = {}
    for path in sorted(run.workdir.glob("eval_*.json")):
        with contextlib.suppress(ValueError, AttributeError, TypeError):  # not such a result
            found[path.stem.removeprefix("eval_")] = in_words(
                run.config, json.loads(path.read_bytes())
            )
    return found
