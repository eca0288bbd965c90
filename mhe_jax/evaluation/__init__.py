"""A trained run: its scores, translations, texts, predictions, vectors, log-probabilities.

run = load(path)                                           # a `Run`: translate, generate, ...
evaluate(workdir, evaluation)                              # scores on a split
answer_lines(method, workdir, evaluation, lines, write)    # lines in, lines out
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mhe_jax import tasks
from mhe_jax.attention import recording
from mhe_jax.config import Config, EvaluationConfig, result_name
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.config.files import CONFIG, write_whole
from mhe_jax.config.places import path_of
from mhe_jax.evaluation.run import Run, answer_lines, load
from mhe_jax.evaluation.translator import TranslatedSample, translated
from mhe_jax.tasks.metrics import check_bleu
from mhe_jax.tasks.sums import total
from mhe_jax.training.meter import described
from mhe_jax.training.state import abstract_params

CHOSEN = ("split", "checkpoint", "average_checkpoints", "quantize")
# Numbers that say how well a model does, beside the metrics of its task.
SCORES = ("chrf", "exact_match", "loss", "accuracy", "beam_size", "length_penalty", "stride")

__all__ = ["Run", "TranslatedSample", "answer_lines", "evaluate", "in_words", "load"]


def evaluate(
    workdir: str | Path, evaluation: EvaluationConfig, *, devices: Sequence[Any] | None = None
) -> dict[str, Any]:
    """The results on `evaluation.split`, also written to WORKDIR/eval_SPLIT.json.

    Predictions are in WORKDIR/SPLIT.*. If `evaluation.sources` replace the split's, the name of the
    first one replaces SPLIT.
    """
    workdir = path_of(workdir)
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    # The cache is the caller's own: a run from somebody else could name any directory.
    config = set_field(config, "data.cache_directory", None)
    if evaluation.sources:
        config = set_field(config, f"data.{evaluation.split}", evaluation.sources)
    run, task = Run.load(workdir, config, devices), tasks.of(config)
    translates = "translate" in task.methods
    if translates:
        check_bleu(evaluation.bleu_tokenizer)
    with recording():
        found, batches, seconds = run.outputs()
        outputs = (batch["outputs"] for batch in found if "outputs" in batch)
        sums = total(found)
        run.check_finite(sums["loss"] < math.inf and all(np.isfinite(x).all() for x in outputs))
        numbers, files = task.result(config, found, batches), task.files(config, found, batches)
        if translates:
            more, hypotheses = translated(run)
            numbers = more | numbers
            files["hypotheses.txt"] = "".join(f"{text}\n" for text in hypotheses)
        else:
            numbers |= {"seconds": seconds, "tokens_per_second": sums["tokens"] / seconds}
        result = {
            **numbers,
            **{key: getattr(evaluation, key) for key in CHOSEN},
            "sources": list(getattr(config.data, evaluation.split)),
            "steps": run.steps,
            **described(config, run.mesh, abstract_params(config, run.mesh)),
        }
    if jax.process_index() == 0:
        name = result_name(evaluation)
        for suffix, text in files.items():
            write_whole(workdir / f"{name}.{suffix}", text)
        write_whole(workdir / f"eval_{name}.json", json.dumps(result, indent=2) + "\n")
    return result


def in_words(config: Config, result: dict[str, Any]) -> str:
    """A line for people by a result of `evaluate`: `loss 3.6659, accuracy 0.3457 (steps [20])`."""
    names = dict.fromkeys((*tasks.of(config).metrics, *SCORES))
    numbers = [(name, result[name]) for name in names if result.get(name) is not None]
    words = [f"{name} {round(n, 4) if isinstance(n, float) else n}" for name, n in numbers]
    return f"{', '.join(words)} (steps {result.get('steps')})"
