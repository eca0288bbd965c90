"""Runs to export, and how they are loaded."""

from pathlib import Path

import jax
import pytest
from tiny_runs import save_run, tiny_config, write_texts

from mhe_jax.config.fields import load_json
from mhe_jax.evaluation.run import Run


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("texts")
    write_texts(directory)
    return directory


@pytest.fixture(scope="session")
def run_of(texts, tmp_path_factory):
    """`run_of("lm", **{"model.attention.kind": "mqa"})`: the directory of a run of a task."""

    def make(task, **fields):
        return save_run(tiny_config(task, texts, tmp_path_factory.mktemp("runs") / task, **fields))

    return make


@pytest.fixture(scope="session")
def load():
    """`load(directory)`: a run, loaded on one device, or on the devices given."""

    def loaded(directory, devices=None):
        config = load_json(Path(directory) / "config.json")
        return Run.load(Path(directory), config, devices or jax.devices()[:1])

    return loaded
