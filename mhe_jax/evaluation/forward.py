"""What one forward pass says of texts: labels, numbers, answers, vectors, log-probabilities.

predict      classification, multiple_choice    p(label | text) = softmax(logits)
             regression                         a number
             span                               the best span of a context, an `Answer`
encode       mean     Σ_i x_i / n over the n tokens of the text, those around it included    [M]
             first    x_0                                                                    [M]
             None     all of them                                                         [n, M]
log_probs    lm             log p(x_i | x_0 .. x_{i-1})        for each token of a text, and eos
             translation    log p(y_i | y_0 .. y_{i-1}, x)     for each token of a target, and eos
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from mhe_jax import tasks
from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.data import BOS, EOS, examples
from mhe_jax.data.batches import padded
from mhe_jax.data.rows import num_windows
from mhe_jax.evaluation.programs import CompiledRun, filled
from mhe_jax.tasks.labelled.rows import LabelledRows
from mhe_jax.tasks.labelled.windows import Answer
from mhe_jax.tasks.sums import label_nats

Pooling = Literal["mean", "first"] | None


@dataclass(frozen=True)
class Prediction:
    """The most probable label of an example, and the probability of each."""

    label: str
    probabilities: dict[str, float]

    @property
    def probability(self) -> float:
        """The probability of the label."""
        return self.probabilities[self.label]


def predict(
    run: CompiledRun, evaluation: EvaluationConfig, items: Sequence[Any]
) -> list[Prediction] | list[float] | list[Answer]:
    """The prediction for each example, in order, by the rows of the task's evaluation."""
    if not items:
        return []
    config = replace(run.config, evaluation=evaluation)
    task: Any = tasks.of(config)
    labels = config.data.labels
    made, sums = task.rows(config, run.tokenizer, items), task.sums(run.model, outputs=True)

    def program(params: Any, batch: Any) -> jax.Array:
        return sums(params, batch, None)["outputs"]

    def arrays(numbers: list[int], rows: int, length: int) -> tuple[Any]:
        make, all_numbers = made.planned(length, padded(np.array(numbers), rows))
        return (task.read(examples.stack([make(number) for number in all_numbers])),)

    given = made.lengths, config.data.sequence_length, evaluation.batch_size, arrays
    found = run.each("predict", program, *given)
    outputs = [(np.array([number]), logits[None]) for number, logits in found]
    run.check_finite(all(np.isfinite(logits).all() for _, logits in outputs))
    predictions = made.predictions(outputs)
    if not isinstance(made, LabelledRows) or not labels:
        return predictions
    logits = made.logits(outputs)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    return [
        Prediction(labels[int(best)], dict(zip(labels, of.tolist(), strict=True)))
        for best, of in zip(predictions, probabilities, strict=True)
    ]


def encode(
    run: CompiledRun, evaluation: EvaluationConfig, texts: Sequence[str], pooling: Pooling
) -> np.ndarray | list[np.ndarray]:
    """Float32 [N, M] of N texts, in order; without pooling, a list of N arrays [n, M].

    An encoder reads bos A eos, that of a translator A eos.
    """
    if pooling not in ("mean", "first", None):
        raise InputError(f"pooling is {pooling!r}: takes mean, first or None")
    model: Any = run.model
    translates = run.config.task == "translation"
    begin = [] if translates else [BOS]
    longest = run.config.model.max_length if translates else run.config.data.sequence_length

    def program(params: Any, inputs: dict[str, jax.Array]) -> jax.Array:
        tokens, named = inputs["tokens"], {k: v for k, v in inputs.items() if k != "tokens"}
        return model.apply({"params": params}, tokens, **named, method="encode")

    read = run.tokenizer.encode_batch(texts)
    ids = [[*begin, *row[: longest - len(begin) - 1], EOS] for row in read]

    def arrays(numbers: list[int], rows: int, length: int) -> tuple[Any]:
        return (run.tokenizer.inputs(filled([ids[n] for n in numbers], rows, length)),)

    found = [np.zeros(0, np.float32)] * len(ids)
    given = [len(row) for row in ids], longest, evaluation.batch_size, arrays
    for number, row in run.each("encode", program, *given):
        x = row[: 1 if pooling == "first" else len(ids[number])].astype(np.float32)
        found[number] = x if pooling is None else x.mean(axis=0)
    run.check_finite(all(np.isfinite(x).all() for x in found))
    if pooling is None:
        return found
    return np.stack(found) if found else np.zeros((0, run.config.model.features), np.float32)


