"""Texts to vectors: the output of a run's encoder, for each token or pooled.

bos A eos        an encoder reads        A eos        that of a translator

mean     Σ_i x_i / n over the n tokens of the text, those around it included        [M]
first    x_0                                                                        [M]
None     all of them                                                                [n, M]
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.data import BOS, EOS, PAD
from mhe_jax.evaluation.programs import CompiledRun, padded_rows, plan
from mhe_jax.tasks.task import not_a_number

Pooling = Literal["mean", "first"] | None


def encode(
    run: CompiledRun, evaluation: EvaluationConfig, pooling: Pooling, texts: Sequence[str]
) -> np.ndarray | list[np.ndarray]:
    """Float32 [N, M] of N texts, in order; without pooling, a list of N arrays [n, M]."""
    if pooling not in ("mean", "first", None):
        raise InputError(f"pooling is {pooling!r}: takes mean, first or None")
    model: Any = run.model
    translates = run.config.task == "translation"
    begin = [] if translates else [BOS]
    longest = run.config.model.max_length if translates else run.config.data.sequence_length

    def program(params: Any, inputs: dict[str, jax.Array]) -> jax.Array:
        named = dict(inputs)
        tokens = named.pop("tokens")
        x = model.apply({"params": params}, tokens, **named, method="encode").astype(jnp.float32)
        if pooling is None:
            return x
        if pooling == "first":
            return x[:, 0]
        inside = (tokens != PAD).astype(x.dtype)[:, :, None]
        return jnp.sum(x * inside, axis=1) / jnp.maximum(jnp.sum(inside, axis=1), 1)

    ids = [
        [*begin, *row[: longest - len(begin) - 1], EOS] for row in run.tokenizer.encode_batch(texts)
    ]
    found = [np.zeros(0, np.float32)] * len(ids)
    rows = padded_rows(len(ids), evaluation.batch_size, run.mesh)
    for length, numbers in plan([len(row) for row in ids], rows, longest):
        tokens = np.full((rows, length), PAD, np.int32)
        for row, number in enumerate(numbers):
            tokens[row, : len(ids[number])] = ids[number]
        call = run.programs(("encode", pooling), program, run.tokenizer.inputs(tokens))
        for number, x in zip(numbers, jax.device_get(call()), strict=False):
            found[number] = x[: len(ids[number])] if pooling is None else x
    if not all(np.isfinite(x).all() for x in found):
        raise not_a_number(run.workdir)
    if pooling is None:
        return found
    return np.stack(found) if found else np.zeros((0, run.config.model.features), np.float32)
