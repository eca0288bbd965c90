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
    """`run_of("lm", **{"model.attention.kind": "mqa"})`: the directory of a run, made once.

    With `new=True` it is the caller's own, to write into.
    """
    made = {}

    def make(task, new=False, orbax=False, **fields):
        key = (task, orbax, str(sorted(fields.items())))
        if new or key not in made:
            workdir = tmp_path_factory.mktemp("runs") / task
            run = save_run(tiny_config(task, texts, workdir, **fields), orbax=orbax)
            if new:
                return run
            made[key] = run
        return made[key]

    return make


@pytest.fixture(scope="session")
def load():
    """`load(directory)`: a run, loaded on one device, or on the devices given."""

    def loaded(directory, devices=None):
        config = load_json(Path(directory) / "config.json")
        return Run.load(Path(directory), config, devices or jax.devices()[:1])

    return loaded
