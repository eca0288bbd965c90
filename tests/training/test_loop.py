"""Whole runs in this process, on real text, with one device."""

import contextlib
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from whole_runs import assert_same, logged, steps_in, train

from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.config.files import METRICS, RESULT
from mhe_jax.tasks import make_tokenizer
from mhe_jax.tasks.task import Task
from mhe_jax.training import loop, tracking
from mhe_jax.training.checkpoint import restore_params
from mhe_jax.training.group import Stopped
from mhe_jax.training.meter import Meter

pytestmark = pytest.mark.whole_run


def assert_same_run(one, other, saved):
    """States bit for bit, and all that was logged but speed."""
    assert_same(saved(one), saved(other))
    assert logged(one.workdir) == logged(other.workdir)


def interrupt(monkeypatch, step, *signals):
    """Send signals to this process when `step` is read."""
    flush = Meter.flush

    def flush_and_kill(self):
        done = self._pending and self._pending[0]
        flush(self)
        if done == step:
            for number in signals:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(Meter, "flush", flush_and_kill)


@pytest.mark.parametrize("task", ["mlm", "lm", pytest.param("translation", marks=pytest.mark.rest)])
def test_a_run_from_beginning_to_end(finished, task, capsys):
    config, result = finished(task)
    assert json.loads(json.dumps(result)) == result
    assert result["task"] == task
    assert result["kind"] == "mhe_mul"
    assert result["attention"] == {"mhe_mul": "folded on xla"}
    assert result["steps"] == 6
    assert 0 < result["parameters"]["attention"] < result["parameters"]["total"]
    assert 4 < result["best_validation_loss"] <= result["validation_loss"] < 7
    assert np.exp(result["validation_loss"]) == pytest.approx(result["validation_perplexity"])
    assert result["tokens_per_second"] > 0
    assert (result["device"], result["num_devices"]) == ("cpu", 1)
    workdir = Path(config.workdir)
    assert sorted(path.name for path in workdir.iterdir()) == [
        "checkpoints",
        "config.json",
        METRICS,
        RESULT,
        "tokenizer.model",
    ]
    assert json.loads((workdir / RESULT).read_text()) == result
    assert steps_in(config) == sorted({4, 6, result["best_step"]})
    assert load_json(workdir / "config.json") == config
    found = list(tracking.read(workdir / METRICS))
    steps = [(line["step"], line["split"]) for line in found]
    assert steps == [
        (2, "train"),
        (3, "validation"),
        (4, "train"),
        (6, "train"),
        (6, "validation"),
    ]
    assert all(np.isfinite(v) for line in found for v in line.values() if type(v) is float)

    # Complete: the same result again, and nothing trained.
    before = (workdir / METRICS).read_text()
    again = train(config)
    assert again == result
    assert (workdir / METRICS).read_text() == before
    told = capsys.readouterr().err
    of = config.model.attention.num_heads, *result["parameters"].values()
    for part in ("mhe_mul, {} heads: {:,} parameters, {:,} of".format(*of), "6 steps on 1 × cpu"):
        assert part in told
    assert config.workdir in told
    assert "6 of 6 steps are done" in told


@pytest.mark.parametrize(
    ("comes", "stop"),
    [
        pytest.param(2, 3, marks=pytest.mark.rest),
        (3, 3),
        pytest.param(4, 5, marks=pytest.mark.rest),
    ],
)
def test_sigterm_saves_and_the_run_goes_on_exactly(
    finished, tmp_path, saved, monkeypatch, comes, stop, capsys
):
    """While step 3 runs, which is validated; in its validation; when step 4 is to be saved."""
    whole, _ = finished("mlm")
    config = set_field(whole, "workdir", str(tmp_path / "run"))
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt(patch, comes, signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            train(config)
    assert stopped.value.code == 143
    assert f"SIGTERM: stopped after step {stop}, which is saved" in capsys.readouterr().err
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert stop in steps_in(config)
    train(config)
    assert_same_run(whole, config, saved)


def test_a_run_can_be_made_longer(finished, tmp_path, saved):
    whole, _ = finished("lm")
    config = set_field(whole, "workdir", str(tmp_path / "run"))
    train(set_field(config, "train.num_steps", 3))
    train(config)
    assert_same(saved(whole), saved(config))

    def same(workdir):
        # But for the last line of the first run, and the one after it.
        told = ((3, "train"), (4, "train"))
        return [line for line in logged(workdir) if (line["step"], line["split"]) not in told]

    assert same(whole.workdir) == same(config.workdir)
    with pytest.raises(InputError, match="has done 6 already"):
        train(set_field(config, "train.num_steps", 5))


def test_a_run_shorter_than_its_log_has_a_line_and_chosen_steps_are_traced(tiny, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def trace(place):
        seen.append(place)
        yield
        seen.append("end")

    monkeypatch.setattr(jax.profiler, "trace", trace)
    run = Meter.run
    monkeypatch.setattr(Meter, "run", lambda self, *a: seen.append(a[-1]) or run(self, *a))
    changes = {"train.num_steps": 4, "train.eval_every": 4, "train.log_every": 100}
    config = tiny("lm", **changes, **{"train.profile_steps": (2, 3)})
    train(config)
    lines = logged(config.workdir)
    assert [(line["step"], line["split"]) for line in lines] == [(4, "train"), (4, "validation")]
    assert seen == [1, Path(config.workdir) / "profile", 2, 3, "end", 4]


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(copied, saved, capsys):
    wild = copied("mlm")
    for name, value in {"train.num_steps": 20, "optimizer.learning_rate": 1e30}.items():
        wild = set_field(wild, name, value)
    with pytest.raises(Stopped) as stopped:
        train(wild)
    assert stopped.value.code == 1
    good = steps_in(wild)[-1]
    assert 6 <= good < 20
    assert f"last good checkpoint: step {good} in {wild.workdir}" in str(stopped.value)
    assert str(stopped.value) in capsys.readouterr().err
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved(wild).params))


