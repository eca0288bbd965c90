"""A trained run: its scores, translations, texts, predictions, vectors, log-probabilities.

    run = load(path)                                           # a `Run`: translate, generate, ...
    evaluate(workdir, evaluation)                              # scores on a split
    answer_lines(method, workdir, evaluation, lines, write)    # lines in, lines out

A run is what `train.py` leaves in its workdir; nothing else is needed.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.attention import recording
from mhe_jax.config import Config, EvaluationConfig
from mhe_jax.config.evaluation import result_name
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.config.files import CONFIG, write_whole
from mhe_jax.config.places import path_of
from mhe_jax.data import AnyTokenizer, open_split
from mhe_jax.evaluation.lines import answer_lines
from mhe_jax.evaluation.run import Run, load
from mhe_jax.evaluation.translator import Translator, translated
from mhe_jax.tasks.metrics import check_bleu, translation_scores
from mhe_jax.tasks.sums import total
from mhe_jax.training.summary import described

# Numbers that say how well a model does, beside the metrics of its task.
SCORES = ("chrf", "exact_match", "loss", "accuracy", "beam_size", "length_penalty", "stride")

__all__ = [
    "Run",
    "TranslatedSample",
    "answer_lines",
    "evaluate",
    "in_words",
    "load",
]


def evaluate(
    workdir: str | Path,
    evaluation: EvaluationConfig,
    *,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """The results on `evaluation.split`, also written to WORKDIR/eval_SPLIT.json.

    A result says what was measured and how: task, split, the steps of the checkpoints, seconds, and
    which form and engine each attention kind ran as. Predictions are in WORKDIR/SPLIT.*. If
    `evaluation.sources` replace the split's, the name of the first one replaces SPLIT.
    """
    workdir = path_of(workdir)
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    # The cache is the caller's own: a run from somebody else could name any directory.
    config = set_field(config, "data.cache_directory", None)
    if evaluation.sources:
        config = set_field(config, f"data.{evaluation.split}", evaluation.sources)
    run = Run.load(workdir, config, devices)
    with recording():
        result, files = _scored(run)
    if jax.process_index() == 0:
        name = result_name(evaluation)
        for suffix, text in files.items():
            write_whole(workdir / f"{name}.{suffix}", text)
        write_whole(workdir / f"eval_{name}.json", json.dumps(result, indent=2) + "\n")
    return result


def _scored(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """A result, and the files of predictions that go with it."""
    config, task, evaluation = run.config, tasks.of(run.config), run.evaluation
    translates = task.search == "translate"
    if translates:
        check_bleu(evaluation.bleu_tokenizer)
    found, batches, seconds = run.outputs()
    outputs = (batch["outputs"] for batch in found if "outputs" in batch)
    sums = total(found)
    run.check_finite(sums["loss"] < math.inf and all(np.isfinite(x).all() for x in outputs))
    numbers, files = task.result(config, found, batches), task.files(config, found, batches)
    if translates:
        more, hypotheses = translated(run)
        numbers |= more
        files["hypotheses.txt"] = "".join(f"{text}\n" for text in hypotheses)
    else:
        numbers |= {"seconds": seconds, "tokens_per_second": sums["tokens"] / seconds}
    about = {
        **described(config, run.mesh, run.params),
        "split": evaluation.split,
        "sources": list(getattr(config.data, evaluation.split)),
        "checkpoint": evaluation.checkpoint,
        "average_checkpoints": evaluation.average_checkpoints,
        "steps": run.steps,
    }
    return about | numbers, files


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


class TranslatedSample:
    """BLEU while training: of the first `train.eval_translate` pairs of validation, greedily.

    All processes of a run call it together: each has all texts, each device translates its rows,
    and each process gets all translations. Programs are compiled at the first call.
    """

    def __init__(self, config: Config, mesh: Mesh, tokenizer: AnyTokenizer, model: nn.Module):
        greedy = dataclasses.replace(config.evaluation, beam_size=1)
        config = dataclasses.replace(config, evaluation=greedy)
        self._run = Run(Path(config.workdir), config, mesh, tokenizer, model, params=None, steps=[])
        pairs = itertools.islice(open_split(config, "validation"), config.train.eval_translate)
        self._texts, self._references = [list(side) for side in zip(*pairs, strict=True)]
        check_bleu(greedy.bleu_tokenizer)

    def __call__(self, params: Any) -> dict[str, Any]:
        """The metrics of these parameters, which lie on the mesh."""
        run = dataclasses.replace(self._run, params=params)
        found = Translator(run, run.evaluation).translate(self._texts)
        hypotheses = [translation.text for translation in found]
        scores = translation_scores(hypotheses, self._references, run.evaluation.bleu_tokenizer)
        return {"bleu": scores["bleu"]}
