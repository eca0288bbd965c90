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
import jax.numpy as jnp
import numpy as np

from mhe_jax import tasks
from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.data import BOS, EOS, PAD, Tokenizer, examples
from mhe_jax.data.rows import num_windows
from mhe_jax.evaluation.programs import CompiledRun
from mhe_jax.evaluation.texts import text_of
from mhe_jax.tasks.labelled import LabelledTask
from mhe_jax.tasks.labelled.batches import EvaluationExamples
from mhe_jax.tasks.labelled.windows import Answer, WindowRows
from mhe_jax.tasks.sums import label_nats
from mhe_jax.tasks.task import outputs_of

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
    run: CompiledRun, evaluation: EvaluationConfig, given: Sequence[Any]
) -> list[Prediction] | list[float] | list[Answer]:
    """The prediction for each example, in order, by the rows of the task's evaluation."""
    if not given:
        return []
    config = replace(run.config, evaluation=evaluation)
    task, labels = tasks.of(config), config.data.labels
    assert isinstance(task, LabelledTask)
    made, longest = task.rows(config, run.tokenizer, given), config.data.sequence_length
    rows, plan = run.plan(made.lengths, evaluation.batch_size, longest)
    outputs = outputs_of(run.sums_of(EvaluationExamples(made, longest, rows, plan=plan)))
    run.check_finite(all(np.isfinite(found[numbers >= 0]).all() for numbers, found in outputs))
    if isinstance(made, WindowRows):
        return made.decided(made.predictions(outputs))
    predictions = made.predictions(outputs)
    if not labels:
        return predictions
    logits = made.logits(outputs)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    return [
        Prediction(labels[int(best)], dict(zip(labels, of.tolist(), strict=True)))
        for best, of in zip(predictions, probabilities, strict=True)
    ]


def encode(
    run: CompiledRun, evaluation: EvaluationConfig, pooling: Pooling, texts: Sequence[str]
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
        named = dict(inputs)
        tokens = named.pop("tokens")
        x = model.apply({"params": params}, tokens, **named, method="encode").astype(jnp.float32)
        if pooling is None:
            return x
        if pooling == "first":
            return x[:, 0]
        inside = (tokens != PAD).astype(x.dtype)[:, :, None]
        return jnp.sum(x * inside, axis=1) / jnp.maximum(jnp.sum(inside, axis=1), 1)

    ids = [
        [*begin, *row[: longest - len(begin) - 1], EOS] for row in run.tokenizer.encode_batch(texts)
    ]
    found = [np.zeros(0, np.float32)] * len(ids)
    rows, plan = run.plan([len(row) for row in ids], evaluation.batch_size, longest)
    for length, numbers in plan:
        tokens = np.full((rows, length), PAD, np.int32)
        for row, number in enumerate(numbers):
            tokens[row, : len(ids[number])] = ids[number]
        call = run.program(("encode", pooling), program, run.tokenizer.inputs(tokens))
        for number, x in zip(numbers, jax.device_get(call()), strict=False):
            found[number] = x[: len(ids[number])] if pooling is None else x
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


def sides_of(run: CompiledRun, item: Any, where: str) -> list[list[int]]:
    """The tokens of a text, or of a source and a target, each with eos."""
    assert isinstance(run.tokenizer, Tokenizer)
    if run.config.task != "translation":
        return [[*run.tokenizer.encode(text_of(item, where)), EOS]]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(f"{where} is not a pair: takes (source, target)")
    sides = [[*run.tokenizer.encode(text_of(text, where)), EOS] for text in item]
    most, longest = max(map(len, sides)), run.config.model.max_length
    if most > longest:
        raise InputError(
            f"{where} has {most} tokens with eos: takes at most model.max_length={longest} on "
            "each side"
        )
    return sides


def log_probs(
    run: CompiledRun, evaluation: EvaluationConfig, items: Sequence[list[list[int]]]
) -> list[Scored]:
    """The scores of texts, or of pairs of source and target, by the rows of the task's evaluation.

    A text of more than `data.sequence_length` tokens is read in windows of `evaluation.stride`, as
    for the score of a split; without a stride, in blocks that each begin anew.
    """
    assert isinstance(run.tokenizer, Tokenizer)
    pairs, task, model = run.config.task == "translation", tasks.of(run.config), run.model
    longest = run.config.model.max_length if pairs else run.config.data.sequence_length
    stride = evaluation.stride or longest
    make: Any = examples.translation_row if pairs else examples.lm_row
    # Of each window: the number of its text, its place, tokens known there already, tokens.
    windows: list[tuple[int, int, int, list[list[int]]]] = []
    for number, sides in enumerate(items):
        if pairs:
            windows.append((number, 0, 0, sides))
            continue
        for k in range(num_windows(len(sides[0]), longest, stride)):
            part = sides[0][k * stride :][:longest]
            windows.append((number, k * stride, longest - stride if k else 0, [part]))

    def program(params: Any, *inputs: jax.Array) -> jax.Array:
        *read, labels = inputs
        logits: Any = model.apply({"params": params}, *read)
        return -label_nats(logits, labels)[0]

    found = [np.zeros(len(sides[-1]), np.float32) for sides in items]
    lengths = [max(map(len, sides)) for *_, sides in windows]
    rows, plan = run.plan(lengths, evaluation.batch_size, longest)
    for length, numbers in plan:
        made = [make(*windows[number][-1], length) for number in numbers]
        made += [examples.padding_like(made[0])] * (rows - len(made))
        batch = examples.stack(made)
        inputs = [batch[name] for name in (*task.inputs, "labels")]
        scores = jax.device_get(run.program("log_probs", program, *inputs)())
        for number, of_row in zip(numbers, scores, strict=False):
            text, start, known, sides = windows[number]
            stop = len(sides[-1])
            found[text][start + known : start + stop] = of_row[known:stop]
    run.check_finite(all(np.isfinite(of_text).all() for of_text in found))
    return [
        Scored(sides[-1], run.tokenizer.pieces(sides[-1]), of_text)
        for sides, of_text in zip(items, found, strict=True)
    ]
