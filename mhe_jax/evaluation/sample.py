"""BLEU during training: some pairs of the validation split, translated with a step's parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
from jax.sharding import Mesh

from mhe_jax.config import Config
from mhe_jax.data import AnyTokenizer, open_split
from mhe_jax.evaluation.run import Run
from mhe_jax.tasks.metrics import check_bleu, translation_scores


class TranslatedSample:
    """Scores greedy translations of the first `train.eval_translate` pairs of validation.

    All processes of a run call it together: each has all texts, each device translates its rows,
    and each process gets all translations. Programs are compiled at the first call.
    """

    def __init__(self, config: Config, mesh: Mesh, tokenizer: AnyTokenizer, model: nn.Module):
        greedy = dataclasses.replace(config.evaluation, beam_size=1)
        config = dataclasses.replace(config, evaluation=greedy)
        self._run = Run(Path(config.workdir), config, mesh, tokenizer, model, params=None, steps=[])
        source = open_split(config, "validation")
        numbers = range(min(config.train.eval_translate, len(source)))
        pairs = [source[number] for number in numbers]
        self._texts, self._references = [list(side) for side in zip(*pairs, strict=True)]
        self._tokenizer = config.evaluation.bleu_tokenizer
        check_bleu(self._tokenizer, self._references)

    def __call__(self, params: Any) -> dict[str, Any]:
        """The metrics of these parameters, which lie on the mesh."""
        translations, _ = self._run.with_params(params).translations(self._texts)
        hypotheses = [translation.text for translation in translations]
        scores = translation_scores(hypotheses, self._references, self._tokenizer)
        return {"bleu": scores["bleu"]}
