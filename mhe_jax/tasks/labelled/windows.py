"""Questions about contexts as rows, in windows that slide over a long context; rows to answers.

    bos question eos window eos        token types 0 up to the first eos, then 1

With hashed words, two eos precede the window. Windows begin every `window_stride` tokens until one
reaches the end of the context. Some window holds the whole answer if it has at most
`room - window_stride` tokens, where room is what a row has left for the window. `labels` are the
first and the last token of the answer, or bos twice if there is no answer or the window does not
hold all of it; `marks` is 1 where an answer may begin or end: in the window, and at bos.

    tokens, token_types, marks [T]   labels, weights [2]   index []

(and, for hashed words without a table, signatures [T, 16]).

The answer to a question is the best span in its windows: that with the highest start + end, and at
most `answer_length` pieces. The score of no answer is that of bos, in the window where it is least.

Source: Devlin et al. 2019, sections 4.2 and 4.3.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhe_jax.config import DataConfig, EvaluationConfig, InputError
from mhe_jax.config.data import BOS, EOS, PAD
from mhe_jax.data.examples import Row
from mhe_jax.data.rows import num_windows
from mhe_jax.data.words import AnyTokenizer
from mhe_jax.tasks.labelled.examples import Example
from mhe_jax.tasks.labelled.rows import Rows
from mhe_jax.tasks.labelled.table import DatasetRow, with_score
from mhe_jax.tasks.metrics import answer_scores
from mhe_jax.tasks.task import Outputs


@dataclass(frozen=True)
class Answer:
    """The best span of a question: `text` is its context from `start` to `end`."""

    text: str
    no_answer: float  # how much more no answer scores
    score: float  # the sum of its logits
    start: int  # in characters
    end: int


class WindowRows(Rows):
    """The windows of questions, tokenized."""

    def __init__(
        self,
        dataset: DatasetRow,
        tokenizer: AnyTokenizer,
        examples: Sequence[Example],
        data: DataConfig,
        evaluation: EvaluationConfig,
    ):
        super().__init__(dataset, tokenizer, examples)
        self._evaluation, self._version_2 = evaluation, dataset.name == "squad_v2"
        # Positions of a row that hold neither question nor window: before the window, and in all.
        self._before, self._around = 1 + tokenizer.separators, 2 + tokenizer.separators
        room = data.sequence_length - data.question_length - self._around
        if data.window_stride > room:  # for one eos between texts, the config's rules check it
            raise InputError(
                f"data.window_stride is {data.window_stride}: at most data.sequence_length - "
                f"data.question_length - {self._around} = {room}"
            )
        questions, of_each = zip(*(example.texts for example in examples), strict=True)
        self._asked = [ids[: data.question_length] for ids in self.encode(questions)]
        contexts = list(dict.fromkeys(of_each))  # many questions share one
        number_of = {context: number for number, context in enumerate(contexts)}
        self._context = [number_of[context] for context in of_each]
        self._ids = self.encode(contexts)
        self._offsets = [
            tokenizer.offsets(text, ids) for text, ids in zip(contexts, self._ids, strict=True)
        ]
        # Question, first and last + 1 piece of the window, first and last piece of the answer.
        self._windows = np.array(
            [window for number in range(len(examples)) for window in self._cut(number, data)]
        )
        asked_lengths = np.array([len(ids) for ids in self._asked])
        question, start, stop = self._windows[:, :3].T
        self.lengths = asked_lengths[question] + (stop - start) + self._around
        # All are without a label if none has an answer, else none is.
        self.num_unlabelled = 0 if any(one.answers for one in examples) else len(examples)
        self.about = f"{len(examples):,} questions in {len(self._windows):,} windows"

    def _cut(self, number: int, data: DataConfig) -> Iterable[tuple[int, int, int, int, int]]:
        """The windows of a question, and where its first answer lies in the context, or -1."""
        offsets, answers = self._offsets[self._context[number]], self.examples[number].answers
        room = data.sequence_length - len(self._asked[number]) - self._around
        first = last = -1
        if answers:
            text, begin = answers[0]
            inside = (offsets[:, 1] > begin) & (offsets[:, 0] < begin + len(text))
            first, last = np.flatnonzero(inside)[[0, -1]] if inside.any() else (-1, -1)
        for k in range(num_windows(len(offsets), room, data.window_stride)):
            start = k * data.window_stride
            yield number, start, min(start + room, len(offsets)), first, last

    def row(self, number: int, length: int) -> Row:
        question, start, stop, first, last = self._windows[number]
        asked, ids = self._asked[question], self._ids[self._context[question]][start:stop]
        tokens = np.full(length, PAD, np.int32)
        token_types, marks = np.zeros(length, np.int32), np.zeros(length, np.int32)
        begin = len(asked) + self._before
        end = begin + len(ids)
        tokens[: end + 1] = [BOS, *asked, *[EOS] * (self._before - 1), *ids, EOS]
        token_types[len(asked) + 2 : end + 1] = 1
        marks[0] = marks[begin:end] = 1
        labels = np.zeros(2, np.int32)
        if start <= first and last < stop and first >= 0:
            labels += np.array([first, last], np.int32) - start + begin
        return {
            **self.tokenizer.inputs(tokens),
            "token_types": token_types,
            "marks": marks,
            "labels": labels,
            "weights": np.ones(2, np.float32),
            "index": np.array(number, np.int32),
        }

    def span(self, number: int, first: int, last: int) -> tuple[str, int, int]:
        """The text of the context at positions `first` to `last` of row `number`, and its place."""
        question, start = self._windows[number, :2]
        shift = start - len(self._asked[question]) - self._before
        offsets = self._offsets[self._context[question]]
        if not len(offsets):  # a tokenizer may drop all characters of a context
            return "", 0, 0
        begin, end = offsets[first + shift, 0], offsets[last + shift, 1]
        text = self.examples[question].texts[1][begin:end]
        begin = int(begin) + len(text) - len(text.lstrip())
        text = text.strip()
        return text, begin, begin + len(text)

    def predictions(self, outputs: Outputs) -> list[Answer]:
        """The answer to each question, from the numbers of rows [B] and their logits [B, 2, T].

        A number of -1 is a row of padding. In version 2.0 an answer has no text where giving none
        scores more by `no_answer_threshold`.
        """
        most = self._evaluation.no_answer_threshold if self._version_2 else np.inf
        count = len(self.examples)
        best, no_answer = np.full(count, -np.inf), np.full(count, np.inf)
        spans: list[tuple[int, int, int]] = [(-1, 0, 0)] * count
        for numbers, logits in outputs:
            found = numbers, logits, *best_spans(logits, self._evaluation.answer_length)
            for number, logit, score, first, last in zip(*found, strict=True):
                if number < 0:
                    continue
                question = self._windows[number, 0]
                no_answer[question] = min(no_answer[question], logit[0, 0] + logit[1, 0])
                if score > best[question]:
                    best[question], spans[question] = score, (number, int(first), int(last))
        answers = []
        for place, null, score in zip(spans, no_answer, best, strict=True):
            text, start, end = self.span(*place)
            text = "" if null - score > most else text
            answers.append(Answer(text, float(null - score), float(score), start, end))
        return answers

    def scores(self, outputs: Outputs) -> dict[str, float]:
        texts = [answer.text for answer in self.predictions(outputs)]
        right = [[text for text, _ in example.answers] for example in self.examples]
        found = answer_scores(texts, right, version_2=self._version_2)
        metrics = {name: 100.0 * float(np.mean(values)) for name, values in found.items()}
        return with_score(self.dataset, metrics)

    def files(self, outputs: Outputs) -> dict[str, str]:
        """JSON {id: text}, and for 2.0 {id: by how much no answer scores more} beside it."""
        answers = self.predictions(outputs)
        pairs = [(one.index, of) for one, of in zip(self.examples, answers, strict=True)]
        found: dict[str, Any] = {"predictions.json": {index: of.text for index, of in pairs}}
        if self._version_2:
            found["no_answer.json"] = {index: of.no_answer for index, of in pairs}
        return {name: json.dumps(of, ensure_ascii=False) + "\n" for name, of in found.items()}


def best_spans(logits: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score, first and last position of the best span in each row of logits [B, 2, T].

    Bos is left out. The best span maximises start[i] + end[j] over i <= j < i + longest.
    """
    start, end = logits[:, 0, 1:].astype(np.float64), logits[:, 1, 1:].astype(np.float64)
    rows, length = np.arange(len(logits)), start.shape[1]
    best = np.full(len(logits), -np.inf)
    firsts = np.zeros(len(logits), np.int64)
    lasts = np.zeros(len(logits), np.int64)
    for more in range(min(longest, length)):
        sums = start[:, : length - more] + end[:, more:]
        first = sums.argmax(axis=1)
        better = sums[rows, first] > best
        best[better] = sums[rows, first][better]
        firsts[better], lasts[better] = first[better] + 1, first[better] + more + 1
    return best, firsts, lasts
