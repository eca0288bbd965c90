"""Texts to their translations, many at a time, under jit on the mesh.

Texts are sorted by length and cut into batches of static shapes: R rows (the last ones of a batch
may be padding) by a source length S out of 16, 32, 64, ... So few programs are compiled. Padding
never changes a translation.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax.config import EvaluationConfig
from mhe_jax.data import BOS, EOS, PAD, Tokenizer, open_split
from mhe_jax.evaluation.decoding import (
    FORBIDDEN,
    Hypotheses,
    beam_search,
    expand_to_beams,
    unrolled,
)
from mhe_jax.evaluation.programs import CompiledRun
from mhe_jax.tasks.metrics import translation_scores


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


def translated(run: CompiledRun) -> tuple[dict[str, Any], list[str]]:
    """The scores of the translations of a split by beam search, and the translations."""
    evaluation, translator = run.evaluation, Translator(run, run.evaluation)
    texts, references = zip(*open_split(run.config, evaluation.split), strict=True)
    translations, cost = translator.translate(texts), translator.cost
    hypotheses = [translation.text for translation in translations]
    seconds = max(cost.decode_seconds, 1e-9)
    settings = ("beam_size", "length_penalty", "min_length", "extra_length", "bleu_tokenizer")
    return {
        **translation_scores(hypotheses, references, evaluation.bleu_tokenizer),
        **{name: getattr(evaluation, name) for name in settings},
        "sentences": len(texts),
        "truncated_sources": sum(translation.truncated for translation in translations),
        "output_tokens": cost.tokens,
        "seconds": cost.decode_seconds,
        "compile_seconds": cost.compile_seconds,
        "sentences_per_second": cost.sentences / seconds,
        "output_tokens_per_second": cost.tokens / seconds,
    }, hypotheses


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
        lengths = [min(len(ids[i]) + 1, self.max_length) for i in numbers]
        rows, plan = self.run.plan(lengths, self.evaluation.batch_size, self.max_length)
        for length, batch in plan:
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
        decode = self.run.program(self._name, self._decode, sources, limits)
        compiled = time.perf_counter()
        best = jax.device_get(decode())
        self.cost.compile_seconds += compiled - begin
        self.cost.decode_seconds += time.perf_counter() - compiled
        self.cost.sentences += len(ids)
        for row, source in enumerate(ids):
            tokens = best.tokens[row, 0, : best.lengths[row, 0]].tolist()
            score = float(best.scores[row, 0])
            self.run.check_finite(bool(np.isfinite(score)))
            self.cost.tokens += len(tokens)
            # A line break would make two lines of one; `splitlines` knows every kind of line break.
            text = " ".join(self.tokenizer.decode(tokens[:-1]).splitlines())
            yield Translation(text, tokens, score, len(source) >= self.max_length)

    def _decode(self, params: Any, sources: jax.Array, limits: jax.Array) -> Hypotheses:
        """Sources [B, S] with eos, and the longest output of each [B], to a hypothesis per row."""
        e = self.evaluation
        return search(
            self.model,
            params,
            sources,
            limits,
            max_length=min(sources.shape[1] + e.extra_length, self.max_length),
            beam_size=e.beam_size,
            length_penalty=e.length_penalty,
            min_length=e.min_length,
        )


def search(
    model: Any, params: Any, sources: jax.Array, limits: jax.Array, **settings: Any
) -> Hypotheses:
    """The best translation of each of sources [B, S] of at most limits [B] tokens, eos counted.

    `settings` are those of `beam_search`.
    """
    model, params = unrolled(model, params)
    fixed, moving = start(model, params, sources, settings["max_length"])
    fixed = expand_to_beams(fixed, settings["beam_size"], model.cache_batch_axis)
    return beam_search(
        functools.partial(step, model, params, fixed),
        moving,
        limits,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=PAD,
        forbidden_ids=FORBIDDEN,
        num_hypotheses=1,
        batch_axis=model.cache_batch_axis,
        **settings,
    )


def start(model: Any, params: Any, sources: jax.Array, length: int) -> tuple[dict, dict]:
    """The leaves of the cache that cross-attention reads, and the others.

    The first are the same for all beams of a row: they are never reordered.
    """
    variables = {"params": params}
    _, state = model.apply(variables, sources, length, method="start_cache", mutable=["cache"])
    leaves = flatten_dict(state["cache"])
    fixed = {path: leaf for path, leaf in leaves.items() if "cross_attention" in path}
    return fixed, {path: leaf for path, leaf in leaves.items() if path not in fixed}


def step(
    model: Any, params: Any, fixed: dict, moving: dict, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, dict]:
    """Logits [N, V] after tokens [N, 1], and `moving` with them."""
    logits, state = model.apply(
        {"params": params, "cache": unflatten_dict(fixed | moving)},
        tokens,
        positions,
        method="decode_step",
        mutable=["cache"],
    )
    leaves = flatten_dict(state["cache"])
    return logits[:, 0], {path: leaves[path] for path in moving}
