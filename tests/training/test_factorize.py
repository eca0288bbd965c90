"""A trained run, its matrices factorized: scores the same at full rank, and trains on."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from whole_runs import train

from mhe_jax.cli import commands
from mhe_jax.config import InputError, KroneckerConfig
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.evaluation import evaluate
from mhe_jax.tasks import make_tokenizer
from mhe_jax.training.from_run import factorize
from mhe_jax.training.tracking import read

pytestmark = pytest.mark.whole_run

FULL = KroneckerConfig(attention=999, mlp=999, embedding=999)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Where the one trained run of all tests lies."""
    return tmp_path_factory.mktemp("dense") / "run"


@pytest.fixture
def trained(tiny, dense):
    config = tiny(
        "lm",
        **{
            "workdir": str(dense),
            "data.test": ("validation.en",),
            "train.num_steps": 60,
            "train.eval_every": 60,
            "optimizer.learning_rate": 1e-2,
        },
    )
    if not (dense / "result.json").exists():
        train(config)
    return config


def scores(run, which):
    config = load_json(Path(run) / "config.json")
    evaluation = dataclasses.replace(config.evaluation, checkpoint=which)
    return evaluate(Path(run), evaluation)


def test_full_rank_scores_as_the_dense_run_and_less_does_not(trained, tmp_path):
    found = factorize(trained.workdir, tmp_path / "full", FULL)
    assert max(found["errors"].values()) < 1e-5
    first, then = scores(trained.workdir, "best"), scores(tmp_path / "full", "last")
    assert then["loss"] == pytest.approx(first["loss"], rel=1e-5)

    few = factorize(trained.workdir, tmp_path / "few", KroneckerConfig(attention=1, mlp=1))
    assert 0 < few["factorized"] < few["dense"]
    assert not any("token" in path for path in few["errors"])
    assert all(0.01 < error < 1 for error in few["errors"].values())
    assert scores(tmp_path / "few", "last")["loss"] > 1.001 * first["loss"]


def test_the_same_command_trains_on_from_there(trained, saved, tmp_path):
    """From the average, where there is one."""
    run = str(tmp_path / "averaged")
    averaged = set_field(set_field(trained, "optimizer.ema_decay", 0.5), "workdir", run)
    train(averaged)
    new = tmp_path / "new"
    factorize(run, new, KroneckerConfig(attention=2, mlp=2))
    config = load_json(new / "config.json")
    state = saved(config)
    jax.tree.map(np.testing.assert_array_equal, state.params, state.ema_params)
    before = scores(new, "last")["loss"]
    result = train(config)
    assert result["steps"] == 60
    steps = [line["step"] for line in read(new / "metrics.jsonl") if line["split"] == "train"]
    assert steps[0] == 2, "log_every is 2: it began with the first step"
    assert scores(new, "best")["loss"] < before


def test_what_is_wrong_is_told_and_nothing_is_written(tiny, trained, tmp_path):
    other = tmp_path / "other.model"
    make_tokenizer(tiny("lm", **{"data.train": ("train.de",)}), other)
    new, one = tmp_path / "new", KroneckerConfig(mlp=1)
    with pytest.raises(InputError, match="no run at .*nowhere"):
        factorize(tmp_path / "nowhere", new, one)
    with pytest.raises(InputError, match="no number of terms is given"):
        factorize(trained.workdir, new, KroneckerConfig(apply="factored"))
    with pytest.raises(InputError, match="model.kronecker.mlp"):
        factorize(trained.workdir, new, KroneckerConfig(mlp=0))
    with pytest.raises(InputError, match=r"^workdir=.*/new\[1\]: takes a path without"):
        factorize(trained.workdir, tmp_path / "new[1]", one)
    assert not new.exists()
    with pytest.raises(InputError, match="is there already: takes a new directory"):
        factorize(trained.workdir, trained.workdir, one)
    lost = tmp_path / "lost"
    shutil.copytree(trained.workdir, lost)
    lost.joinpath("tokenizer.model").unlink()
    with pytest.raises(InputError, match="lost/tokenizer.model: no such file"):
        factorize(lost, new, one)
    shutil.copyfile(other, lost / "tokenizer.model")
    with pytest.raises(InputError, match="is not the tokenizer of the checkpoint"):
        factorize(lost, new, one)
    assert not new.exists()
    factorize(trained.workdir, new, one)
    shutil.copyfile(other, new / "tokenizer.model")
    with pytest.raises(InputError, match="is not the tokenizer of the checkpoint"):
        scores(new, "last")
    with pytest.raises(InputError, match="is factorized already"):
        factorize(new, tmp_path / "newer", one)


def test_the_command_prints_errors_as_a_line_of_json(trained, tmp_path, capsys):
    commands.main(["factorize", trained.workdir, str(tmp_path / "new"), "--mlp", "2"])
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [*errors] == [f"decoder/layer_0/mlp/{name}/kernel" for name in ("down", "up")]
    for wrong in ([trained.workdir, str(tmp_path / "newer"), "--mlp", "many"], [trained.workdir]):
        with pytest.raises(InputError, match="--mlp.*many|is given"):
            commands.main(["factorize", *wrong])
