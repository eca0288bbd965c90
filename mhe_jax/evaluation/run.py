"""A trained run, loaded once: its model with parameters, tokenizer, mesh and compiled programs.

    run.translate(texts)    run.generate(prompts)      results as `translator.py`, `generation.py`
    run.model.apply({"params": run.params}, tokens)    the Flax module by hand

Every result of a split says what it was measured on and how: task, split, the steps of the
checkpoints, seconds, and which form and engine each attention kind ran as.
"""

import bisect
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from mhe_jax import tasks
from mhe_jax.config import FACTS, Config, EvaluationConfig, InputError, TaskName
from mhe_jax.config.evaluation import result_name
from mhe_jax.config.fields import set_field
from mhe_jax.config.files import TOKENIZER, write_whole
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.data import AnyTokenizer, EvaluationBatches, load_tokenizer
from mhe_jax.evaluation.encoding import Pooling, encode
from mhe_jax.evaluation.generation import Generator
from mhe_jax.evaluation.prediction import Predictor
from mhe_jax.evaluation.programs import Programs
from mhe_jax.evaluation.scoring import Scorer
from mhe_jax.evaluation.texts import answers, text_of
from mhe_jax.evaluation.translator import Cost, Translation, Translator
from mhe_jax.training import checkpoint, sharding
from mhe_jax.training.state import abstract_params
from mhe_jax.training.step import make_eval_step
from mhe_jax.training.summary import described

OUTPUT = ("min_length", "extra_length", "batch_size")
# Fields of `evaluation` that each method takes by name.
SETTINGS = {
    "translate": ("beam_size", "length_penalty", *OUTPUT),
    "generate": ("temperature", "top_k", "top_p", "seed", *OUTPUT),
    "predict": ("answer_length", "no_answer_threshold", "batch_size"),
    "encode": ("batch_size",),
    "log_probs": ("stride", "batch_size"),
}


