"""Span: where in a context the answer to a question begins and ends (SQuAD)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import numpy as np

from mhe_jax.config import Config, InputError, ModelConfig
from mhe_jax.data import AnyTokenizer
from mhe_jax.data.examples import Row
from mhe_jax.model import SpanFinder
from mhe_jax.tasks.labelled.examples import Question, given_question, read_questions
from mhe_jax.tasks.labelled.task import LabelledTask
from mhe_jax.tasks.labelled.windows import WindowRows
from mhe_jax.tasks.task import Result, TrainedRun


class Span(LabelledTask):
    """Task `span`; a context that is too long for a row is read in windows."""

    loss_unit = "nats a start or end"

    def model(self, config: ModelConfig) -> nn.Module:
        """(tokens, token_types, marks [B, T]) -> logits [B, 2, T]."""
        return SpanFinder(config, right_padded=True)

    def examples(self, config: Config, split: str) -> list[Question]:
        """The questions of a split."""
        return read_questions(config, split)

    def evaluate(self, run: TrainedRun) -> Result:
        """Official metrics, and how answers were chosen."""
        return {
            **super().evaluate(run),
            "answer_length": run.evaluation.answer_length,
            "no_answer_threshold": run.evaluation.no_answer_threshold,
        }

    def check_split(self, config: Config, split: str) -> None:
        """Reads the whole split; a validation split must have a question with an answer."""
        super().check_split(config, split)
        if split == "validation" and not any(q.answers for q in self.examples(config, split)):
            raise InputError("data.validation: no question has an answer")

    def rows(
        self, config: Config, tokenizer: AnyTokenizer, split: str, spelling_noise: float = 0.0
    ) -> WindowRows:
        """The windows of a split as rows; nothing is misspelt."""
        return WindowRows.read(config, tokenizer, split)

    def given(self, config: Config, item: Any, where: str) -> Question:
        """A question with its context."""
        return given_question(config, item, where)

    def rows_of(
        self, config: Config, tokenizer: AnyTokenizer, examples: Sequence[Question]
    ) -> WindowRows:
        """Windows of questions."""
        return WindowRows(config, tokenizer, examples)

    def empty_row(self, config: Config) -> Row:
        """A row with a start and an end as labels."""
        of_labels = {"labels": np.zeros(2, np.int32), "weights": np.zeros(2, np.float32)}
        return super().empty_row(config) | of_labels
