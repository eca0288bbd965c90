"""Texts to their translations, many at a time, under jit on the mesh."""

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from mhe_jax.config import Config, EvaluationConfig
from mhe_jax.data import BOS, EOS, PAD, AnyTokenizer, open_split
from mhe_jax.evaluation import decoding
from mhe_jax.evaluation.decoding import Hypotheses
from mhe_jax.evaluation.programs import CompiledRun, filled
from mhe_jax.tasks.metrics import check_bleu, translation_scores


@dataclass(frozen=True)
class Translation:
    """The translation of one text; that of a blank text has no tokens, not even eos."""

    text: str
    tokens: list[int]  # with eos
    score: float  # log-probability of the tokens, with the length penalty
    truncated: bool  # the source was cut to model.max_length tokens


def translate(
    run: CompiledRun, evaluation: EvaluationConfig, texts: Sequence[str]
) -> list[Translation]:
    """The translation of each text, in order; of white space empty, without running the model."""
    e, most, tokenizer = evaluation, run.config.model.max_length, run.tokenizer
    ids = tokenizer.encode_batch(texts)
    read = [[*row[: most - 1], EOS] for row in ids]
    given = [number for number, text in enumerate(texts) if text.strip()]

    def arrays(numbers: list[int], rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        sources, limits = [read[given[n]] for n in numbers], np.zeros(rows, np.int32)
        limits[: len(numbers)] = [min(len(row) + e.extra_length, most) for row in sources]
        return filled(sources, rows, length), limits

    def decode(params: Any, sources: jax.Array, limits: jax.Array) -> Hypotheses:
        length = min(sources.shape[1] + e.extra_length, most)
        how = {"beam_size": e.beam_size, "length_penalty": e.length_penalty}
        how |= {"min_length": e.min_length, "max_length": length}
        return search(run.model, params, sources, limits, **how)

    found = [Translation("", [], 0.0, False)] * len(texts)
    name = "translate", e.beam_size, e.length_penalty, e.extra_length, e.min_length
    lengths = [len(read[number]) for number in given]
    for n, best in run.each(name, decode, lengths, most, e.batch_size, arrays):
        tokens, score = best.tokens[0, : best.lengths[0]].tolist(), float(best.scores[0])
        run.check_finite(np.isfinite(score))
        # A line break would make two lines of one; `splitlines` knows every kind of line break.
        text = " ".join(tokenizer.decode(tokens[:-1]).splitlines())
        found[given[n]] = Translation(text, tokens, score, len(ids[given[n]]) >= most)
    return found


def translated(run: CompiledRun) -> tuple[dict[str, Any], list[str]]:
    """The scores of the translations of a split by beam search, and the translations."""
    evaluation = run.evaluation
    texts, references = zip(*open_split(run.config, evaluation.split), strict=True)
    before, begin = len(run.compile_seconds), time.perf_counter()
    translations = translate(run, evaluation, texts)
    compiling = sum(run.compile_seconds[before:])
    seconds = time.perf_counter() - begin - compiling
    hypotheses = [translation.text for translation in translations]
    tokens = sum(len(translation.tokens) for translation in translations)
    settings = ("beam_size", "length_penalty", "min_length", "extra_length", "bleu_tokenizer")
    return {
        **translation_scores(hypotheses, references, evaluation.bleu_tokenizer),
        **{name: getattr(evaluation, name) for name in settings},
        "sentences": len(texts),
        "truncated_sources": sum(translation.truncated for translation in translations),
        "output_tokens": tokens,
        "seconds": seconds,
        "compile_seconds": compiling,
        "sentences_per_second": len(texts) / seconds,
        "output_tokens_per_second": tokens / seconds,
    }, hypotheses


class TranslatedSample:
    """BLEU while training: of the first `train.eval_translate` pairs of validation, greedily.

    All processes of a run call it together: each has all texts, and gets all translations.
    """

    def __init__(self, config: Config, mesh: Mesh, tokenizer: AnyTokenizer, model: nn.Module):
        self._greedy = replace(config.evaluation, beam_size=1)
        self._run = CompiledRun(Path(config.workdir), config, mesh, tokenizer, model, None, [])
        pairs = itertools.islice(open_split(config, "validation"), config.train.eval_translate)
        self._texts, self._references = [list(side) for side in zip(*pairs, strict=True)]
        check_bleu(self._greedy.bleu_tokenizer)

    def __call__(self, params: Any) -> dict[str, Any]:
        found = translate(replace(self._run, params=params), self._greedy, self._texts)
        texts, tokenizer = [one.text for one in found], self._greedy.bleu_tokenizer
        return {"bleu": translation_scores(texts, self._references, tokenizer)["bleu"]}


def search(
    model: Any, params: Any, sources: jax.Array, limits: jax.Array, **settings: Any
) -> Hypotheses:
    """`beam_search` of the best translation of sources [B, S], of at most limits [B] tokens."""
    model, params = decoding.unrolled(model, params)
    fixed, moving = start(model, params, sources, settings["max_length"])
    fixed = decoding.expand_to_beams(fixed, settings["beam_size"], model.cache_batch_axis)
    return decoding.beam_search(
        functools.partial(step, model, params, fixed),
        moving,
        limits,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=PAD,
        forbidden_ids=decoding.FORBIDDEN,
        num_hypotheses=1,
        batch_axis=model.cache_batch_axis,
        **settings,
    )


def start(model: Any, params: Any, sources: jax.Array, length: int) -> tuple[dict, dict]:
    """The leaves of the cache that cross-attention reads, alike for all beams; and the others."""
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
