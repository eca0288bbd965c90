"""The probability that a model gives to texts, token by token.

lm             log p(x_i | x_0 .. x_{i-1})        for each token of a text, and eos
translation    log p(y_i | y_0 .. y_{i-1}, x)     for each token of a target, and eos
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mhe_jax import tasks
from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.data import EOS, Tokenizer, examples
from mhe_jax.data.rows import num_windows
from mhe_jax.evaluation.programs import CompiledRun, padded_rows, plan
from mhe_jax.evaluation.texts import text_of
from mhe_jax.tasks.sums import label_nats
from mhe_jax.tasks.task import not_a_number


@dataclass(frozen=True, eq=False)
class Scored:
    """A text with the log-probability of each of its tokens, eos last."""

    tokens: list[int]
    pieces: list[str]  # a space is \u2581, a byte <0x00>
    log_probs: np.ndarray  # float32 [n]

    @property
    def total(self) -> float:
        """The log-probability of the whole."""
        return float(self.log_probs.sum(dtype=np.float64))


class Scorer:
    """Scores texts, or pairs of source and target, by the rows of the task's evaluation.

    A text of more than `data.sequence_length` tokens is read in windows of `evaluation.stride`, as
    for the score of a split; without a stride, in blocks that each begin anew.
    """

    def __init__(self, run: CompiledRun, evaluation: EvaluationConfig):
        assert isinstance(run.tokenizer, Tokenizer)
        self.run, self.evaluation, self.tokenizer = run, evaluation, run.tokenizer
        self.task = tasks.of(run.config)
        self._pairs = run.config.task == "translation"
        c = run.config
        self._longest = c.model.max_length if self._pairs else c.data.sequence_length

    def item(self, item: Any, where: str) -> list[list[int]]:
        """The tokens of a text, or of a source and a target, each with eos."""
        if not self._pairs:
            return [[*self.tokenizer.encode(text_of(item, where)), EOS]]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(f"{where} is not a pair: takes (source, target)")
        sides = [[*self.tokenizer.encode(text_of(text, where)), EOS] for text in item]
        if (most := max(map(len, sides))) > self._longest:
            raise InputError(
                f"{where} has {most} tokens with eos: takes at most "
                f"model.max_length={self._longest} on each side"
            )
        return sides

    def score(self, items: Sequence[list[list[int]]]) -> list[Scored]:
        """The scores of each text, in order."""
        windows = [
            window for number in range(len(items)) for window in self._windows(items, number)
        ]
        found = [np.zeros(len(sides[-1]), np.float32) for sides in items]
        rows = padded_rows(len(windows), self.evaluation.batch_size, self.run.mesh)
        lengths = [max(map(len, sides)) for _, _, _, sides in windows]
        for length, numbers in plan(lengths, rows, self._longest):
            made = [self._row(windows[number][-1], length) for number in numbers]
            made += [examples.padding_like(made[0])] * (rows - len(made))
            batch = examples.stack(made)
            inputs = [batch[name] for name in (*self.task.inputs, "labels")]
            log_probs = jax.device_get(self.run.programs("log_probs", self._log_probs, *inputs)())
            for number, of_row in zip(numbers, log_probs, strict=False):
                text, start, known, sides = windows[number]
                stop = len(sides[-1])
                found[text][start + known : start + stop] = of_row[known:stop]
        if not all(np.isfinite(log_probs).all() for log_probs in found):
            raise not_a_number(self.run.workdir)
        return [
            Scored(sides[-1], self.tokenizer.pieces(sides[-1]), log_probs)
            for sides, log_probs in zip(items, found, strict=True)
        ]

    def _windows(self, items: Sequence[list[list[int]]], number: int) -> list[tuple]:
        """Of each window: the number of its text, its place, tokens known there already, tokens."""
        if self._pairs:
            return [(number, 0, 0, items[number])]
        (tokens,), T = items[number], self._longest
        stride = self.evaluation.stride or T
        return [
            (number, k * stride, T - stride if k else 0, [tokens[k * stride :][:T]])
            for k in range(num_windows(len(tokens), T, stride))
        ]

    def _row(self, sides: list[list[int]], length: int) -> examples.Row:
        if not self._pairs:
            return examples.lm_row(sides[0], length)
        source, target = sides
        return examples.translation_row(source, target, length)

    def _log_probs(self, params: Any, *inputs: jax.Array) -> jax.Array:
        *read, labels = inputs
        logits: Any = self.run.model.apply({"params": params}, *read)
        return -label_nats(logits, labels)[0]
