"""Batches of labelled examples of similar length, and the scores of a model's outputs.

All batches have `batch_size` rows, padded to the shortest of at most six lengths that holds them.
An epoch shuffles the rows, sorts them by length within each `POOL` batches, cuts them into batches
and shuffles these. Each row appears once; the last rows of one batch are padding of weight 0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mhe_jax.config import Config
from mhe_jax.data import examples
from mhe_jax.data.batches import Epochs, EvaluationBatches, TrainBatches
from mhe_jax.data.cache import key_of_all
from mhe_jax.data.examples import Row
from mhe_jax.data.pairs import by_length, choose_buckets
from mhe_jax.tasks.labelled.answers import answer_scores, best_threshold
from mhe_jax.tasks.labelled.rows import LabelledRows
from mhe_jax.tasks.labelled.scores import official_scores, with_score
from mhe_jax.tasks.labelled.windows import Answer, WindowRows
from mhe_jax.tasks.task import Outputs

POOL = 50  # batches that are sorted together
Rows = LabelledRows | WindowRows


def _batch(rows: Rows, numbers: np.ndarray, length: int) -> Row:
    """The rows with these numbers; -1 is padding."""
    found = [rows.row(int(number), length) for number in numbers if number >= 0]
    if len(found) < len(numbers):
        shortest = rows.row(int(rows.lengths.argmin()), length)  # fits into every batch
        padding = examples.padding_like(shortest) | {"index": np.array(-1, np.int32)}
        found += [padding] * (len(numbers) - len(found))
    return examples.stack(found)


class TrainExamples(TrainBatches):
    """Endless batches, planned as the module says."""

    steps_per_epoch: int

    def __init__(
        self,
        config: Config,
        rows: Rows,
        process_index: int = 0,
        process_count: int = 1,
    ):
        super().__init__(process_index, process_count)
        data = config.data
        self._rows = rows
        self.text = key_of_all(rows.records)
        self._name = ", ".join(data.train)
        self._seed, self._size = config.train.seed, data.batch_size
        self._own = self._own_rows(data.batch_size)
        lengths = self._rows.lengths
        self.buckets = data.length_buckets or choose_buckets(lengths, data.sequence_length)
        self.steps_per_epoch = -(-len(self._rows) // self._size)
        self._epoch = Epochs(self._plan)

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"{self._name}: {self._rows.describe()}; an epoch is {self.steps_per_epoch:,} steps; "
            f"{self._size} rows of length {', '.join(map(str, self.buckets))}"
        )

    def _plan(self, epoch: int) -> np.ndarray:
        """The row numbers of each batch of an epoch, -1 for padding."""
        generator = np.random.default_rng([self._seed, epoch])
        order = generator.permutation(len(self._rows))
        pool = np.arange(len(order)) // (POOL * self._size)
        order = order[np.lexsort((self._rows.lengths[order], pool))]
        missing = self.steps_per_epoch * self._size - len(order)
        batches = np.concatenate([order, np.full(missing, -1)]).reshape(-1, self._size)
        return generator.permutation(batches)

    def batch(self, step: int) -> Row:
        """The rows that this process holds of global batch `step`."""
        epoch, i = divmod(step, self.steps_per_epoch)
        numbers = self._epoch(epoch)[i]
        longest = self._rows.lengths[numbers[numbers >= 0]].max()
        length = self.buckets[int(np.searchsorted(self.buckets, longest))]
        return _batch(self._rows, numbers[self._own], length)


class EvaluationExamples(EvaluationBatches):
    """All rows of a split in order of length, none left out.

    `plan` has the length of each batch and the numbers of its rows; None pads rows the least.
    """

    def __init__(
        self,
        config: Config,
        rows: Rows,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        *,
        plan: list[tuple[int, np.ndarray]] | None = None,
    ):
        super().__init__(process_index, process_count)
        self.rows = rows
        self.labelled = not rows.num_unlabelled
        self.num_examples = rows.num_examples
        self._size = batch_size
        self._own = self._own_rows(batch_size)
        self._version_2 = rows.dataset.may_be_unanswered
        self._threshold = config.evaluation.no_answer_threshold
        self._batches = plan or by_length(rows.lengths, config.data.sequence_length, batch_size)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def text(self) -> str:
        """A key of the examples, as they are read."""
        return key_of_all(self.rows.records)

    def batch(self, step: int) -> Row:
        """The rows that this process holds of batch `step`."""
        self._check(step)
        length, members = self._batches[step]
        numbers = np.full(self._size, -1)
        numbers[: len(members)] = members
        return _batch(self.rows, numbers[self._own], length)

    def predictions(self, outputs: Outputs) -> list[Any]:
        """The prediction of a model for each example, in order.

        The class or choice with the highest logit, a number as it is, or an `Answer` as
        `windows.py` says.
        """
        outputs = [(numbers[numbers >= 0], found[numbers >= 0]) for numbers, found in outputs]
        if isinstance(self.rows, WindowRows):
            return self.rows.answers(outputs)
        predicted = np.zeros(len(self.rows))
        for numbers, found in outputs:
            predicted[numbers] = found if found.ndim == 1 else found.argmax(axis=-1)
        return predicted.tolist()

    def texts(self, answers: Sequence[Answer]) -> list[str]:
        """The texts of answers; "" where version 2.0 gives none."""
        return [
            "" if self._version_2 and answer.no_answer > self._threshold else answer.text
            for answer in answers
        ]

    def scores(self, outputs: Outputs) -> dict[str, float]:
        """The official metrics, and their `score`; the labels must be known."""
        rows, predictions = self.rows, self.predictions(outputs)
        if isinstance(rows, LabelledRows):
            grouped = "exact_match" in rows.dataset.metrics
            labels = [example.label for example in rows.examples if example.label is not None]
            groups = [example.index[:2] for example in rows.examples] if grouped else ()
            return official_scores(rows.dataset, labels, predictions, groups)
        right = [[text for text, _ in question.answers] for question in rows.questions]
        found = answer_scores(self.texts(predictions), right, version_2=self._version_2)
        metrics = {name: 100.0 * float(np.mean(values)) for name, values in found.items()}
        if self._version_2:
            answerable = np.array([bool(answers) for answers in right])
            no_answer = np.array([answer.no_answer for answer in predictions])
            texts = [answer.text for answer in predictions]
            given = answer_scores(texts, right, version_2=True)
            for name, values in given.items():
                best, threshold = best_threshold(values, no_answer, answerable)
                metrics |= {f"best_{name}": 100.0 * best, f"best_{name}_threshold": threshold}
        return with_score(rows.dataset, metrics)
