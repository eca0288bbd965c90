"""The tasks on labelled examples, which tune an encoder: from records to the official score.

    tokens, token_types, marks [T]   labels, weights, index []

table.py       which data sets there are: fields, labels, official metrics, files of predictions
examples.py    records to texts and labels
rows.py        texts to rows, predictions to scores and files       windows.py    those of questions
batches.py     rows to batches
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from mhe_jax.config import Config, InputError, ModelConfig
from mhe_jax.data import AnyTokenizer, EvaluationBatches, Text, TrainBatches
from mhe_jax.data.examples import Row
from mhe_jax.model import Classifier, Regressor, SpanFinder
from mhe_jax.tasks.labelled.batches import EvaluationExamples, Rows, train_examples
from mhe_jax.tasks.labelled.examples import label_names, read_examples
from mhe_jax.tasks.labelled.rows import LabelledRows, misspelt
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import WindowRows
from mhe_jax.tasks.metrics import check_sklearn
from mhe_jax.tasks.sums import squared_error_sums
from mhe_jax.tasks.task import Batch, Found, Outputs, Result, Sums, Task, outputs_of


class LabelledTask(Task):
    """A task on labelled examples. Its score is the official one of the data set."""

    inputs = ("tokens", "token_types", "marks")
    loss_unit = "nats an example"

    @property
    def batch_names(self) -> tuple[str, ...]:
        return (*super().batch_names, "index")

    def losses(self, logits: jax.Array, batch: Batch, label_smoothing: float) -> Sums:
        """Only the losses and `count`: the official score says how good the predictions are."""
        found = super().losses(logits, batch, label_smoothing)
        names = ("loss", "unsmoothed_loss", "count")
        return {name: found[name] for name in names if name in found}

    def outputs(self, logits: jax.Array, batch: Batch) -> Sums:
        return {"outputs": logits, "index": batch["index"]}

    def resolve(self, config: Config) -> Config:
        """The config, completed from its data set: labels, and the shape of the head.

        Labels are read only for `own` examples, from `data.train`.
        """
        row = row_of(config)
        labels = label_names(config.data, row)
        classes = len(labels) if config.task == "classification" else None
        found = {
            "data.labels": (config.data.labels or None, labels or None),
            "model.num_classes": (config.model.num_classes, classes),
            "model.num_spans": (config.model.num_spans, row.num_spans),
        }
        for name, (given, right) in found.items():
            if given not in (None, right):
                raise InputError(
                    f"{name} is {given!r}: data.dataset {config.data.dataset} has {right!r}"
                )
        model = dataclasses.replace(config.model, num_classes=classes, num_spans=row.num_spans)
        return dataclasses.replace(
            config, model=model, data=dataclasses.replace(config.data, labels=labels)
        )

    def check_split(self, config: Config, split: str) -> None:
        row = row_of(config)
        if row.suite != "squad":
            check_sklearn({*row.metrics} - {"exact_match"})
        self.examples(config, split)

    def examples(self, config: Config, split: str) -> list[Any]:
        return read_examples(config.data, row_of(config), split)

    def texts(self, config: Config) -> list[tuple[Text, float]]:
        """All texts of the training split."""
        found = (text for example in self.examples(config, "train") for text in example.texts)
        items = [(text,) for text in dict.fromkeys(found)]
        return [(Text.of(", ".join(config.data.train), items), 1.0)]

    def rows(self, config: Config, tokenizer: AnyTokenizer, examples: Sequence[Any]) -> Rows:
        """Examples as rows, those of a split or given by hand."""
        return LabelledRows(row_of(config), tokenizer, examples, config.data.sequence_length)

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        rows = self.rows(config, tokenizer, self.examples(config, "train"))
        process = (process_index, process_count)
        return train_examples(config.data, config.train.seed, rows, *process)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """All examples in order of length, misspelt with `evaluation.spelling_noise`."""
        evaluation, longest = config.evaluation, config.data.sequence_length
        examples = self.examples(config, split)
        if evaluation.spelling_noise:
            examples = misspelt(examples, evaluation.spelling_noise, evaluation.seed)
        rows = self.rows(config, tokenizer, examples)
        return EvaluationExamples(rows, longest, batch_size, *process)

    def empty_row(self, config: Config) -> Row:
        row, texts = row_of(config), (config.data.sequence_length,)
        if row.task == "multiple_choice":
            texts = (len(row.texts) - 1, *texts)
        labels = (2,) if row.task == "span" else ()
        return {
            **{name: np.zeros(texts, np.int32) for name in self.inputs},
            "labels": np.zeros(labels, np.float32 if row.task == "regression" else np.int32),
            "weights": np.zeros(labels, np.float32),
            "index": np.zeros((), np.int32),
        }

    def scores(self, batches: EvaluationBatches, outputs: Outputs) -> dict[str, float]:
        assert isinstance(batches, EvaluationExamples)
        return batches.rows.scores(outputs)

    def result(self, config: Config, found: Found, batches: EvaluationBatches) -> Result:
        """Official metrics of a split whose labels are known."""
        assert isinstance(batches, EvaluationExamples)
        unlabelled = batches.rows.num_unlabelled
        return {
            "dataset": config.data.dataset,
            "spelling_noise": config.evaluation.spelling_noise,
            "seed": config.evaluation.seed,
            **({"unlabelled_examples": unlabelled} if unlabelled else self.measure(found, batches)),
            "examples": batches.rows.num_examples,
        }

    def files(self, config: Config, found: Found, batches: EvaluationBatches) -> dict[str, str]:
        """Predictions in the form in which the suite of the data set takes submissions."""
        assert isinstance(batches, EvaluationExamples)
        return batches.rows.submission(outputs_of(found))


class Classification(LabelledTask):
    """Which class a text, or a pair of texts, belongs to."""

    def model(self, config: ModelConfig) -> nn.Module:
        return Classifier(config, right_padded=True)


class Regression(LabelledTask):
    """A number for a text, or for a pair of texts."""

    loss_unit = "squared error"

    def model(self, config: ModelConfig) -> nn.Module:
        return Regressor(config, right_padded=True)

    def losses(self, logits: jax.Array, batch: Batch, label_smoothing: float) -> Sums:
        return squared_error_sums(logits, batch["labels"], batch["weights"])


class MultipleChoice(LabelledTask):
    """Which of C texts goes with a given one; each is scored by itself."""

    def model(self, config: ModelConfig) -> nn.Module:
        return Regressor(config, right_padded=True)


class Span(LabelledTask):
    """Where in a context an answer begins and ends; a long context is read in windows."""

    loss_unit = "nats a start or end"

    def model(self, config: ModelConfig) -> nn.Module:
        return SpanFinder(config, right_padded=True)

    def rows(self, config: Config, tokenizer: AnyTokenizer, examples: Sequence[Any]) -> Rows:
        parts = config.data, config.evaluation
        return WindowRows(row_of(config), tokenizer, examples, *parts)

    def check_split(self, config: Config, split: str) -> None:
        """Reads the whole split; a validation split must have a question with an answer."""
        questions = self.examples(config, split)
        if split == "validation" and not any(question.answers for question in questions):
            raise InputError("data.validation: no question has an answer")

    def result(self, config: Config, found: Found, batches: EvaluationBatches) -> Result:
        settings = {
            "answer_length": config.evaluation.answer_length,
            "no_answer_threshold": config.evaluation.no_answer_threshold,
        }
        return super().result(config, found, batches) | settings
