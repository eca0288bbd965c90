"""What a trained run does with texts, checked and taken some at a time."""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import jax

from mhe_jax import tasks
from mhe_jax.config import Config, EvaluationConfig, InputError
from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.evaluation import forward
from mhe_jax.evaluation.forward import Pooling, Prediction, predict, text_of
from mhe_jax.evaluation.generation import Continuation, generate
from mhe_jax.evaluation.programs import CompiledRun
from mhe_jax.evaluation.translator import translate
from mhe_jax.tasks.labelled.examples import given_example
from mhe_jax.tasks.labelled.table import row_of
from mhe_jax.tasks.labelled.windows import Answer

A = TypeVar("A")

OUTPUT = ("min_length", "extra_length", "batch_size")
# Fields of `evaluation` that each method takes by name.
SETTINGS = {
    "translate": ("beam_size", "length_penalty", *OUTPUT),
    "generate": ("temperature", "top_k", "top_p", "seed", *OUTPUT),
    "predict": ("answer_length", "no_answer_threshold", "batch_size"),
    "encode": ("batch_size",),
    "log_probs": ("stride", "batch_size"),
}


class Run(CompiledRun):
    """A trained run, ready to use; `config.evaluation` says how.

    Its methods take one text and give its result, take a list and give a list, or take an iterator
    and give an iterator, lazily and in order. A line end at the end of a text is dropped; of a
    prompt only if it comes from an iterator, such as an open file. Settings that differ from
    `config.evaluation` in one call are given by name: `run.translate(texts, beam_size=1)`. Programs
    are compiled for few shapes, with rows and lengths that are powers of two, and stay in this
    object: texts of the same shape compile nothing again. All methods raise `InputError`, one line
    that says what is wrong: the task, a setting, a text, or a model whose output is not a number.
    """

    def translate(self, texts: Iterable[str], *, details: bool = False, **settings: Any) -> Any:
        """The translation of each text, without line breaks; that of a blank text is empty.

        With `details`, each is a `Translation`: text, tokens, score, and whether the source was cut
        to `model.max_length` tokens. Settings: beam_size, length_penalty, min_length, extra_length,
        batch_size.
        """
        return self._answers("translate", texts, settings, text_of, translate, details)

    def generate(self, prompts: Iterable[str], *, details: bool = False, **settings: Any) -> Any:
        """Each prompt, as it is, and its continuation; an empty prompt begins a new text.

        With `details`, each is a `Continuation`: text, new tokens, and whether only the end of the
        prompt was read. Settings: temperature, top_k, top_p, seed, min_length, extra_length,
        batch_size. The draws for prompt n of a call depend on seed, n and the tokens before, not on
        the batch.
        """
        check = functools.partial(text_of, end="\n" if isinstance(prompts, Iterator) else "")
        answer = functools.partial(generate, counter=itertools.count())
        return self._answers("generate", prompts, settings, check, answer, details)

    def predict(self, texts: Iterable[Any], **settings: Any) -> Any:
        """The label of each text with the probabilities of all, a number, or an answer.

        Each item is as in the run's data set: a text, a tuple of texts (question and context for
        task span), or a dictionary of the fields of a record. Each gives a `Prediction`, a float
        (task regression) or an `Answer`. Items too long for `data.sequence_length` are cut as in
        training. Settings: answer_length, no_answer_threshold, batch_size.
        """
        check = functools.partial(given_example, row_of(self.config))
        return self._answers("predict", texts, settings, check, predict)

    def encode(self, texts: Iterable[str], pooling: Pooling = "mean", **settings: Any) -> Any:
        """The encoder's output for each text, float32: [N, M] of a list of N.

        `pooling` is `mean` over its tokens, `first`, or None: then each text gives [n, M] for its n
        tokens, including those around it (bos and eos; for a translator, eos). Texts too long for
        `data.sequence_length` (for a translator, `model.max_length`) are cut. Settings: batch_size.
        """
        answer = functools.partial(forward.encode, pooling=pooling)
        return self._answers("encode", texts, settings, text_of, answer)

    def log_probs(self, texts: Iterable[Any], **settings: Any) -> Any:
        """The log-probability of each token of each text, eos last, as a `Scored`.

        For a translation run, texts are pairs (source, target), and the target is scored. A
        language model reads texts longer than `data.sequence_length` in blocks, or in windows with
        the setting stride. Settings: stride, batch_size.
        """
        check = functools.partial(forward.sides_of, self)
        return self._answers("log_probs", texts, settings, check, forward.log_probs)

    def _answers(
        self,
        method: str,
        texts: Any,
        settings: dict[str, Any],
        check: Callable[[Any, str], Any],
        answer: Callable[[Self, EvaluationConfig, list[Any]], Any],
        details: bool = True,
    ) -> Any:
        """What `answer` gives for each of the texts, in order; for one text, its own.

        `check(text, where)` gives a text as `answer` takes it, or raises; `where` reads texts[3].
        Without `details`, the text alone of each result.
        """
        check_call(self.workdir, self.config, method)
        for name in {*settings} - {*SETTINGS[method]}:
            takes = ", ".join(SETTINGS[method])
            raise InputError(f"{method} has no setting {name}: takes {takes}")
        config = with_settings(self.config, settings) if settings else self.config
        evaluation = config.evaluation

        def answered(items: list[Any]) -> Any:
            found = answer(self, evaluation, items)
            return found if details else [one.text for one in found]

        if isinstance(texts, str | dict):  # one, or one record
            return answered([check(texts, "texts")])[0]
        if isinstance(texts, bytes) or not isinstance(texts, Iterable):
            found = type(texts).__name__
            raise InputError(f"takes a text, a list of texts or an iterator of them, not {found}")
        checked = (check(text, f"texts[{number}]") for number, text in enumerate(texts))
        if not isinstance(texts, Iterator):
            return answered(list(checked))
        return itertools.chain.from_iterable(map(answered, chunks(checked, evaluation.batch_size)))


