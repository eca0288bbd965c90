"""Tiny runs with random parameters, as `train.py` leaves them."""

import dataclasses
import random
from pathlib import Path

import jax
import pytest
from labelled_files import write
from random_parameters import random_parameters

from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
)
from mhe_jax.config.fields import save_json
from mhe_jax.tasks import TASKS, make_tokenizer, resolve
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.training.checkpoint import Checkpoints

WORDS = ["red", "green", "cat", "dog", "bird", "runs", "sleeps", "the", "a", "small", "big", "old"]


def sentence(draw, longest):
    return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A directory with `lines.txt` and `pairs.tsv`; the pairs are of very different lengths."""
    directory = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    lines = [sentence(draw, 12) for _ in range(60)]
    pairs = [f"{sentence(draw, 9)}\t{sentence(draw, 9)}" for _ in range(21)]
    directory.joinpath("lines.txt").write_text("\n".join([*lines, "", "end"]) + "\n")
    directory.joinpath("pairs.tsv").write_text("\n".join(pairs) + "\n")
    return directory


def tiny_config(task, texts, workdir, kind="mhe_mul", **model):
    name = "pairs.tsv" if task == "translation" else "lines.txt"
    return Config(
        task=task,
        workdir=str(workdir),
        model=ModelConfig(
            vocabulary_size=304,
            features=16,
            mlp_features=24,
            num_layers=1,
            attention=AttentionConfig(kind=kind, num_heads=2, head_embedding_stddev=0.5),
            max_length=20,
            **model,
        ),
        data=DataConfig(
            directory=str(texts),
            train=(name,),
            validation=(name,),
            test=(name,),
            sequence_length=16,
            batch_size=8,
            cache_directory=str(texts / "cache"),
        ),
        mesh=MeshConfig(),
        evaluation=EvaluationConfig(batch_size=8, beam_size=3, extra_length=6),
    )


def save_run(config, change=lambda params: params):
    """Leaves config, tokenizer and a best checkpoint, step 7, in the workdir."""
    workdir = Path(config.workdir)
    workdir.mkdir(parents=True)
    make_tokenizer(config, workdir / "tokenizer.model")
    save_json(config, workdir / "config.json")
    model = TASKS[config.task].model(config.model)
    initialize = TASKS[config.task].initializer(model, config.data.sequence_length)
    params = change(random_parameters(initialize, size=0.8))
    checkpoints = Checkpoints(workdir)
    checkpoints.save_best(params, 7, {"validation": {"loss": 1.0}})
    checkpoints.close()
    return workdir


@pytest.fixture(scope="session")
def translation_run(texts, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "translation"
    return save_run(tiny_config("translation", texts, workdir))


@pytest.fixture(scope="session")
def run_of(texts, tmp_path_factory):
    """Makes a run of a task."""

    def make(task, change=lambda params: params, evaluation=None, **model):
        config = tiny_config(task, texts, tmp_path_factory.mktemp("runs") / task, **model)
        if evaluation:
            config = dataclasses.replace(config, evaluation=evaluation)
        return save_run(config, change)

    return make


@pytest.fixture(scope="session")
def labelled_run(tmp_path_factory):
    """Makes a run on a data set of `labelled_files.py`, whose files lie beside it."""

    def make(dataset, change=lambda params: params, **data):
        directory = tmp_path_factory.mktemp(dataset)
        first, second, third = write(dataset, directory)
        config = Config(
            task=TABLE[dataset].task,
            workdir=str(directory / "run"),
            model=ModelConfig(
                vocabulary_size=300, features=8, mlp_features=8, num_layers=1, max_length=128
            ),
            data=DataConfig(
                directory=str(directory),
                dataset=dataset,
                train=(first,),
                validation=(second,),
                test=(third,),
                batch_size=4,
                cache_directory=str(directory / "cache"),
                **{"sequence_length": 96, **data},
            ),
            evaluation=EvaluationConfig(batch_size=4, answer_length=90),
        )
        return save_run(resolve(config), change)

    return make


@pytest.fixture(scope="session")
def compiled():
    """A list that gets the name of each function that XLA compiles from now on."""
    names = []

    def heard(name, seconds, *, fun_name="", **about):
        if name.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return names
