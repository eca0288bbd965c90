"""What a trained run does with texts.

run.translate(texts)    run.generate(prompts)      results as `translator.py`, `generation.py`
run.model.apply({"params": run.params}, tokens)    the Flax module by hand
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from mhe_jax import tasks
from mhe_jax.config import FACTS, Config, EvaluationConfig, InputError, TaskName
from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.evaluation.forward import Pooling, encode, log_probs, predict, sides_of
from mhe_jax.evaluation.generation import Generator
from mhe_jax.evaluation.programs import CompiledRun
from mhe_jax.evaluation.texts import answers, text_of
from mhe_jax.evaluation.translator import Translator
from mhe_jax.tasks.labelled.examples import given_example
from mhe_jax.tasks.labelled.table import row_of

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
        translator = Translator(self, self._asked("translate", settings))
        answer = translator.translate if details else _texts_of(translator.translate)
        return answers(texts, text_of, answer, translator.evaluation.batch_size)

    def generate(self, prompts: Iterable[str], *, details: bool = False, **settings: Any) -> Any:
        """Each prompt, as it is, and its continuation; an empty prompt begins a new text.

        With `details`, each is a `Continuation`: text, new tokens, and whether only the end of the
        prompt was read. Settings: temperature, top_k, top_p, seed, min_length, extra_length,
        batch_size. The draws for prompt n of a call depend on seed, n and the tokens before, not on
        the batch.
        """
        generator = Generator(self, self._asked("generate", settings))
        answer = generator.generate if details else _texts_of(generator.generate)
        check = functools.partial(text_of, end="\n" if isinstance(prompts, Iterator) else "")
        return answers(prompts, check, answer, generator.evaluation.batch_size)

    def predict(self, texts: Iterable[Any], **settings: Any) -> Any:
        """The label of each text with the probabilities of all, a number, or an answer.

        Each item is as in the run's data set: a text, a tuple of texts (question and context for
        task span), or a dictionary of the fields of a record. Each gives a `Prediction`, a float
        (task regression) or an `Answer`. Items too long for `data.sequence_length` are cut as in
        training. Settings: answer_length, no_answer_threshold, batch_size.
        """
        evaluation = self._asked("predict", settings)
        check = functools.partial(given_example, row_of(self.config))
        answer = functools.partial(predict, self, evaluation)
        return answers(texts, check, answer, evaluation.batch_size)

    def encode(self, texts: Iterable[str], pooling: Pooling = "mean", **settings: Any) -> Any:
        """The encoder's output for each text, float32: [N, M] of a list of N.

        `pooling` is `mean` over its tokens, `first`, or None: then each text gives [n, M] for its n
        tokens, including those around it (bos and eos; for a translator, eos). Texts too long for
        `data.sequence_length` (for a translator, `model.max_length`) are cut. Settings: batch_size.
        """
        evaluation = self._asked("encode", settings)
        answer = functools.partial(encode, self, evaluation, pooling)
        return answers(texts, text_of, answer, evaluation.batch_size)

    def log_probs(self, texts: Iterable[Any], **settings: Any) -> Any:
        """The log-probability of each token of each text, eos last, as a `Scored`.

        For a translation run, texts are pairs (source, target), and the target is scored. A
        language model reads texts longer than `data.sequence_length` in blocks, or in windows with
        the setting stride. Settings: stride, batch_size.
        """
        evaluation = self._asked("log_probs", settings)
        check = functools.partial(sides_of, self)
        answer = functools.partial(log_probs, self, evaluation)
        return answers(texts, check, answer, evaluation.batch_size)

    def _asked(self, method: str, settings: dict[str, Any]) -> EvaluationConfig:
        """The settings of a call, checked as a config is; checks also that it can be made."""
        check_task(self.workdir, self.config, method)
        check_processes(method)
        allowed = SETTINGS[method]
        for name in settings:
            if name not in allowed:
                raise InputError(f"{method} has no setting {name}: takes {', '.join(allowed)}")
        return with_settings(self.config, settings).evaluation if settings else self.evaluation


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
      settings: other fields of `evaluation`, such as beam_size, which replace the run's own.

    Raises:
      InputError: no such run, checkpoint or setting, or its files do not belong together.
    """
    workdir = path_of(path)
    config = config_of(workdir)
    if checkpoint is not None:
        settings["checkpoint"] = str(checkpoint)
    config = with_settings(config, settings)
    check_processes("load")
    return Run.load(workdir, config, devices)


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """The config with other values of `evaluation`, checked."""
    for name, value in settings.items():
        config = set_field(config, f"evaluation.{name}", value)
    check(config, trains=False)
    return config


def check_processes(what: str) -> None:
    """Raises InputError if there are other processes."""
    if jax.process_count() > 1:
        raise InputError(f"{what} takes one process, not {jax.process_count()}")


def check_task(workdir: Path, config: Config, method: str) -> None:
    """Raises InputError if a run of this task does not have the method."""

    def has(name: TaskName) -> bool:
        facts, search = FACTS[name], tasks.TASKS[name].search
        # A masked language model gives no probability to a whole text.
        by_method = {"predict": facts.labelled, "encode": "encoder" in facts.roles}
        return {**by_method, "log_probs": search is not None}.get(method, search == method)

    if not has(config.task):
        takes = ", ".join(filter(has, tasks.TASKS))
        raise InputError(f"{workdir} is a run of task {config.task}: {method} takes {takes}")


def _texts_of(answer: Callable[[list[str]], list[Any]]) -> Callable[[list[str]], list[str]]:
    return lambda texts: [one.text for one in answer(texts)]
