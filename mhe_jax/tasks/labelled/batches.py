"""Batches of labelled examples of similar length, and the scores of a model's outputs.

All batches have `batch_size` rows, padded to the shortest of at most six lengths that holds them.
An epoch shuffles the rows, sorts them by length within each `POOL` batches, cuts them into batches
and shuffles these. Each row appears once; the last rows of one batch are padding of weight 0.
"""

import functools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from mhe_jax.config import Config
from mhe_jax.data import examples
from mhe_jax.data.batches import (
    ENDLESS,
    EvaluationBatches,
    Part,
    Planned,
    TrainBatches,
    padded,
)
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


def _plan(rows: Rows, length: int, numbers: np.ndarray) -> Planned:
    """A batch of the rows with these numbers, in `length`; -1 is padding."""

    def make(number: int) -> Row:
        if number >= 0:
            return rows.row(number, length)
        shortest = rows.row(int(rows.lengths.argmin()), length)  # fits into every batch
        return examples.padding_like(shortest) | {"index": np.array(-1, np.int32)}

    return Planned(make, numbers)


def train_examples(config: Config, rows: Rows, *process: int) -> TrainBatches:
    """Endless batches, planned as the module says."""
    data, size, lengths = config.data, config.data.batch_size, rows.lengths
    buckets = data.length_buckets or choose_buckets(lengths, data.sequence_length)
    steps = -(-len(rows) // size)

    @functools.lru_cache(2)
    def shuffled(epoch: int) -> np.ndarray:
        """The row numbers of each batch of an epoch, -1 for padding."""
        generator = np.random.default_rng([config.train.seed, epoch])
        order = generator.permutation(len(rows))
        pool = np.arange(len(order)) // (POOL * size)
        order = order[np.lexsort((lengths[order], pool))]
        return generator.permutation(padded(order, steps * size).reshape(-1, size))

    def plan(step: int) -> Planned:
        epoch, i = divmod(step, steps)
        numbers = shuffled(epoch)[i]
        longest = lengths[numbers[numbers >= 0]].max()
        return _plan(rows, buckets[int(np.searchsorted(buckets, longest))], numbers)

    about = f"{', '.join(data.train)}: {rows.describe()}; {size} rows of length "
    about += ", ".join(map(str, buckets))
    plans = grain.MapDataset.range(ENDLESS).map(plan)
    return TrainBatches(plans, Part(plans, steps, key_of_all(rows.records), about), steps, *process)


class EvaluationExamples(EvaluationBatches):
    """All rows of a split in order of length, none left out.

    `plan` has the length of each batch and the numbers of its rows; None pads rows the least.
    """

    def __init__(
        self,
        config: Config,
        rows: Rows,
        batch_size: int,
        *process: int,
        plan: list[tuple[int, np.ndarray]] | None = None,
    ):
        self.rows = rows
        self.labelled = not rows.num_unlabelled
        self.num_examples = rows.num_examples
        self._version_2 = rows.dataset.may_be_unanswered
        self._threshold = config.evaluation.no_answer_threshold
        batches = plan or by_length(rows.lengths, config.data.sequence_length, batch_size)

        def planned(step: int) -> Planned:
            length, numbers = batches[step]
            return _plan(rows, length, padded(numbers, batch_size))

        plans = grain.MapDataset.range(len(batches)).map(planned)
        super().__init__(plans, key_of_all(rows.records), *process)

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
