"""Labelled examples as rows and batches; predictions to scores and files.

    one text         bos A eos                  token types 0
    two texts        bos A eos B eos            token types 0 up to the first eos, then 1
    choices          bos A eos C_c eos          for each choice c

With hashed words, two eos separate two texts; the second belongs to B. If texts are too long for a
row, the longer one is cut at its end, then both alike. `marks` is s at the tokens of span s = 1, 2,
... and 0 elsewhere. A row has a length T that a batch decides:

    tokens, token_types, marks [T] ([C, T] of C choices)   labels, weights, index []

and, for hashed words without a table, signatures [T, 16] ([C, T, 16]).

All batches have `batch_size` rows of similar length, padded to the shortest of at most six lengths
that holds them. An epoch shuffles the rows, sorts them by length within each `POOL` batches, cuts
them into batches and shuffles these. Each row appears once; the last rows of one batch are padding
of weight 0.
"""

import functools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from mhe_jax.config import DataConfig
from mhe_jax.config.data import BOS, EOS
from mhe_jax.data.batches import (
    ENDLESS,
    EvaluationBatches,
    Part,
    Planned,
    TrainBatches,
    by_length,
    choose_buckets,
    padded,
)
from mhe_jax.data.cache import key_of_all
from mhe_jax.data.examples import Row, padding_like
from mhe_jax.data.words import AnyTokenizer
from mhe_jax.tasks.labelled.examples import Example
from mhe_jax.tasks.labelled.table import DatasetRow, official_scores
from mhe_jax.tasks.task import Outputs

POOL = 50  # batches that are sorted together


