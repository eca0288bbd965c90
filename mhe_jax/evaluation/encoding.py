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


class TextEncoder:
    """Encodes texts with the encoder of a run.

    It reads only as much of a text as fits into `data.sequence_length` tokens (for a translator,
    `model.max_length`).
    """

    def __init__(self, run: CompiledRun, evaluation: EvaluationConfig, pooling: Pooling):
        if pooling not in ("mean", "first", None):
            raise InputError(f"pooling is {pooling!r}: takes mean, first or None")
        self.run, self.evaluation, self.pooling = run, evaluation, pooling
        self.model: Any = run.model
        translates = run.config.task == "translation"
        self._begin = [] if translates else [BOS]
        c = run.config
        self._longest = c.model.max_length if translates else c.data.sequence_length

    def encode(self, texts: Sequence[str]) -> np.ndarray | list[np.ndarray]:
        """Float32 [N, M] of N texts, in order; without pooling, a list of N arrays [n, M].

        Raises:
          InputError: the model's output is not a number.
        """
        around = len(self._begin) + 1
        ids = [
            [*self._begin, *row[: self._longest - around], EOS]
            for row in self.run.tokenizer.encode_batch(texts)
        ]
        found = [np.zeros(0, np.float32)] * len(ids)
        rows = padded_rows(len(ids), self.evaluation.batch_size, self.run.mesh)
        for length, numbers in plan([len(row) for row in ids], rows, self._longest):
            tokens = np.full((rows, length), PAD, np.int32)
            for row, number in enumerate(numbers):
                tokens[row, : len(ids[number])] = ids[number]
            inputs = self.run.tokenizer.inputs(tokens)
            program = self.run.programs(("encode", self.pooling), self._encode, inputs)
            for number, x in zip(numbers, jax.device_get(program()), strict=False):
                found[number] = x[: len(ids[number])] if self.pooling is None else x
        if not all(np.isfinite(x).all() for x in found):
            raise not_a_number(self.run.workdir)
        if self.pooling is None:
            return found
        return np.stack(found) if found else np.zeros((0, self.run.config.model.features), "f")

    def _encode(self, params: Any, inputs: dict[str, jax.Array]) -> jax.Array:
        tokens, variables = inputs["tokens"], {"params": params}
        named = {name: array for name, array in inputs.items() if name != "tokens"}
        x = self.model.apply(variables, tokens, **named, method="encode").astype(jnp.float32)
        if self.pooling is None:
            return x
        if self.pooling == "first":
            return x[:, 0]
        inside = (tokens != PAD).astype(x.dtype)[:, :, None]
        return jnp.sum(x * inside, axis=1) / jnp.maximum(jnp.sum(inside, axis=1), 1)