@dataclass(frozen=True, eq=False)
class Scored:
    """A text with the log-probability of each of its tokens, eos last."""

    tokens: list[int]
    pieces: list[str]  # a space is \u2581, a byte <0x00>
    log_probs: np.ndarray  # float32 [n]

    @property
    def total(self) -> float:
        """The log-probability of the whole."""
        return float(self.log_probs.sum(dtype=np.float64))


def text_of(text: Any, where: str, end: str = "\n") -> str:
    """A text, without the `end` of its line."""
    if not isinstance(text, str):
        raise InputError(f"{where} is of type {type(text).__name__}: takes a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has half a surrogate pair") from None
    return text.removesuffix(end)


def sides_of(run: CompiledRun, item: Any, where: str) -> list[list[int]]:
    """The tokens of a text, or of a source and a target, each with eos."""
    if run.config.task != "translation":
        return [[*run.tokenizer.encode(text_of(item, where)), EOS]]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(f"{where} is not a pair: takes (source, target)")
    sides = [[*run.tokenizer.encode(text_of(text, where)), EOS] for text in item]
    most, longest = max(map(len, sides)), run.config.model.max_length
    if most > longest:
        raise InputError(f"{where} has {most} tokens with eos: takes model.max_length={longest}")
    return sides


def log_probs(
    run: CompiledRun, evaluation: EvaluationConfig, items: Sequence[list[list[int]]]
) -> list[Scored]:
    """The scores of texts, or of pairs of source and target, by the rows of the task's evaluation.

    Longer ones than `data.sequence_length` are read in windows of `evaluation.stride`, or blocks.
    """
    pairs, task, model = run.config.task == "translation", tasks.of(run.config), run.model
    longest = run.config.model.max_length if pairs else run.config.data.sequence_length
    stride = evaluation.stride or longest
    make: Any = examples.translation_row if pairs else examples.lm_row
    # Of each window: the number of its text, its place, tokens known there already, tokens.
    windows: list[tuple[int, int, int, list[list[int]]]] = []
    for number, sides in enumerate(items):
        for k in range(1 if pairs else num_windows(len(sides[0]), longest, stride)):
            parts = [side[k * stride :][:longest] for side in sides]
            windows.append((number, k * stride, longest - stride if k else 0, parts))

    def program(params: Any, *inputs: jax.Array) -> jax.Array:
        *read, labels = inputs
        logits: Any = model.apply({"params": params}, *read)
        return -label_nats(logits, labels)[0]

    def arrays(numbers: list[int], rows: int, length: int) -> list[np.ndarray]:
        made = [make(*windows[number][-1], length) for number in numbers]
        batch = examples.stack(made + [examples.padding_like(made[0])] * (rows - len(made)))
        return [batch[name] for name in (*task.inputs, "labels")]

    found = [np.zeros(len(sides[-1]), np.float32) for sides in items]
    lengths = [max(map(len, sides)) for *_, sides in windows]
    given = lengths, longest, evaluation.batch_size, arrays
    for number, of_row in run.each("log_probs", program, *given):
        text, start, known, sides = windows[number]
        stop = len(sides[-1])
        found[text][start + known : start + stop] = of_row[known:stop]
    run.check_finite(all(np.isfinite(of_text).all() for of_text in found))
    return [
        Scored(sides[-1], run.tokenizer.pieces(sides[-1]), of_text)
        for sides, of_text in zip(items, found, strict=True)
    ]
