"""Texts to their translations, many at a time, under jit on the mesh.

Texts are sorted by length and cut into batches of static shapes: R rows (the last ones of a batch
may be padding) by a source length S out of 16, 32, 64, ... So few programs are compiled. Padding
never changes a translation.
"""

import time
from collections.abc import Iterator, Sequence
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
    unrolled,
)
from mhe_jax.evaluation.programs import CompiledRun, padded_rows, plan
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

    A text of only white space gets an empty translation, without running the model.
    """

    def __init__(self, run: CompiledRun, evaluation: EvaluationConfig):
        assert isinstance(run.tokenizer, Tokenizer)
        self.run, self.evaluation = run, evaluation
        self.tokenizer = run.tokenizer
        self.model: Any = run.model
        self.max_length = run.config.model.max_length
        self.cost = Cost()
        e = self.evaluation
        self._name = "translate", e.beam_size, e.length_penalty, e.extra_length, e.min_length

    def translate(self, texts: Sequence[str]) -> list[Translation]:
        """The translation of each text, in order, without line breaks."""
        found = [Translation("", [], 0.0, False)] * len(texts)
        ids = self.tokenizer.encode_batch(texts)
        numbers = [i for i, text in enumerate(texts) if text.strip()]
        rows = padded_rows(len(numbers), self.evaluation.batch_size, self.run.mesh)
        lengths = [min(len(ids[i]) + 1, self.max_length) for i in numbers]
        for length, batch in plan(lengths, rows, self.max_length):
            these = [numbers[place] for place in batch]
            translations = self._batch([ids[i] for i in these], rows, length)
            for i, translation in zip(these, translations, strict=True):
                found[i] = translation
        return found

    def _batch(self, ids: list[list[int]], rows: int, length: int) -> Iterator[Translation]:
        sources = np.full((rows, length), PAD, np.int32)
        limits = np.zeros((rows,), np.int32)
        for row, tokens in enumerate(ids):
            read = [*tokens[: self.max_length - 1], EOS]
            sources[row, : len(read)] = read
            limits[row] = min(len(read) + self.evaluation.extra_length, self.max_length)
        begin = time.perf_counter()
        decode = self.run.programs(self._name, self._decode, sources, limits)
        compiled = time.perf_counter()
        best = jax.device_get(decode())
        self.cost.compile_seconds += compiled - begin
        self.cost.decode_seconds += time.perf_counter() - compiled
        self.cost.sentences += len(ids)
        for row, source in enumerate(ids):
            tokens = best.tokens[row, 0, : best.lengths[row, 0]].tolist()
            score = float(best.scores[row, 0])
            if not np.isfinite(score):
                raise not_a_number(self.run.workdir)
            self.cost.tokens += len(tokens)
            # A line break would make two lines of one; `splitlines` knows every kind of line break.
            text = " ".join(self.tokenizer.decode(tokens[:-1]).splitlines())
            yield Translation(text, tokens, score, len(source) >= self.max_length)

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

        return beam_search(
            step,
            moving,
            limits,
            max_length=length,
            beam_size=beams,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=PAD,
            forbidden_ids=FORBIDDEN,
            length_penalty=self.evaluation.length_penalty,
            min_length=self.evaluation.min_length,
            num_hypotheses=1,
            batch_axis=model.cache_batch_axis,
        )