class Rows:
    """Tokenized examples; a subclass says what their rows and predictions are."""

    lengths: np.ndarray  # of each row
    num_unlabelled: int
    about: str

    def __init__(self, dataset: DatasetRow, tokenizer: AnyTokenizer, examples: Sequence[Example]):
        self.dataset, self.tokenizer, self.examples = dataset, tokenizer, examples

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Piece numbers of each text, int32."""
        found = self.tokenizer.encode_batch(texts, num_threads=-1)
        return [np.array(ids, np.int32) for ids in found]

    @property
    def key(self) -> str:
        """Another for other examples."""
        return key_of_all((e.texts, e.label, e.spans, e.answers) for e in self.examples)

    def row(self, number: int, length: int) -> Row:
        """Row `number` with `length`, which must hold it."""
        raise NotImplementedError

    def predictions(self, outputs: Outputs) -> list[Any]:
        """The class, choice, number or answer of each example."""
        raise NotImplementedError

    def scores(self, outputs: Outputs) -> dict[str, float]:
        """The official metrics, and their `score`; the labels must be known."""
        raise NotImplementedError

    def files(self, outputs: Outputs) -> dict[str, str]:
        """The predictions, {suffix: text}."""
        raise NotImplementedError

    def planned(self, length: int, numbers: np.ndarray) -> Planned:
        """A batch of the rows with these numbers, in `length`; -1 is padding."""

        def make(number: int) -> Row:
            if number >= 0:
                return self.row(number, length)
            shortest = self.row(int(self.lengths.argmin()), length)  # fits into every batch
            return padding_like(shortest) | {"index": np.array(-1, np.int32)}

        return Planned(make, numbers)


def train_examples(data: DataConfig, seed: int, rows: Rows, *process: int) -> TrainBatches:
    """Endless batches, planned as the module says."""
    size, lengths = data.batch_size, rows.lengths
    buckets = data.length_buckets or choose_buckets(lengths, data.sequence_length)
    steps = -(-len(lengths) // size)

    @functools.lru_cache(2)
    def shuffled(epoch: int) -> np.ndarray:
        """The row numbers of each batch of an epoch, -1 for padding."""
        generator = np.random.default_rng([seed, epoch])
        order = generator.permutation(len(lengths))
        pool = np.arange(len(order)) // (POOL * size)
        order = order[np.lexsort((lengths[order], pool))]
        return generator.permutation(padded(order, steps * size).reshape(-1, size))

    def plan(step: int) -> Planned:
        epoch, i = divmod(step, steps)
        numbers = shuffled(epoch)[i]
        longest = lengths[numbers[numbers >= 0]].max()
        return rows.planned(buckets[int(np.searchsorted(buckets, longest))], numbers)

    about = f"{', '.join(data.train)}: {rows.about}; {size} rows of length "
    about += ", ".join(map(str, buckets))
    plans = grain.MapDataset.range(ENDLESS).map(plan)
    return TrainBatches(Part(plans, steps, rows.key, about), *process)


class EvaluationExamples(EvaluationBatches):
    """All rows of a split in order of length, none left out."""

    def __init__(self, rows: Rows, longest: int, batch_size: int, *process: int):
        self.rows = rows
        batches = by_length(rows.lengths, longest, batch_size)

        def planned(step: int) -> Planned:
            length, numbers = batches[step]
            return rows.planned(length, padded(numbers, batch_size))

        super().__init__(grain.MapDataset.range(len(batches)).map(planned), rows.key, *process)


def shortened(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths that two texts are cut to, at most `room` in all."""
    if first <= second:
        first = min(first, room // 2)
        return first, min(second, room - first)
    second = min(second, room // 2)
    return min(first, room - second), second


class LabelledRows(Rows):
    """A row for each example, at most `longest` tokens of it."""

    def __init__(
        self,
        dataset: DatasetRow,
        tokenizer: AnyTokenizer,
        examples: Sequence[Example],
        longest: int,
    ):
        super().__init__(dataset, tokenizer, examples)
        self._longest = longest
        count = len(examples[0].texts)
        # The second text of a row, 0 for none; of choices, that of each row.
        self._seconds = range(1, count) if dataset.task == "multiple_choice" else [1 % count]
        self._ids = [self.encode([example.texts[i] for example in examples]) for i in range(count)]
        self._marks: dict[tuple[int, int], np.ndarray] = {}
        for number, example in enumerate(examples):
            for span, (text, start, end) in enumerate(example.spans, 1):
                ids = self._ids[text][number]
                marks = self._marks.setdefault((text, number), np.zeros_like(ids))
                offsets = tokenizer.offsets(example.texts[text], ids)
                marks[(offsets[:, 0] < end) & (offsets[:, 1] > start)] = span
        whole = np.array([[len(ids) for ids in column] for column in self._ids])
        others = whole[1:].max(axis=0) if count > 1 else 0
        whole = whole[0] + others + (2 + tokenizer.separators if count > 1 else 2)
        self.num_cut = int((whole > longest).sum())
        self.lengths = np.minimum(whole, longest)
        self.num_unlabelled = sum(example.label is None for example in examples)
        self.about = f"{len(examples):,} examples ({self.num_cut:,} cut)"

    def row(self, number: int, length: int) -> Row:
        label, task = self.examples[number].label, self.dataset.task
        texts = [self._pair(number, second, length) for second in self._seconds]
        parts = np.stack(texts, axis=1) if task == "multiple_choice" else texts[0]
        tokens, token_types, marks = parts
        dtype = np.float32 if task == "regression" else np.int32
        return {
            **self.tokenizer.inputs(tokens),
            "token_types": token_types,
            "marks": marks,
            "labels": np.array(0 if label is None else label, dtype),
            "weights": np.array(label is not None, np.float32),
            "index": np.array(number, np.int32),
        }

    def _pair(self, number: int, second: int, length: int) -> np.ndarray:
        """Text 0 with `second`, or alone if that is 0: tokens, types and marks [3, length]."""
        tokens, token_types, marks = row = np.zeros((3, length), np.int32)  # 0 is padding
        between, texts = self.tokenizer.separators, [0, second] if second else [0]
        sizes = [len(self._ids[text][number]) for text in texts] + [0]
        kept = shortened(sizes[0], sizes[1], self._longest - 2 - (between if second else 0))
        tokens[0], end = BOS, 1
        for text, count in zip(texts, kept, strict=False):
            more = between - 1 if text else 0
            start, end = end, end + more + count + 1
            tokens[start:end] = EOS
            tokens[start + more : end - 1] = self._ids[text][number][:count]
            token_types[start:end] = int(text > 0)
            if (text, number) in self._marks:
                marks[start + more : end - 1] = self._marks[text, number][:count]
        return row

    def logits(self, outputs: Outputs) -> np.ndarray:
        """What a model gives for each example, in order: [N, C], or [N] numbers."""
        found = np.concatenate([found for _, found in outputs])
        numbers = np.concatenate([numbers for numbers, _ in outputs])
        logits = np.zeros((len(self.examples), *found.shape[1:]))
        logits[numbers[numbers >= 0]] = found[numbers >= 0]
        return logits

    def predictions(self, outputs: Outputs) -> list[float]:
        """The class or choice of each example with the highest logit, or a number as it is."""
        logits = self.logits(outputs)
        return (logits if logits.ndim == 1 else logits.argmax(axis=-1)).tolist()

    def scores(self, outputs: Outputs) -> dict[str, float]:
        labels = [example.label for example in self.examples if example.label is not None]
        grouped = "exact_match" in self.dataset.metrics
        groups = [example.index[:2] for example in self.examples] if grouped else ()
        return official_scores(self.dataset, labels, self.predictions(outputs), groups)

    def files(self, outputs: Outputs) -> dict[str, str]:
        """TSV: index and prediction of each example, the name of its label or a number."""
        names, lines = self.dataset.labels, ["index\tprediction\n"]
        for example, found in zip(self.examples, self.predictions(outputs), strict=True):
            shown = names[int(found)] if names else f"{found:.3f}"
            lines.append(f"{example.index}\t{shown}\n")
        return {"predictions.tsv": "".join(lines)}
