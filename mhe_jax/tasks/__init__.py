"""Tasks: each is a class, and one value of `TASKS`.

    config = resolve(config)                    # with the labels that the data has
    tokenizer = make_tokenizer(config, path)    # read, or trained on data.train; kept at path
    batch = train_batches(config, tokenizer).batch(step)
    task = of(config)
    sums = task.sums(task.model(config.model))(params, task.read(batch), dropout_key)

A new task is a class, its line in `TASKS`, and its lines in `mhe_jax/config/values.py`.
"""

from pathlib import Path

from mhe_jax.config import Config, TaskName
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.places import path_of
from mhe_jax.data import (
    AnyTokenizer,
    EvaluationBatches,
    TrainBatches,
    load_tokenizer,
    read_tokenizer,
    tokenizer_file,
    train_tokenizer,
)
from mhe_jax.model import Classifier, Regressor, SpanFinder
from mhe_jax.tasks.labelled import LabelledTask, Regression
from mhe_jax.tasks.running_text import LanguageModeling, MaskedLanguageModeling, ShuffleRandom
from mhe_jax.tasks.task import Task
from mhe_jax.tasks.translation import Translation

TASKS: dict[TaskName, Task] = {
    "mlm": MaskedLanguageModeling(),
    "lm": LanguageModeling(),
    "translation": Translation(),
    "shuffle_random": ShuffleRandom(),
    "classification": LabelledTask(Classifier),
    "regression": Regression(Regressor, "squared error"),
    "multiple_choice": LabelledTask(Regressor),
    "span": LabelledTask(SpanFinder, "nats a start or end"),
}


def of(config: Config) -> Task:
    """The task of an experiment."""
    return TASKS[config.task]


def resolve(config: Config) -> Config:
    """The config, completed from its data: see `Task.resolve`."""
    return of(config).resolve(config)


def check_sources(config: Config) -> None:
    """Opens and checks the splits of training, and the tokenizer given to a new run."""
    for split in ("train", "validation") if config.data.validation else ("train",):
        of(config).check_split(config, split)
    if (file := tokenizer_file(config)) and not (path_of(config.workdir) / TOKENIZER).exists():
        read_tokenizer(config, file)


def make_tokenizer(config: Config, path: str | Path) -> AnyTokenizer:
    """The tokenizer of a run, kept at `path`; `md_` words need none.

    That already at `path` is used. Otherwise the model that `data.tokenizer` names, that of the
    run `train.init_from`, or one trained on `data.train` is published there. All processes of a
    run may do this at the same time: they publish the same bytes.
    """
    path = path_of(path)
    if not path.exists() and config.model.has_pieces:
        if file := tokenizer_file(config):
            tokenizer = read_tokenizer(config, file)
        else:
            lsh = config.model.hashing is not None
            option = "data.lsh_pieces" if lsh else "model.vocabulary_size"
            size = config.data.lsh_pieces if lsh else config.model.vocabulary_size
            tokenizer = train_tokenizer(of(config).texts(config), size, option)
        tokenizer.save(path)
    return load_tokenizer(config, path)


def train_batches(
    config: Config, tokenizer: AnyTokenizer, *, process_index: int = 0, process_count: int = 1
) -> TrainBatches:
    """The batches that an experiment trains on."""
    return of(config).train_batches(config, tokenizer, process_index, process_count)


def evaluation_batches(
    config: Config,
    tokenizer: AnyTokenizer,
    split: str,
    *,
    batch_size: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> EvaluationBatches:
    """All of `split` (`validation`, `test` or `train`), `batch_size` rows at a time.

    `batch_size` counts the rows of all processes; None means `evaluation.batch_size`.
    """
    rows = config.evaluation.batch_size if batch_size is None else batch_size
    process = (process_index, process_count)
    return of(config).evaluation_batches(config, tokenizer, split, rows, *process)
