"""Texts to their translations, many at a time, under jit on the mesh.

Texts are sorted by length and cut into batches of static shapes: R rows (the last ones of a batch
may be padding) by a source length S out of 16, 32, 64, ... So few programs are compiled. Padding
never changes a translation.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax.config import EvaluationConfig
from mhe_jax.data import BOS, EOS, PAD, Tokenizer
from mhe_jax.evaluation.decoding import (
    FORBIDDEN,
    Hypotheses,
    beam_search,
    expand_to_beams,
    greedy_search,
    unrolled,
)
from mhe_jax.evaluation.programs import SHORTEST, CompiledRun, padded_length, padded_rows
from mhe_jax.tasks.task import not_a_number


@dataclass(frozen=True)
class Translation:
    """The translation of one text; that of a blank text has no tokens, not even eos."""

    text: str
    tokens: list[int]  # with eos
    score: float  # log-probability of the tokens, with the length penalty
    truncated: bool  # the source was cut to model.max_length tokens


@dataclass
class Cost:
    """The cost of the translations so far; compiling is apart from decoding."""

    compile_seconds: float = 0.0
    decode_seconds: float = 0.0
    sentences: int = 0
    tokens: int = 0


class Translator:
    """Translates texts with the model of a run, by the search that `evaluation` describes.

    An `evaluation` of None means `run.evaluation`. A text of only white space gets an empty
    translation, without running the model.
    """

    def __init__(self, run: CompiledRun, evaluation: EvaluationConfig | None = None):
        assert isinstance(run.tokenizer, Tokenizer)
        self.run, self.evaluation = run, evaluation or run.evaluation
        self.tokenizer = run.tokenizer
        self.model: Any = run.model
        self.max_length = run.config.model.max_length
        self.cost = Cost()
        e = self.evaluation
        self._name = "translate", e.beam_size, e.length_penalty, e.extra_length, e.min_length

    def translate(self, texts: Sequence[str]) -> list[Translation]:
        """The translation of each text, in order, without line breaks.

        Raises:
          InputError: the model's output is not a number.
        """
        found = [Translation("", [], 0.0, False)] * len(texts)
        ids = self.tokenizer.encode_batch(texts)
        numbers = [i for i, text in enumerate(texts) if text.strip()]
        numbers.sort(key=lambda i: len(ids[i]), reverse=True)
        rows = padded_rows(len(numbers), self.evaluation.batch_size, self.run.mesh)
        for start in range(0, len(numbers), rows):
            batch = numbers[start : start + rows]
            translations = self._batch([ids[i] for i in batch], rows)
            for i, translation in zip(batch, translations, strict=True):
                found[i] = translation
        return found

    def _batch(self, ids: list[list[int]], rows: int) -> list[Translation]:
        cut = [row[: self.max_length - 1] for row in ids]
        length = padded_length(max(map(len, cut)) + 1, SHORTEST, self.max_length)
        sources = np.full((rows, length), PAD, np.int32)
        limits = np.zeros((rows,), np.int32)
        for row, tokens in enumerate(cut):
            sources[row, : len(tokens)] = tokens
            sources[row, len(tokens)] = EOS
            limits[row] = min(len(tokens) + 1 + self.evaluation.extra_length, self.max_length)
        begin = time.perf_counter()
        decode = self.run.programs(self._name, self._decode, sources, limits)
        compiled = time.perf_counter()
        found = jax.device_get(decode())
        self.cost.compile_seconds += compiled - begin
        self.cost.decode_seconds += time.perf_counter() - compiled
        self.cost.sentences += len(ids)
        translations = []
        for row, (whole, kept) in enumerate(zip(ids, cut, strict=True)):
            tokens = found.tokens[row, 0, : found.lengths[row, 0]].tolist()
            score = float(found.scores[row, 0])
            if not np.isfinite(score):
                raise not_a_number(self.run.workdir)
            self.cost.tokens += len(tokens)
            # A line break would make two lines of one; `splitlines` knows every kind of line break.
            text = " ".join(self.tokenizer.decode(tokens[:-1]).splitlines())
            translations.append(Translation(text, tokens, score, len(kept) < len(whole)))
        return translations

    def _decode(self, params: Any, sources: jax.Array, limits: jax.Array) -> Hypotheses:
        """Sources [B, S] with eos, and the longest output of each [B], to a hypothesis per row."""
        (model, params), beams = unrolled(self.model, params), self.evaluation.beam_size
        length = min(sources.shape[1] + self.evaluation.extra_length, self.max_length)
        variables = {"params": params}
        _, state = model.apply(variables, sources, length, method="start_cache", mutable=["cache"])
        # What cross-attention reads is the same for all beams of a row: it is never reordered.
        leaves = flatten_dict(state["cache"])
        fixed = {path: leaf for path, leaf in leaves.items() if "cross_attention" in path}
        moving = {path: leaf for path, leaf in leaves.items() if path not in fixed}
        if beams > 1:
            fixed = expand_to_beams(fixed, beams, model.cache_batch_axis)

        def step(moving, tokens, positions):
            logits, state = model.apply(
                {"params": params, "cache": unflatten_dict(fixed | moving)},
                tokens,
                positions,
                method="decode_step",
                mutable=["cache"],
            )
            leaves = flatten_dict(state["cache"])
            return logits[:, 0], {path: leaves[path] for path in moving}

        options = {
            "max_length": length,
            "bos_id": BOS,
            "eos_id": EOS,
            "pad_id": PAD,
            "forbidden_ids": FORBIDDEN,
            "length_penalty": self.evaluation.length_penalty,
            "min_length": self.evaluation.min_length,
        }
        if beams == 1:
            return greedy_search(step, moving, limits, **options)
        return beam_search(
            step,
            moving,
            limits,
            beam_size=beams,
            num_hypotheses=1,
            batch_axis=model.cache_batch_axis,
            **options,
        )
