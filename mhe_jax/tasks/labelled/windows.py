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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mhe_jax.config import DataConfig, EvaluationConfig, InputError
from mhe_jax.config.data import BOS, EOS, PAD
from mhe_jax.data.examples import Row
from mhe_jax.data.words import AnyTokenizer
from mhe_jax.tasks.labelled.examples import Question
from mhe_jax.tasks.labelled.rows import encode
from mhe_jax.tasks.labelled.table import DatasetRow, with_score
from mhe_jax.tasks.metrics import answer_scores, best_threshold
from mhe_jax.tasks.task import Outputs


@dataclass(frozen=True)
class Answer:
    """The best span of a question: `text` is its context from `start` to `end`."""

    text: str
    no_answer: float  # how much more no answer scores
    score: float  # the sum of its logits
    start: int  # in characters
    end: int


class WindowRows:
    """The windows of questions, tokenized."""

    def __init__(
        self,
        dataset: DatasetRow,
        tokenizer: AnyTokenizer,
        questions: Sequence[Question],
        data: DataConfig,
        evaluation: EvaluationConfig,
    ):
        self.dataset = dataset
        self.questions = questions
        self._evaluation = evaluation
        self._tokenizer = tokenizer
        # Positions of a row that hold neither question nor window: before the window, and in all.
        self._before, self._around = 1 + tokenizer.separators, 2 + tokenizer.separators
        room = data.sequence_length - data.question_length - self._around
        if data.window_stride > room:  # for one eos between texts, the config's rules check it
            raise InputError(
                f"data.window_stride is {data.window_stride}: at most data.sequence_length - "
                f"data.question_length - {self._around} = {room}"
            )
        asked = encode(tokenizer, [question.question for question in self.questions])
        self._asked = [ids[: data.question_length] for ids in asked]
        # Many questions share a context.
        contexts = list(dict.fromkeys(question.context for question in self.questions))
        number_of = {context: number for number, context in enumerate(contexts)}
        self._context = [number_of[question.context] for question in self.questions]
        self._ids = encode(tokenizer, contexts)
        self._offsets = [
            tokenizer.offsets(text, ids) for text, ids in zip(contexts, self._ids, strict=True)
        ]
        # Question, first and last + 1 piece of the window, first and last piece of the answer.
        self._windows = np.array(
            [window for number in range(len(self.questions)) for window in self._cut(number, data)]
        )
        asked_lengths = np.array([len(ids) for ids in self._asked])
        question, start, stop = self._windows[:, :3].T
        self.lengths = asked_lengths[question] + (stop - start) + self._around
        self.num_examples = len(questions)
        # All are without a label if none has an answer, else none is.
        self.num_unlabelled = 0 if any(q.answers for q in questions) else len(questions)

    def _cut(self, number: int, data) -> Iterable[tuple[int, int, int, int, int]]:
        """The windows of a question, and where its first answer lies in the context, or -1."""
        question, context = self.questions[number], self._context[number]
        offsets = self._offsets[context]
        room = data.sequence_length - len(self._asked[number]) - self._around
        first = last = -1
        if question.answers:
            text, begin = question.answers[0]
            inside = (offsets[:, 1] > begin) & (offsets[:, 0] < begin + len(text))
            first, last = np.flatnonzero(inside)[[0, -1]] if inside.any() else (-1, -1)
        start = 0
        while True:
            stop = min(start + room, len(offsets))
            yield number, start, stop, first, last
            if stop == len(offsets):
                return
            start += data.window_stride

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def records(self) -> Iterator[Sequence[Any]]:
        return ((q.question, q.context, q.answers) for q in self.questions)

    def describe(self) -> str:
        return f"{len(self.questions):,} questions in {len(self):,} windows"

    def row(self, number: int, length: int) -> Row:
        """Window `number` as a row of `length`, which must hold it."""
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
            **self._tokenizer.inputs(tokens),
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
        text = self.questions[question].context[begin:end]
        begin = int(begin) + len(text) - len(text.lstrip())
        text = text.strip()
        return text, begin, begin + len(text)

    def predictions(self, outputs: Outputs) -> list[Answer]:
        """The answer to each question, from the numbers of rows [B] and their logits [B, 2, T].

        A number of -1 is a row of padding.
        """
        count = len(self.questions)
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
            answers.append(Answer(text, float(null - score), float(score), start, end))
        return answers

    def decided(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers, of which version 2.0 leaves out the text where no answer scores more."""
        most = self._evaluation.no_answer_threshold
        left = self.dataset.may_be_unanswered
        return [replace(one, text="") if left and one.no_answer > most else one for one in answers]

    def scores(self, outputs: Outputs) -> dict[str, float]:
        """The metrics of SQuAD; of version 2.0 also the best over all thresholds."""
        answers = self.predictions(outputs)
        right = [[text for text, _ in question.answers] for question in self.questions]
        version_2 = self.dataset.may_be_unanswered
        texts = [answer.text for answer in self.decided(answers)]
        found = answer_scores(texts, right, version_2=version_2)
        metrics = {name: 100.0 * float(np.mean(values)) for name, values in found.items()}
        if version_2:
            answerable = np.array([bool(answers) for answers in right])
            no_answer = np.array([answer.no_answer for answer in answers])
            given = answer_scores([answer.text for answer in answers], right, version_2=True)
            for name, values in given.items():
                best, threshold = best_threshold(values, no_answer, answerable)
                metrics |= {f"best_{name}": 100.0 * best, f"best_{name}_threshold": threshold}
        return with_score(self.dataset, metrics)

    def submission(self, outputs: Outputs) -> dict[str, str]:
        """JSON {id: text}, and for 2.0 {id: by how much no answer scores more} beside it."""
        answers = self.predictions(outputs)
        names = [question.index for question in self.questions]
        texts = (answer.text for answer in self.decided(answers))
        files: dict[str, Any] = {"predictions.json": dict(zip(names, texts, strict=True))}
        if self.dataset.may_be_unanswered:
            odds = (answer.no_answer for answer in answers)
            files["no_answer.json"] = dict(zip(names, odds, strict=True))
        return {name: json.dumps(found, ensure_ascii=False) + "\n" for name, found in files.items()}


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
