"""The tasks on labelled examples, which tune an encoder: from records to the official score.

    tokens, token_types, marks [T]   labels, weights, index []

table.py       which data sets there are: fields, labels, official metrics
examples.py    records to texts and labels
rows.py        texts to rows and batches, predictions to scores     windows.py    those of questions
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import numpy as np

from mhe_jax.config import Config, InputError, ModelConfig
from mhe_jax.config.fields import require, set_field, value_of
from mhe_jax.data import AnyTokenizer, EvaluationBatches, Text, TrainBatches
from mhe_jax.data.examples import Row
from mhe_jax.tasks.labelled.examples import Example, label_names, misspelt, read_examples
from mhe_jax.tasks.labelled.rows import EvaluationExamples, LabelledRows, Rows, train_examples
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import WindowRows
from mhe_jax.tasks.metrics import check_sklearn
from mhe_jax.tasks.sums import squared_error_sums
from mhe_jax.tasks.task import Batch, Found, Outputs, Result, Sums, Task, outputs_of


class LabelledTask(Task):
    """A task on labelled examples. Its score is the official one of the data set.

    classification     which class a text, or a pair of texts, belongs to
    multiple_choice    which of C texts goes with a given one; each is scored by itself
    span               where in a context an answer begins and ends; a long one is read in windows
    """

    inputs = ("tokens", "token_types", "marks")
    methods = ("predict", "encode")

    def __init__(self, head: type[nn.Module], loss_unit: str = "nats an example"):
        self.head, self.loss_unit = head, loss_unit

    def model(self, config: ModelConfig) -> nn.Module:
        return self.head(config, right_padded=True)

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
        for name, right in (
            ("data.labels", labels),
            ("model.num_classes", classes),
            ("model.num_spans", row.num_spans),
        ):
            allowed = value_of(config, name) in (None, (), right)
            require(config, name, allowed, f"data.dataset {config.data.dataset} has {right!r}")
            config = set_field(config, name, right)
        return config

    def check_split(self, config: Config, split: str) -> None:
        """Reads the whole split; a validation split must have a question with an answer."""
        row = row_of(config)
        if row.task != "span":
            check_sklearn(row.metrics)
        examples = read_examples(config.data, row, split)
        if row.task == "span" and split == "validation" and not any(e.answers for e in examples):
            raise InputError("data.validation: no question has an answer")

    def texts(self, config: Config) -> list[tuple[Text, float]]:
        """All texts of the training split."""
        examples = read_examples(config.data, row_of(config), "train")
        found = (text for example in examples for text in example.texts)
        items = [(text,) for text in dict.fromkeys(found)]
        return [(Text.of(", ".join(config.data.train), items), 1.0)]

    def rows(self, config: Config, tokenizer: AnyTokenizer, examples: Sequence[Example]) -> Rows:
        """Examples as rows, those of a split or given by hand."""
        row, data = row_of(config), config.data
        if row.task == "span":
            return WindowRows(row, tokenizer, examples, data, config.evaluation)
        return LabelledRows(row, tokenizer, examples, data.sequence_length)

    def train_batches(
        self, config: Config, tokenizer: AnyTokenizer, process_index: int, process_count: int
    ) -> TrainBatches:
        examples = read_examples(config.data, row_of(config), "train")
        rows = self.rows(config, tokenizer, examples)
        process = (process_index, process_count)
        return train_examples(config.data, config.train.seed, rows, *process)

    def evaluation_batches(
        self, config: Config, tokenizer: AnyTokenizer, split: str, batch_size: int, *process: int
    ) -> EvaluationBatches:
        """All examples in order of length, misspelt with `evaluation.spelling_noise`."""
        evaluation, longest = config.evaluation, config.data.sequence_length
        examples = read_examples(config.data, row_of(config), split)
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
        settings = ("spelling_noise", "seed")
        if config.task == "span":
            settings += ("answer_length", "no_answer_threshold")
        return {
            **({"unlabelled_examples": unlabelled} if unlabelled else self.measure(found, batches)),
            "dataset": config.data.dataset,
            "examples": len(batches.rows.examples),
            **{name: getattr(config.evaluation, name) for name in settings},
        }

    def files(self, config: Config, found: Found, batches: EvaluationBatches) -> dict[str, str]:
        assert isinstance(batches, EvaluationExamples)
        return batches.rows.files(outputs_of(found))


class Regression(LabelledTask):
    """A number for a text, or for a pair of texts."""

    def losses(self, logits: jax.Array, batch: Batch, label_smoothing: float) -> Sums:
        return squared_error_sums(logits, batch["labels"], batch["weights"])
