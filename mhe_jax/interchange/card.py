"""The README.md of an export: what the model is, where it comes from, and how it is used."""

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

from mhe_jax.attention.kinds import KINDS
from mhe_jax.evaluation import in_words
from mhe_jax.evaluation.run import Run
from mhe_jax.model import count_parameters

CARD = """\
# {name}

{what}

{use}

## The model

- task `{config.task}`, {layers} of width {model.features}, a vocabulary of \
{model.vocabulary_size:,}
- {counts[total]:,} parameters, {counts[attention]:,} of them in attention
{facts}

Made by

```
python -m mhe_jax export {place} OUT --to {to}
```
"""
# What a format's `write` returns: what the result reports, what the files are, and how to use them.
Export = tuple[dict[str, Any], str, str]
HEADS = "each head is `softmax(Q_h K_hᵀ/√D) V_h` unless an equation of O says else; W_o joins them"


def write_card(run: Run, directory: Path, to: str, what: str, use: str) -> None:
    """Writes the card; `what` says what the files are, `use` has lines that use them."""
    config, model, name = run.config, run.config.model, run.workdir.resolve().name
    layers = f"{model.num_layers} layer{'s' * (model.num_layers != 1)}"
    if "cross" in config.facts.roles:
        layers = f"{model.num_layers} + {model.decoder_layers} layers"
    facts = [f"`{kind}`: {_equation(kind)}" for kind in dict.fromkeys(config.kinds.values())]
    facts.append(HEADS)
    if config.data.train:
        facts.append(f"trained on {', '.join(map(_short, config.data.train))}")
    if config.train.init_from:
        facts.append(f"began with {_short(config.train.init_from)}")
    mean = " (their mean)" * (len(run.steps) > 1)
    facts.append(f"checkpoint of step {', '.join(map(str, run.steps))}{mean}")
    for path in sorted(run.workdir.glob("eval_*.json")):
        with contextlib.suppress(ValueError, AttributeError, TypeError):  # not such a result
            scores = in_words(config, json.loads(path.read_bytes()))
            facts.append(f"{path.stem.removeprefix('eval_')}: {scores}")
    text = CARD.format(
        name=name,
        what=what,
        use=use,
        config=config,
        model=model,
        layers=layers,
        counts=count_parameters(run.params, model),
        facts="\n".join(f"- {fact}" for fact in facts),
        place=shlex.quote(name),
        to=to,
    )
    (directory / "README.md").write_text(text, encoding="utf-8")


def _short(place: str) -> str:
    """An absolute path by its last part, as a card names it; the rest is the exporter's own."""
    return Path(place).name if Path(place).is_absolute() else place


def _equation(kind: str) -> str:
    """The first sentence of a kind's docstring, which is its equation."""
    paragraph = (KINDS[kind].__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.partition(": ")[2].split())