def load(
    path: str | Path,
    *,
    checkpoint: str | int | None = None,
    devices: Sequence[Any] | None = None,
    **settings: Any,
) -> Run:
    """A trained run, to translate, generate and so on: `run = mhe_jax.load("runs/multi30k")`.

    Args:
      path: of the run, the workdir of `train.py`. Nothing else is read, and no code is run.
      checkpoint: `best` (the last, if none was validated), `last` or a step; None is what the
        run's config says.
      devices: to compute on; None is all there are.
      settings: other fields of `evaluation`, such as beam_size, which replace the run's own;
        `quantize="int8"` holds its matrices as int8 numbers (extra `quantize`).

    Raises:
      InputError: no such run, checkpoint or setting, or its files do not belong together.
    """
    workdir = path_of(path)
    config = config_of(workdir)
    if checkpoint is not None:
        settings["checkpoint"] = str(checkpoint)
    return Run.load(workdir, with_settings(config, settings), devices)


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    for name, value in settings.items():
        config = set_field(config, f"evaluation.{name}", value)
    check(config, trains=False)
    return config


def check_call(workdir: Path, config: Config, method: str) -> None:
    """Raises InputError if a run of this task does not have the method, or processes are many."""
    if jax.process_count() > 1:
        raise InputError(f"{method} takes one process, not {jax.process_count()}")
    takes = [name for name, task in tasks.TASKS.items() if method in task.methods]
    if config.task not in takes:
        reason = f"{method} takes {', '.join(takes)}"
        raise InputError(f"{workdir} is a run of task {config.task}: {reason}")


def chunks(items: Iterable[A], batch: int, chunk: int | None = None) -> Iterator[list[A]]:
    """Lists of some items at a time; those before a bad item still come out before its error."""
    items, size = iter(items), chunk or batch
    while True:
        found: list[A] = []
        try:
            found.extend(itertools.islice(items, size))
        except InputError:
            if found:
                yield found
            raise
        if not found:
            return
        yield found
        size = chunk or 4 * batch  # to be sorted by length; only one before the first answer


def answer_lines(
    method: str,
    workdir: str | Path,
    evaluation: EvaluationConfig,
    lines: Iterable[str],
    write: Callable[[str], Any],
    *,
    chunk: int | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Answers lines with a run, a line each, and returns counts, speed and settings.

        translate    the translation; a blank line gives an empty one
        generate     the prompt and its continuation; an empty prompt begins a new text
        predict      label <tab> label=p <tab> ...               and the probability of each label
                     number                                      task regression
                     text <tab> score <tab> start <tab> end      task span, the place in characters

    Where examples have several texts, a line to predict has tabs between them; a blank one gives an
    empty one. `write` gets a few lines at a time, in order, as soon as they are ready. `chunk`
    lines are read before any is answered: None is a few batches, 1 is for a person at a terminal.
    """
    workdir = path_of(workdir)
    config = dataclasses.replace(config_of(workdir), evaluation=evaluation)
    check_call(workdir, config, method)
    run = Run.load(workdir, config, devices)
    items = _examples(run, lines) if method == "predict" else lines
    answer: Any = {"predict": _predictions, "generate": generate, "translate": translate}[method]
    more = {"counter": itertools.count()} if method == "generate" else {}
    number = truncated = tokens = 0
    begin = time.perf_counter()
    # `items` may wait for a person: what is read is answered before more is asked for.
    for some in chunks(items, evaluation.batch_size, chunk):
        found = answer(run, evaluation, some, **more)
        write("".join(f"{_line(*pair)}\n" for pair in zip(some, found, strict=True)))
        for one in found:
            number += 1
            tokens += len(getattr(one, "tokens", ()))
            if getattr(one, "truncated", False):
                truncated += 1
                print(f"note: line {number} is too long and was cut", file=sys.stderr)
    return {
        "task": config.task,
        "checkpoint": evaluation.checkpoint,
        "steps": run.steps,
        "lines": number,
        "truncated_lines": truncated,
        "output_tokens": tokens,
        "seconds": round(time.perf_counter() - begin, 3),  # includes compiling
        **{name: getattr(evaluation, name) for name in SETTINGS[method]},
    }


def _examples(run: Run, lines: Iterable[str]) -> Iterator[Any]:
    row = row_of(run.config)
    for number, line in enumerate(lines, 1):
        item = tuple(line.split("\t")) if len(row.texts) > 1 else line
        where = f"standard input, line {number}"
        yield given_example(row, item, where) if line.strip() else None


def _predictions(run: Run, evaluation: EvaluationConfig, examples: list[Any]) -> list[Any]:
    found = iter(predict(run, evaluation, [one for one in examples if one is not None]))
    return [None if one is None else next(found) for one in examples]


def _line(asked: Any, found: Any) -> str:
    match found:
        case None:
            return ""
        case float():
            return f"{found:.4f}"
        case Answer():
            text = " ".join(found.text.split())
            return f"{text}\t{found.score:.4f}\t{found.start}\t{found.end}"
        case Prediction():
            each = (f"{label}={p:.4f}" for label, p in found.probabilities.items())
            return "\t".join([found.label, *each])
        case Continuation():  # a line break in it would make two lines of one
            return asked + " ".join(found.text.removeprefix(asked).splitlines())
    return found.text
