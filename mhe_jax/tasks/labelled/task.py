"""The tasks on labelled examples, which tune an encoder, and what they share.

tokens, token_types, marks [T]   labels, weights, index []
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
from mhe_jax.tasks.labelled import scores
from mhe_jax.tasks.labelled.batches import EvaluationExamples, Rows, train_examples
from mhe_jax.tasks.labelled.examples import (
    Question,
    given_example,
    given_question,
    label_names,
    read_examples,
    read_questions,
)
from mhe_jax.tasks.labelled.rows import LabelledRows
from mhe_jax.tasks.labelled.submission import submission
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import WindowRows
from mhe_jax.tasks.sums import squared_error_sums
from mhe_jax.tasks.task import Batch, Outputs, Result, Sums, Task, TrainedRun, not_a_number


class LabelledTask(Task):
    """A task on labelled examples. Its score is the official one of the data set."""

    inputs = ("tokens", "token_types", "marks")
    loss_unit = "nats an example"
    row_type: type[Rows] = LabelledRows

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
        row, labels = row_of(config), label_names(config)
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

    def examples(self, config: Config, split: str) -> list[Any]:
        """The examples of a split, each with all of its `texts`."""
        return read_examples(config, split)

    def check_split(self, config: Config, split: str) -> None:
        scores.require(row_of(config))
        self.examples(config, split)

    def texts(self, config: Config) -> list[tuple[Text, float]]:
        """All texts of the training split."""
        found = (text for example in self.examples(config, "train") for text in example.texts)
        items = [(text,) for text in dict.fromkeys(found)]
        return [(Text.of(", ".join(config.data.train), items), 1.0)]

    def rows(
        self, config: Config, tokenizer: AnyTokenizer, split: str, spelling_noise: float = 0.0
    ) -> Rows:
        return self.row_type.read(config, tokenizer, split, spelling_noise)

    def given(self, config: Config, item: Any, where: str) -> Any:
        """An example that a user gives, without a label: its texts, or fields by name."""
        return given_example(config, item, where)

    def rows_of(self, config: Config, tokenizer: AnyTokenizer, examples: Sequence[Any]) -> Rows:
        """Examples as rows, like those of a split."""
        return self.row_type(config, tokenizer, examples)

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        rows = self.rows(config, tokenizer, "train")
        return train_examples(config, rows, process_index, process_count)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """All examples in order of length, misspelt with `evaluation.spelling_noise`."""
        rows = self.rows(config, tokenizer, split, config.evaluation.spelling_noise)
        return EvaluationExamples(config, rows, batch_size, *process)

    def empty_row(self, config: Config) -> Row:
        length = config.data.sequence_length
        zero = np.zeros((), np.int32)
        return {
            **{name: np.zeros(length, np.int32) for name in self.inputs},
            **{"labels": zero, "weights": np.zeros((), np.float32), "index": zero},
        }

    def scores(self, batches: EvaluationBatches, outputs: Outputs) -> dict[str, float]:
        assert isinstance(batches, EvaluationExamples)
        return batches.scores(outputs)

    def evaluate(self, run: TrainedRun) -> Result:
        """Official metrics of a split whose labels are known; predictions in SPLIT.predictions.*.

        The file has the form in which the suite of the data set takes submissions.
        """
        found, batches, seconds = run.outputs()
        assert isinstance(batches, EvaluationExamples)
        outputs = [(batch["index"], batch["outputs"]) for batch in found]
        if not all(np.isfinite(output).all() for _, output in outputs):
            raise not_a_number(run.workdir)
        for suffix, text in submission(run.config, batches, outputs).items():
            run.publish(suffix, text)
        unlabelled = {"unlabelled_examples": batches.rows.num_unlabelled}
        metrics = self.measure(found, batches) if batches.labelled else unlabelled
        return {
            **run.described(),
            "dataset": run.config.data.dataset,
            "spelling_noise": run.evaluation.spelling_noise,
            "seed": run.evaluation.seed,
            **metrics,
            "examples": batches.num_examples,
            "seconds": seconds,
            "examples_per_second": batches.num_examples / seconds,
        }


class Classification(LabelledTask):
    """Which class a text, or a pair of texts, belongs to."""

    def model(self, config: ModelConfig) -> nn.Module:
        return Classifier(config, right_padded=True)


class NumberRows(LabelledRows):
    """Rows whose label is a number."""

    label_type = np.float32


class Regression(LabelledTask):
    """A number for a text, or for a pair of texts."""

    loss_unit = "squared error"
    row_type = NumberRows

    def model(self, config: ModelConfig) -> nn.Module:
        return Regressor(config, right_padded=True)

    def losses(self, logits: jax.Array, batch: Batch, label_smoothing: float) -> Sums:
        return squared_error_sums(logits, batch["labels"], batch["weights"])

    def empty_row(self, config: Config) -> Row:
        return super().empty_row(config) | {"labels": np.zeros((), np.float32)}


class ChoiceRows(LabelledRows):
    """Rows of `bos A eos C_c eos` for each choice c: tokens, token_types, marks [C, T]."""

    def arrays(self, number: int, length: int) -> tuple[np.ndarray, ...]:
        rows = [self.pair(number, choice, length) for choice in range(1, self.num_texts)]
        return tuple(np.stack(parts) for parts in zip(*rows, strict=True))


class MultipleChoice(LabelledTask):
    """Which of C texts goes with a given one; each is scored by itself."""

    row_type = ChoiceRows

    def model(self, config: ModelConfig) -> nn.Module:
        return Regressor(config, right_padded=True)

    def empty_row(self, config: Config) -> Row:
        shape = (len(row_of(config).texts) - 1, config.data.sequence_length)
        texts = {name: np.zeros(shape, np.int32) for name in self.inputs}
        return super().empty_row(config) | texts


class Span(LabelledTask):
    """Where in a context an answer begins and ends; a long context is read in windows."""

    loss_unit = "nats a start or end"
    row_type = WindowRows

    def model(self, config: ModelConfig) -> nn.Module:
        return SpanFinder(config, right_padded=True)

    def examples(self, config: Config, split: str) -> list[Question]:
        return read_questions(config, split)

    def evaluate(self, run: TrainedRun) -> Result:
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

    def given(self, config: Config, item: Any, where: str) -> Question:
        return given_question(config, item, where)

    def empty_row(self, config: Config) -> Row:
        of_labels = {"labels": np.zeros(2, np.int32), "weights": np.zeros(2, np.float32)}
        return super().empty_row(config) | of_labels
