"""A trained run: its scores, translations, texts, predictions, vectors, log-probabilities.

    run = load(path)                                 # a `Run`: translate, generate, ...
    evaluate(workdir, evaluation)                    # scores on a split
    translate(workdir, evaluation, lines, write)     # lines in, lines out
    generate(workdir, evaluation, prompts, write)    # prompts in, texts out
    predict(workdir, evaluation, lines, write)       # lines in, labels out

A run is what `train.py` leaves in its workdir; nothing else is needed.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mhe_jax import tasks
from mhe_jax.attention import recording
from mhe_jax.config import Config, EvaluationConfig
from mhe_jax.config.evaluation import result_name
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.config.files import CONFIG, write_whole
from mhe_jax.config.places import path_of
from mhe_jax.evaluation.lines import generate, predict, translate
from mhe_jax.evaluation.run import Run, load
from mhe_jax.training.cluster import group

# Numbers that say how well a model does, beside the metrics of its task.
SCORES = ("chrf", "exact_match", "loss", "accuracy", "beam_size", "length_penalty", "stride")

__all__ = ["Run", "evaluate", "generate", "in_words", "load", "predict", "translate"]


def evaluate(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    *,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """The results on `evaluation.split`, also written to WORKDIR/eval_SPLIT.json.

    If `evaluation.sources` replace the split's, the name of the first one replaces SPLIT.

    Args:
      workdir: of the run.
      evaluation: checkpoint, split and search.
      devices: to compute on; None is all there are.

    Raises:
      InputError: no such run, checkpoint or split, or something is wrong with the text.
    """
    workdir = path_of(workdir)
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    # The cache is the caller's own: a run from somebody else could name any directory.
    config = set_field(config, "data.cache_directory", None)
    if evaluation.sources:
        config = set_field(config, f"data.{evaluation.split}", evaluation.sources)
    group.check()
    run = Run.load(workdir, config, devices)
    with recording():
        result = tasks.of(config).evaluate(run)
    if jax.process_index() == 0:
        path = workdir / f"eval_{result_name(evaluation)}.json"
        write_whole(path, json.dumps(result, indent=2) + "\n")
    return result


def in_words(config: Config, result: dict[str, Any]) -> str:
    """A line for people: how well a run of this config does, by a result of `evaluate`.

    `perplexity_per_word 324.2551, loss 3.6659, accuracy 0.3457 (steps [2000])`, and the like.
    """
    names = dict.fromkeys((*tasks.of(config).metrics, *SCORES))
    numbers = {name: result[name] for name in names if result.get(name) is not None}
    words = (
        f"{name} {json.dumps(round(number, 4) if isinstance(number, float) else number)}"
        for name, number in numbers.items()
    )
    return ", ".join(words) + f" (steps {result.get('steps')})"