def test_another_model_in_the_same_directory_is_refused_untouched(copied):
    config = copied("lm")
    workdir = Path(config.workdir)
    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="model.mlp_features=24, not 32"):
        train(set_field(config, "model.mlp_features", 32))
    assert before == {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}


def test_input_errors_leave_no_directory(tiny):
    config = tiny("lm", **{"data.train": ("nothing.en",)})
    with pytest.raises(InputError, match="nothing.en"):
        train(config)
    assert not Path(config.workdir).exists()


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("loss", (5.0, 3.0, 4.0, 3.0, 7.0), 2),
        # The official score counts, and more of it is better; the loss is 1 + score.
        ("score", (-0.5, 0.7, 0.4, 0.7, 0.2), 2),
    ],
)
def test_the_first_of_the_best_is_kept(tiny, saved, monkeypatch, name, values, best):
    """Its parameters are the average, as that is what was validated."""
    told = iter(values)

    def measure(self, found, batches):
        value = next(told)
        return {"loss": value} if name == "loss" else {"loss": 1.0 + value, "score": value}

    monkeypatch.setattr(Task, "measure", measure)
    every = {"train.eval_every": 1, "train.checkpoint_every": 1, "train.keep_checkpoints": 5}
    config = tiny("lm", **every, **{"train.num_steps": 5, "optimizer.ema_decay": 0.9})
    result = train(config)
    assert (result["best_step"], next(told, None)) == (best, None)
    # Only where the loss decides, the loss of the best is the best loss.
    assert ("best_validation_loss" in result) == (name == "loss")
    loss = values[best - 1] + (name == "score")
    assert result.get("loss_at_best_step", result.get("best_validation_loss")) == loss
    if name == "score":
        assert result["best_validation_score"] == values[best - 1]
    target = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), saved(config).params)
    found, _ = restore_params(config.workdir, "best", target)
    wanted, _ = restore_params(config.workdir, str(best), target)  # the average of that step
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def other_tokenizer(tiny, path):
    return make_tokenizer(tiny("lm", **{"data.train": ("train.de",)}), path)


def test_a_start_that_ends_early_leaves_what_was_there_and_nothing_else(tiny, monkeypatch):
    def fail(*arguments, **options):
        raise InputError("something is wrong")

    monkeypatch.setattr(loop.tasks, "train_batches", fail)
    config = tiny("lm")
    workdir = Path(config.workdir)
    with pytest.raises(InputError, match="something is wrong"):
        train(config)
    assert not list(workdir.iterdir())
    other_tokenizer(tiny, workdir / "tokenizer.model")
    before = (workdir / "tokenizer.model").read_bytes()
    with pytest.raises(InputError, match="something is wrong"):
        train(config)
    assert [path.name for path in workdir.iterdir()] == ["tokenizer.model"]
    assert (workdir / "tokenizer.model").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("tokenizer.model", False),
        pytest.param("tokenizer.model", True, marks=pytest.mark.rest),
        ("mine.model", True),
    ],
)
def test_a_tokenizer_that_lies_in_the_workdir_is_used_and_stays(tiny, name, named):
    config = tiny("lm", **{"train.num_steps": 1, "data.validation": ()})
    path = Path(config.workdir) / name
    other_tokenizer(tiny, path)
    before = path.read_bytes()
    result = train(set_field(config, "data.tokenizer", str(path)) if named else config)
    assert result["validation_loss"] is result["best_step"] is None
    assert path.read_bytes() == before == path.with_name("tokenizer.model").read_bytes()


def test_a_tokenizer_that_is_not_the_one_of_the_config_is_refused(tiny):
    config = tiny("lm")
    there, named = Path(config.workdir, "tokenizer.model"), Path(config.workdir, "mine.model")
    other_tokenizer(tiny, there)
    make_tokenizer(config, named)
    before = there.read_bytes()
    with pytest.raises(InputError, match="tokenizer.model .*mine.model"):
        train(set_field(config, "data.tokenizer", str(named)))
    assert {path.name for path in there.parent.iterdir()} == {there.name, named.name}
    assert there.read_bytes() == before


def test_eight_devices_give_the_numbers_of_one(tiny, tmp_path):
    changes = {"optimizer.epsilon": 1e-3, "train.num_steps": 3}
    one = train(tiny("mlm", **changes))
    many = loop.train(tiny("mlm", **changes, workdir=str(tmp_path / "many")))
    assert many["num_devices"] == 8
    assert one["validation_loss"] == pytest.approx(many["validation_loss"], abs=1e-5)
