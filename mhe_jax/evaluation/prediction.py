"""Texts to labels with probabilities, numbers, or answers, by the rows of the task's evaluation.

classification, multiple_choice    p(label | text) = softmax(logits)      `Prediction`
regression                         a number                               float
span                               the best span of a context             `Answer`
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mhe_jax import tasks
from mhe_jax.config import EvaluationConfig
from mhe_jax.evaluation.programs import CompiledRun, padded_rows, plan
from mhe_jax.tasks.labelled.batches import EvaluationExamples
from mhe_jax.tasks.labelled.task import LabelledTask
from mhe_jax.tasks.labelled.windows import Answer
from mhe_jax.tasks.task import not_a_number


@dataclass(frozen=True)
class Prediction:
    """The most probable label of an example, and the probability of each."""

    label: str
    probabilities: dict[str, float]

    @property
    def probability(self) -> float:
        """The probability of the label."""
        return self.probabilities[self.label]


class Predictor:
    """Predicts the labels of examples, or answers questions, as the task's evaluation does."""

    def __init__(self, run: CompiledRun, evaluation: EvaluationConfig):
        task = tasks.of(run.config)
        assert isinstance(task, LabelledTask)
        self.run, self.task, self.evaluation = run, task, evaluation
        self.config = replace(run.config, evaluation=evaluation)

    def example(self, item: Any, where: str) -> Any:
        """A text, a tuple of texts or a dictionary as an example."""
        return self.task.given(self.config, item, where)

    def predict(self, examples: Sequence[Any]) -> list[Prediction] | list[float] | list[Answer]:
        """The prediction for each example, in order."""
        if not examples:
            return []
        rows = self.task.rows_of(self.config, self.run.tokenizer, examples)
        size = padded_rows(len(rows), self.evaluation.batch_size, self.run.mesh)
        batches = EvaluationExamples(
            self.config, rows, size, plan=plan(rows.lengths, size, self.config.data.sequence_length)
        )
        found = [(sums["index"], sums["outputs"]) for sums in self.run.sums_of(batches)]
        if not all(np.isfinite(outputs[numbers >= 0]).all() for numbers, outputs in found):
            raise not_a_number(self.run.workdir)
        predictions = batches.predictions(found)
        if self.config.facts.questions:
            texts = batches.texts(predictions)
            return [replace(one, text=text) for one, text in zip(predictions, texts, strict=True)]
        labels = self.config.data.labels
        if not labels:
            return predictions
        logits = np.zeros((len(rows), len(labels)))
        for numbers, outputs in found:
            logits[numbers[numbers >= 0]] = outputs[numbers >= 0]
        probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
        return [
            Prediction(labels[int(best)], dict(zip(labels, of.tolist(), strict=True)))
            for best, of in zip(predictions, probabilities, strict=True)
        ]
