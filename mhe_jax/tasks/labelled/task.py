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
from mhe_jax.data import AnyTokenizer, EvaluationBatches, Source, TrainBatches
from mhe_jax.data.cache import key_of_all
from mhe_jax.data.examples import Row
from mhe_jax.data.sources import Items
from mhe_jax.model import ChoiceScorer, Classifier, Regressor, SpanFinder
from mhe_jax.tasks.labelled import scores
from mhe_jax.tasks.labelled.batches import EvaluationExamples, Rows, TrainExamples
from mhe_jax.tasks.labelled.examples import (
    Question,
    given_example,
    given_question,
    label_names,
    read_examples,
    read_questions,
)
from mhe_jax.tasks.labelled.rows import LabelledRows, empty_row
from mhe_jax.tasks.labelled.submission import submission
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import WindowRows
from mhe_jax.tasks.sums import squared_error_sums
from mhe_jax.tasks.task import Batch, Outputs, Result, Sums, Task, TrainedRun, not_a_number


class LabelledTask(Task):
    """A task on labelled examples. Its score is the official one of the data set."""

    inputs = ("tokens", "token_types", "marks")
    loss_unit = "nats an example"
    row_type: type[LabelledRows] = LabelledRows

    @property
    def batch_names(self) -> tuple[str, ...]:
        """The arrays of every task, and the number of each example."""
        return (*super().batch_names, "index")

    def losses(self, logits: jax.Array, batch: Batch, label_smoothing: float) -> Sums:
        """Only the losses and `count`: the official score says how good the predictions are."""
        found = super().losses(logits, batch, label_smoothing)
        names = ("loss", "unsmoothed_loss", "count")
        return {name: found[name] for name in names if name in found}

    def outputs(self, logits: jax.Array, batch: Batch) -> Sums:
        """The outputs of the model, and the numbers of the examples."""
        return {"outputs": logits, "index": batch["index"]}

    def num_classes(self, labels: tuple[str, ...]) -> int | None:
        """`model.num_classes` for these labels; None where the head has a shape of its own."""
        return None

    def resolve(self, config: Config) -> Config:
        """The config, completed from its data set: labels, and the shape of the head.

        Labels are read only for `own` examples, from `data.train`.
        """
        row, labels = row_of(config), label_names(config)
        classes = self.num_classes(labels)
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
        """Reads the whole split."""
        scores.require(row_of(config))
        self.examples(config, split)

    def text(self, config: Config) -> Source:
        """All texts of the training split."""
        found = (text for example in self.examples(config, "train") for text in example.texts)
        texts = list(dict.fromkeys(found))
        return Items(", ".join(config.data.train), texts, "text", key=key_of_all(texts))

    def rows(
        self, config: Config, tokenizer: AnyTokenizer, split: str, spelling_noise: float = 0.0
    ) -> Rows:
        """The examples of a split as rows."""
        return self.row_type.read(config, tokenizer, split, spelling_noise)

    def given(self, config: Config, item: Any, where: str) -> Any:
        """An example that a user gives, without a label: its texts, or fields by name.

        Raises:
          InputError: it lacks what an example of the data set has; `where` names it.
        """
        return given_example(config, item, where)

    def rows_of(self, config: Config, tokenizer: AnyTokenizer, examples: Sequence[Any]) -> Rows:
        """Examples as rows, like those of a split."""
        return self.row_type(config, tokenizer, examples)

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        """Examples of similar length."""
        rows = self.rows(config, tokenizer, "train")
        return TrainExamples(config, rows, process_index, process_count)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """All examples in order of length, misspelt with `evaluation.spelling_noise`."""
        rows = self.rows(config, tokenizer, split, config.evaluation.spelling_noise)
        return EvaluationExamples(config, rows, batch_size, *process)

    def empty_row(self, config: Config) -> Row:
        """The arrays of a row, all zeros."""
        return empty_row(config.data.sequence_length)

    def scores(self, batches: EvaluationBatches, outputs: Outputs) -> dict[str, float]:
        """The official metrics of the data set, and their `score`."""
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
        """(tokens, token_types, marks [B, T]) -> logits [B, C]."""
        return Classifier(config, right_padded=True)

    def num_classes(self, labels: tuple[str, ...]) -> int | None:
        """A class for each label."""
        return len(labels)


class NumberRows(LabelledRows):
    """Rows whose label is a number."""

    label_type = np.float32


class Regression(LabelledTask):
    """A number for a text, or for a pair of texts."""

    loss_unit = "squared error"
    row_type = NumberRows

    def model(self, config: ModelConfig) -> nn.Module:
        """(tokens, token_types, marks [B, T]) -> numbers [B]."""
        return Regressor(config, right_padded=True)

    def losses(self, logits: jax.Array, batch: Batch, label_smoothing: float) -> Sums:
        """Squared errors."""
        return squared_error_sums(logits, batch["labels"], batch["weights"])

    def empty_row(self, config: Config) -> Row:
        """A row with a label that is a number."""
        return super().empty_row(config) | {"labels": np.zeros((), np.float32)}


class ChoiceRows(LabelledRows):
    """Rows of `bos A eos C_c eos` for each choice c: tokens, token_types, marks [C, T]."""

    def arrays(self, number: int, length: int) -> tuple[np.ndarray, ...]:
        """The first text of an example with each of the others."""
        rows = [self.pair(number, choice, length) for choice in range(1, self.num_texts)]
        return tuple(np.stack(parts) for parts in zip(*rows, strict=True))


class MultipleChoice(LabelledTask):
    """Which of C texts goes with a given one; each is scored by itself."""

    row_type = ChoiceRows

    def model(self, config: ModelConfig) -> nn.Module:
        """(tokens, token_types, marks [B, C, T]) -> scores [B, C]."""
        return ChoiceScorer(config, right_padded=True)

    def empty_row(self, config: Config) -> Row:
        """A row of an example, with a row of tokens for each choice."""
        shape = (len(row_of(config).texts) - 1, config.data.sequence_length)
        texts = {name: np.zeros(shape, np.int32) for name in self.inputs}
        return super().empty_row(config) | texts


class Span(LabelledTask):
    """Where in a context an answer begins and ends; a long context is read in windows."""

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