@dataclass(frozen=True, eq=False)
class Run:
    """A trained run, ready to use; `config.evaluation` says how.

    Its methods take one text and give its result, take a list and give a list, or take an iterator
    and give an iterator, lazily and in order. A line end at the end of a text is dropped; of a
    prompt only if it comes from an iterator, such as an open file. Settings that differ from
    `config.evaluation` in one call are given by name: `run.translate(texts, beam_size=1)`. Programs
    are compiled for few shapes, with rows and lengths that are powers of two, and stay in this
    object: texts of the same shape compile nothing again. All methods raise `InputError`, one line
    that says what is wrong: the task, a setting, a text, or a model whose output is not a number.
    """

    workdir: Path
    config: Config = field(repr=False)
    mesh: Mesh = field(repr=False)
    tokenizer: AnyTokenizer = field(repr=False)
    model: nn.Module = field(repr=False)
    params: Any = field(repr=False)  # laid over the mesh
    steps: list[int]  # the checkpoints that params are the mean of

    @classmethod
    def load(cls, workdir: Path, config: Config, devices: Sequence[Any] | None = None) -> "Run":
        """Restores the parameters that `config.evaluation` names, on `devices` (None: all)."""
        evaluation = config.evaluation
        tokenizer = load_tokenizer(config, workdir / TOKENIZER)
        mesh = sharding.mesh_at_hand(config, "evaluating", devices)
        model = tasks.of(config).model(config.model)
        abstract = abstract_params(config, mesh)
        params, steps = checkpoint.restore_params(
            workdir, evaluation.checkpoint, abstract, evaluation.average_checkpoints, tokenizer
        )
        return cls(workdir, config, mesh, tokenizer, model, params, steps)

    @property
    def programs(self) -> Programs:
        """The programs compiled so far."""
        return self._programs

    @functools.cached_property
    def _programs(self) -> Programs:
        return Programs(self.params, self.mesh)

    def with_params(self, params: Any) -> "Run":
        """This run with other parameters of the same shapes and places; nothing compiles again."""
        other = dataclasses.replace(self, params=params)
        vars(other)["_programs"] = self.programs.with_params(params)  # as if it were cached
        return other

    @property
    def evaluation(self) -> EvaluationConfig:
        """Checkpoint, split and search."""
        return self.config.evaluation

    def described(self) -> dict[str, Any]:
        """The part that all results share: the model, the split, the checkpoints."""
        evaluation = self.evaluation
        return {
            **described(self.config, self.mesh, self.params),
            "split": evaluation.split,
            "sources": list(getattr(self.config.data, evaluation.split)),
            "checkpoint": evaluation.checkpoint,
            "average_checkpoints": evaluation.average_checkpoints,
            "steps": self.steps,
        }

    def outputs(self) -> tuple[list[dict[str, Any]], EvaluationBatches, float]:
        """The sums of each batch of the split, the batches, and the seconds without compiling."""
        task, tokenizer = tasks.of(self.config), self.tokenizer
        tokenizer.check_vocabulary(self.config.model.vocabulary_size)
        process = sharding.share_of_rows(self.mesh)
        rows = sharding.round_up_rows(self.evaluation.batch_size, self.mesh)
        batches = task.scored_batches(self.config, tokenizer, self.evaluation.split, rows, *process)
        text = task.inputs[0]
        for number in _first_of_each_length(batches, text):  # compiled here, not in the time below
            jax.block_until_ready(self._step(batches.batch(number)))
        begin = time.perf_counter()
        found = self.sums_of(batches)
        return found, batches, time.perf_counter() - begin

    def sums_of(self, batches: EvaluationBatches) -> list[dict[str, Any]]:
        """The sums of each batch, and whatever else the task measures a model by."""
        with batches.iterate() as iterator:
            return jax.device_get([self._step(rows) for rows in iterator])

    @functools.cached_property
    def _step(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        task = tasks.of(self.config)
        evaluated = task.sums(self.model, outputs=True)
        step = make_eval_step(evaluated, self.mesh, sharding.shardings_of(self.params))
        return lambda rows: step(self.params, sharding.global_batch(task.read(rows), self.mesh))

    def translations(self, texts: Sequence[str]) -> tuple[list[Translation], Cost]:
        """Translations of the texts by beam search, and what they cost."""
        translator = Translator(self, self.evaluation)
        return translator.translate(texts), translator.cost

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
        predictor = Predictor(self, self._asked("predict", settings))
        size = predictor.evaluation.batch_size
        return answers(texts, predictor.example, predictor.predict, size)

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
        scorer = Scorer(self, self._asked("log_probs", settings))
        return answers(texts, scorer.item, scorer.score, scorer.evaluation.batch_size)

    def _asked(self, method: str, settings: dict[str, Any]) -> EvaluationConfig:
        """The settings of a call, checked as a config is; checks also that it can be made."""
        check_task(self.workdir, self.config, method)
        check_processes(method)
        allowed = SETTINGS[method]
        for name in settings:
            if name not in allowed:
                raise InputError(f"{method} has no setting {name}: takes {', '.join(allowed)}")
        return with_settings(self.config, settings).evaluation if settings else self.evaluation

    def publish(self, suffix: str, text: str) -> None:
        """Writes a file of results, named by the split and `suffix`, by one process."""
        if jax.process_index() == 0:
            write_whole(self.workdir / f"{result_name(self.evaluation)}.{suffix}", text)


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
      checkpoint: `best`, `last` or a step; None is what the run's config says: `best`, or `last`
        for a run without a validation split.
      devices: to compute on; None is all there are.
      settings: other fields of `evaluation`, such as beam_size, which replace the run's own.

    Raises:
      InputError: no such run, checkpoint or setting, or its files do not belong together.
    """
    workdir = path_of(path)
    config = config_of(workdir)
    own = config.evaluation.checkpoint
    if checkpoint is None:
        checkpoint = "last" if own == "best" and not config.data.validation else own
    config = with_settings(config, {"checkpoint": str(checkpoint), **settings})
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


def _first_of_each_length(batches: EvaluationBatches, text: str) -> Iterator[int]:
    """Found from few batches: all are in order of length of `text`, or of one length."""

    def length(number: int) -> int:
        return batches.batch(number)[text].shape[-1]

    number = 0
    while number < len(batches):
        yield number
        number = bisect.bisect(range(len(batches)), length(number), lo=number + 1, key=length)
