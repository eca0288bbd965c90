"""The README.md of an export: what the model is, where it comes from, and how it is used."""

import json
from typing import Any

from mhe_jax import tasks
from mhe_jax.attention.kinds import KINDS
from mhe_jax.config.fields import parse_json
from mhe_jax.evaluation.run import Run
from mhe_jax.model import count_parameters

# Numbers of eval_SPLIT.json that say how well a model does, beside the metrics of its task.
SCORES = ("loss", "accuracy", "chrf", "exact_match", "beam_size", "length_penalty", "stride")


def card(run: Run, what: str, use: str) -> str:
    """The text of a card, in Markdown.

    Args:
      run: whose model it is.
      what: sentences on the files, and on what is not as in the run.
      use: lines of code or a command that use them, fenced, and what there is to say of it.
    """
    config, counts = run.config, count_parameters(run.params, run.config.model)
    model = config.model
    layers = f"{model.num_layers} layers"
    if "cross" in config.facts.roles:
        layers = f"{model.num_layers} + {model.num_decoder_layers or model.num_layers} layers"
    kinds = {kind: role for role, kind in reversed(config.kinds.items())}
    equations = [f"- `{kind}`: {equation(kind)}" for kind in kinds]
    pieces = f"a vocabulary of {model.vocabulary_size:,}"
    facts = [
        f"- task `{config.task}`, {layers} of width {model.features}, {pieces}",
        f"- {counts['total']:,} parameters, {counts['attention']:,} of them in attention",
        *equations,
        *([f"- trained on {', '.join(config.data.train)}"] if config.data.train else []),
        f"- checkpoint of step {', '.join(map(str, run.steps))}"
        + (" (their mean)" if len(run.steps) > 1 else ""),
        *(f"- {split}: {scores}" for split, scores in scores_of(run).items()),
    ]
    return "\n".join(
        [f"# {run.workdir.resolve().name}", "", what, "", use, "", "## The model", "", *facts, ""]
    )


def equation(kind: str) -> str:
    """The first sentence of a kind's docstring, which is its equation."""
    paragraph = (KINDS[kind].__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.partition(": ")[2].split())


def scores_of(run: Run) -> dict[str, str]:
    """What each eval_*.json of the run says, in words; a file that is none is left out."""
    found = {}
    names = (*tasks.of(run.config).metrics, *SCORES)
    for path in sorted(run.workdir.glob("eval_*.json")):
        try:
            result: dict[str, Any] = parse_json(path)
            values = {name: result[name] for name in names if result.get(name) is not None}
        except (OSError, ValueError, AttributeError, TypeError):
            continue
        split = path.stem.removeprefix("eval_")
        numbers = (
            f"{name} {json.dumps(round(value, 4) if isinstance(value, float) else value)}"
            for name, value in values.items()
        )
        found[split] = ", ".join(numbers) + f" (steps {result.get('steps')})"
    return found
