"""Tiny runs with random parameters, as `train.py` leaves them."""

import dataclasses
import functools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from labelled_files import write
from random_parameters import random_parameters

import mhe_jax
from mhe_jax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
)
from mhe_jax.config.fields import save_json
from mhe_jax.data import EOS
from mhe_jax.evaluation import answer_lines, evaluate
from mhe_jax.evaluation.run import Run
from mhe_jax.tasks import TASKS, make_tokenizer, resolve
from mhe_jax.tasks.labelled.table import TABLE
from mhe_jax.training.checkpoint import Checkpoints
from mhe_jax.training.state import TrainState

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
    state = TrainState.create(params, optax.identity(), jax.random.key(0), False)
    checkpoints.save(state, 7, {"validated_step": 7, "validation": {"loss": 1.0}})
    checkpoints.close()
    return workdir


def not_a_number(params):
    return jax.tree.map(lambda x: x * jnp.nan, params)


def eos_is(bias):
    def change(params):
        params["embeddings"]["vocabulary_bias"][EOS] = bias
        return params

    return change


# What parameters may be beside random ones: broken, or with eos before or after all other tokens.
CHANGES = {
    None: lambda params: params,
    "not a number": not_a_number,
    "ending": eos_is(1000.0),
    "endless": eos_is(-50.0),
    "never ending": eos_is(-np.inf),
}


@pytest.fixture(scope="session")
def run_of(texts, tmp_path_factory):
    """`run_of(task, change)`: the workdir of a run with parameters of `CHANGES`, made once."""

    @functools.cache
    def make(task, change=None, **model):
        config = tiny_config(task, texts, tmp_path_factory.mktemp("runs") / task, **model)
        return save_run(config, CHANGES[change])

    return make


@pytest.fixture(scope="session")
def translation_run(run_of):
    return run_of("translation")


@pytest.fixture(scope="session")
def labelled_run(tmp_path_factory):
    """Makes a run on a data set of `labelled_files.py`, whose files lie beside it, once."""

    @functools.cache
    def make(dataset, change=None):
        windows = {"sequence_length": 64, "window_stride": 20, "question_length": 20}
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
                **windows if dataset.startswith("squad") else {"sequence_length": 96},
            ),
            evaluation=EvaluationConfig(batch_size=4, answer_length=90),
        )
        return save_run(resolve(config), CHANGES[change])

    return make


LOADED = {}


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    """A checkpoint is restored once, and what its run has compiled is there for all tests."""
    restore = Run.load

    def load(workdir, config, devices=None):
        given = config.evaluation
        key = (Path(workdir), repr((config.model, config.mesh)), *(devices or jax.devices()))
        key += (given.checkpoint, given.average_checkpoints, given.quantize)
        if key not in LOADED:
            LOADED[key] = restore(workdir, config, devices)
        return dataclasses.replace(LOADED[key], config=config)

    monkeypatch.setattr(Run, "load", load)


@pytest.fixture
def load(run_of, translation_run):
    """`load("lm", beam_size=1)`: a run of a task, or of a workdir, on one device."""

    def make(run, **settings):
        workdir = run_of(run) if isinstance(run, str) else run
        return mhe_jax.load(workdir, devices=jax.devices()[:1], **settings)

    return make


@pytest.fixture(scope="session")
def score():
    """`score(run, split="validation")`: what `evaluate` finds with other settings."""

    def score(run, devices=1, **changes):
        evaluation = dataclasses.replace(run.evaluation, **changes)
        return evaluate(run.workdir, evaluation, devices=jax.devices()[:devices])

    return score


@pytest.fixture(scope="session")
def by_lines():
    """`by_lines("translate", run, lines)`: what is written for them, and the summary."""

    def by_lines(method, run, lines, written=None, chunk=None, **changes):
        written = [] if written is None else written
        given = run.workdir, dataclasses.replace(run.evaluation, **changes), iter(lines)
        one = {"devices": jax.devices()[:1], "chunk": chunk}
        summary = answer_lines(method, *given, written.append, **one)
        return "".join(written), summary

    return by_lines


@pytest.fixture(scope="session")
def compiled():
    """A list that gets the name of each function that XLA compiles from now on."""
    names = []

    def heard(name, seconds, *, fun_name="", **about):
        if name.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return names
