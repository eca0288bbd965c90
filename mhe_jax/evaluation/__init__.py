"""A trained run: its scores, translations, texts, predictions, vectors, log-probabilities.

    run = load(path)                                           # a `Run`: translate, generate, ...
    evaluate(workdir, evaluation)                              # scores on a split
    answer_lines(method, workdir, evaluation, lines, write)    # lines in, lines out

A run is what `train.py` leaves in its workdir; nothing else is needed.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
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
from mhe_jax.tasks.metrics import check_bleu, translation_scores

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

    If `evaluation.sources` replace the split's, the name of the first one replaces SPLIT.
    """
    workdir = path_of(workdir)
    config = dataclasses.replace(load_json(workdir / CONFIG), evaluation=evaluation)
    # The cache is the caller's own: a run from somebody else could name any directory.
    config = set_field(config, "data.cache_directory", None)
    if evaluation.sources:
        config = set_field(config, f"data.{evaluation.split}", evaluation.sources)
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
        self._tokenizer = config.evaluation.bleu_tokenizer
        check_bleu(self._tokenizer)

    def __call__(self, params: Any) -> dict[str, Any]:
        """The metrics of these parameters, which lie on the mesh."""
        translations, _ = self._run.with_params(params).translations(self._texts)
        hypotheses = [translation.text for translation in translations]
        scores = translation_scores(hypotheses, self._references, self._tokenizer)
        return {"bleu": scores["bleu"]}
