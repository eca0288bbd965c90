"""Rows of one or two texts, or of choices, with a label; and predictions to scores and files.

    one text         bos A eos                  token types 0
    two texts        bos A eos B eos            token types 0 up to the first eos, then 1
    choices          bos A eos C_c eos          for each choice c

With hashed words, two eos separate two texts; the second belongs to B. If texts are too long for a
row, the longer one is cut at its end, then both alike. `marks` is s at the tokens of span s = 1, 2,
... and 0 elsewhere. A row has a length T that a batch decides:

    tokens, token_types, marks [T] ([C, T] of C choices)   labels, weights, index []

and, for hashed words without a table, signatures [T, 16] ([C, T, 16]).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mhe_jax.config.data import BOS, EOS
from mhe_jax.data.batches import Draw
from mhe_jax.data.examples import Row
from mhe_jax.data.words import AnyTokenizer
from mhe_jax.tasks.labelled.examples import Example
from mhe_jax.tasks.labelled.table import DatasetRow, official_scores, submission
from mhe_jax.tasks.task import Outputs

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = re.compile(r"[^\W\d_]{2,}")


def encode(tokenizer: AnyTokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Piece numbers of each text, int32."""
    return [np.array(ids, np.int32) for ids in tokenizer.encode_batch(texts, num_threads=-1)]


def shortened(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths that two texts are cut to, at most `room` in all.

    >>> shortened(9, 2, 10), shortened(9, 8, 10), shortened(3, 4, 10)
    ((8, 2), (5, 5), (3, 4))
    """
    if first <= second:
        first = min(first, room // 2)
        return first, min(second, room - first)
    second = min(second, room // 2)
    return min(first, room - second), second


class LabelledRows:
    """Tokenized examples."""

    def __init__(
        self,
        dataset: DatasetRow,
        tokenizer: AnyTokenizer,
        examples: Sequence[Example],
        longest: int,
    ):
        self.dataset, self.examples, self._longest = dataset, examples, longest
        self._tokenizer = tokenizer
        count = len(self.examples[0].texts)
        # The second text of a row, 0 for none; of choices, that of each row.
        self._seconds = range(1, count) if self.dataset.task == "multiple_choice" else [1 % count]
        self._ids = [
            encode(tokenizer, [example.texts[i] for example in self.examples]) for i in range(count)
        ]
        self._marks: dict[tuple[int, int], np.ndarray] = {}
        for number, example in enumerate(self.examples):
            for span, (text, start, end) in enumerate(example.spans, 1):
                ids = self._ids[text][number]
                marks = self._marks.setdefault((text, number), np.zeros_like(ids))
                offsets = tokenizer.offsets(example.texts[text], ids)
                marks[(offsets[:, 0] < end) & (offsets[:, 1] > start)] = span
        whole = np.array([[len(ids) for ids in column] for column in self._ids])
        others = whole[1:].max(axis=0) if count > 1 else 0
        whole = whole[0] + others + (2 + tokenizer.separators if count > 1 else 2)
        self.num_cut = int((whole > self._longest).sum())
        self.lengths = np.minimum(whole, self._longest)
        self.num_examples = len(examples)
        self.num_unlabelled = sum(example.label is None for example in examples)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def records(self) -> Iterator[Sequence[Any]]:
        return ((e.texts, e.label, e.spans) for e in self.examples)

    def describe(self) -> str:
        return f"{len(self):,} examples ({self.num_cut:,} cut)"

    def row(self, number: int, length: int) -> Row:
        """Example `number` as a row of `length`, which must hold it."""
        label, task = self.examples[number].label, self.dataset.task
        texts = [self._pair(number, second, length) for second in self._seconds]
        parts = np.stack(texts, axis=1) if task == "multiple_choice" else texts[0]
        tokens, token_types, marks = parts
        dtype = np.float32 if task == "regression" else np.int32
        return {
            **self._tokenizer.inputs(tokens),
            "token_types": token_types,
            "marks": marks,
            "labels": np.array(0 if label is None else label, dtype),
            "weights": np.array(label is not None, np.float32),
            "index": np.array(number, np.int32),
        }

    def _pair(self, number: int, second: int, length: int) -> np.ndarray:
        """Text 0 with text `second`, or alone if that is 0: tokens, types and marks [3, length]."""
        tokens, token_types, marks = row = np.zeros((3, length), np.int32)  # 0 is padding
        between = self._tokenizer.separators
        kept = [len(self._ids[0][number])]
        if second:
            longest = self._longest - 2 - between
            kept = shortened(kept[0], len(self._ids[second][number]), longest)
        else:
            kept = [min(kept[0], self._longest - 2)]
        tokens[0], end = BOS, 1
        for text, count in zip((0, second), kept, strict=False):
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
        logits = np.zeros((len(self), *found.shape[1:]))
        logits[numbers[numbers >= 0]] = found[numbers >= 0]
        return logits

    def predictions(self, outputs: Outputs) -> list[float]:
        """The class or choice of each example with the highest logit, or a number as it is."""
        logits = self.logits(outputs)
        return (logits if logits.ndim == 1 else logits.argmax(axis=-1)).tolist()

    def scores(self, outputs: Outputs) -> dict[str, float]:
        """The official metrics, and their `score`; the labels must be known."""
        labels = [example.label for example in self.examples if example.label is not None]
        grouped = "exact_match" in self.dataset.metrics
        groups = [example.index[:2] for example in self.examples] if grouped else ()
        return official_scores(self.dataset, labels, self.predictions(outputs), groups)

    def submission(self, outputs: Outputs) -> dict[str, str]:
        """The file of predictions that the suite takes, {suffix: text}."""
        indices = [example.index for example in self.examples]
        return submission(self.dataset, indices, self.predictions(outputs))


def misspelt(examples: Sequence[Any], rate: float, seed: int) -> list[Any]:
    """The examples with each word of their texts misspelt with probability `rate`."""
    generator = np.random.default_rng([Draw.SPELLING, seed])
    return [
        replace(one, texts=tuple(misspell(text, rate, generator) for text in one.texts))
        for one in examples
    ]


def misspell(text: str, rate: float, generator: np.random.Generator) -> str:
    """The text with each word misspelt with probability `rate`, as people in a hurry do.

    A misspelt word has one letter dropped, doubled or replaced by another, or two neighbours
    exchanged, each equally likely if it changes the word.
    """

    def replaced(match: re.Match[str]) -> str:
        wrong = generator.random() < rate
        return _misspelt(match[0], generator) if wrong else match[0]

    return _WORD.sub(replaced, text)


def _misspelt(word: str, generator: np.random.Generator) -> str:
    while True:
        i, letter = int(generator.integers(len(word))), LETTERS[generator.integers(len(LETTERS))]
        found = (
            word[:i] + word[i + 1 :],
            word[:i] + word[i] + word[i:],
            word[:i] + letter + word[i + 1 :],
            word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :],
        )[generator.integers(4)]
        if found != word:
            return found
