"""Whole runs in this process, on real text, with one device."""

import contextlib
import json
import os
import shutil
import signal
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from mhe_jax import tasks
from mhe_jax.config import InputError
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.config.files import METRICS, RESULT
from mhe_jax.tasks import make_tokenizer
from mhe_jax.tasks.task import Task
from mhe_jax.training import curve, loop, tracking
from mhe_jax.training.checkpoint import restore_params
from mhe_jax.training.cluster.group import Stopped
from mhe_jax.training.run import resume
from mhe_jax.training.stepper import Stepper

pytestmark = pytest.mark.whole_run


def train(config):
    return loop.train(config, jax.devices()[:1])


def computed(line):
    """A line of the log without how fast it came."""
    return {k: v for k, v in line.items() if "second" not in k and k != "goodput"}


def assert_same_run(one, other, saved):
    """States bit for bit, and all that was logged but speed."""
    jax.tree.map(np.testing.assert_array_equal, saved(one), saved(other))
    logs = []
    for config in (one, other):
        found = list(tracking.read(Path(config.workdir) / METRICS))
        logs.append([computed(line) for line in found])
    assert logs[0] == logs[1]


def steps_in(config, name="checkpoints"):
    return sorted(int(path.name) for path in (Path(config.workdir) / name).iterdir())


def interrupt(monkeypatch, step, *signals):
    """Send signals to this process when `step` is read."""
    advance = tracking.Tracker.advance

    def advance_and_kill(self, done):
        advance(self, done)
        if done == step:
            for number in signals:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(tracking.Tracker, "advance", advance_and_kill)


@pytest.mark.parametrize("task", ["mlm", "lm", "translation"])
def test_a_run_from_beginning_to_end(tiny, task, capsys, monkeypatch):
    drawn, draw = [], curve.learning_curve
    monkeypatch.setattr(loop, "learning_curve", lambda *a: drawn.append(a) or draw(*a))
    changes = {"optimizer.ema_decay": 0.9, "optimizer.label_smoothing": 0.1}
    config = tiny(task, **changes, **{"train.profile_steps": (2, 2)})
    result = train(config)
    assert drawn == [(Path(config.workdir), tasks.TASKS[task], result["best_step"])]
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
        curve.PICTURE,
        METRICS,
        "profile",
        RESULT,
        "tokenizer.model",
    ]
    assert list((workdir / "profile").rglob("*.xplane.pb"))
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
    assert "6 of 6 steps are done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("comes", "stop"),
    [
        pytest.param(2, 3, marks=pytest.mark.rest),
        (3, 3),
        pytest.param(4, 5, marks=pytest.mark.rest),
    ],
)
def test_sigterm_saves_and_the_run_goes_on_exactly(
    tiny, tmp_path, saved, monkeypatch, comes, stop, capsys
):
    """While step 3 runs, which is validated; in its validation; when step 4 is to be saved."""
    whole = tiny("mlm", **{"optimizer.ema_decay": 0.9, "workdir": str(tmp_path / "whole")})
    train(whole)
    config = tiny("mlm", **{"optimizer.ema_decay": 0.9})
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


def test_process_0_decides_first_where_the_tokenizer_lies(tiny, monkeypatch):
    """Another would take its own look before process 0 has made or left one."""
    order = []

    @contextlib.contextmanager
    def first_one_first(name):
        order.append("process 0 is done")
        yield

    def own_tokenizer(config):
        order.append("decided")
        raise ZeroDivisionError  # that is all

    monkeypatch.setattr(loop.group, "first_one_first", first_one_first)
    monkeypatch.setattr(loop.resume, "own_tokenizer", own_tokenizer)
    with pytest.raises(ZeroDivisionError):
        train(tiny("lm"))
    assert order == ["process 0 is done", "decided"]


@pytest.mark.usefixtures("hang_ups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_save_too(tiny, monkeypatch, number):
    config = tiny("lm")
    interrupt(monkeypatch, 2, number)
    with pytest.raises(Stopped) as stopped:
        train(config)
    assert stopped.value.code == 128 + number
    assert steps_in(config)[-1] == 3


@pytest.mark.parametrize(("average", "counts"), [("average", "average"), (None, "parameters")])
def test_what_is_validated(tiny, average, counts):
    """The average where there is one."""
    steps, asked = Stepper.__new__(Stepper), []
    steps.config, steps.meta = tiny("lm"), {}
    steps.task = tasks.of(steps.config)
    steps.signals = types.SimpleNamespace(agreed=lambda: 0)
    steps.tracker = types.SimpleNamespace(log=lambda *_: None, doing=lambda *_: None)
    steps._on_devices = lambda rows: rows

    def score(params, rows):
        asked.append(params)
        return {"loss": 4.5, "count": 3.0}

    steps.eval_step = score
    steps.measure = lambda params: asked.append(params) or {"bleu": 7.0}
    validation = types.SimpleNamespace(iterate=lambda *_: contextlib.nullcontext([{}, {}]))
    state = types.SimpleNamespace(params="parameters", ema_params=average)
    assert steps._validate(state, 5, validation) == 0
    assert asked == [counts, counts, counts]  # two batches, and the sample
    assert steps.meta["validated_step"] == 5
    assert steps.meta["validation"]["loss"] == 1.5
    assert steps.meta["validation"]["bleu"] == 7.0


def test_a_run_can_be_made_longer(tiny, tmp_path, saved):
    whole = tiny("lm", **{"workdir": str(tmp_path / "whole")})
    train(whole)
    train(tiny("lm", **{"train.num_steps": 3}))
    config = tiny("lm")
    train(config)
    assert_same_run(whole, config, saved)
    with pytest.raises(InputError, match="has done 6 already"):
        train(tiny("lm", **{"train.num_steps": 5}))


def test_a_run_shorter_than_its_log_has_a_line(tiny):
    config = tiny("lm", **{"train.num_steps": 3, "train.log_every": 100})
    train(config)
    logged = tracking.read(Path(config.workdir) / METRICS)
    assert [(line["step"], line["split"]) for line in logged] == [(3, "train"), (3, "validation")]


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tiny, saved, capsys):
    config = tiny("mlm", **{"train.num_steps": 4})
    train(config)
    wild = tiny("mlm", **{"train.num_steps": 20, "optimizer.learning_rate": 1e30})
    with pytest.raises(Stopped) as stopped:
        train(wild)
    assert stopped.value.code == 1
    good = steps_in(wild)[-1]
    assert 4 <= good < 20
    assert f"last good checkpoint: step {good} in {wild.workdir}" in str(stopped.value)
    assert str(stopped.value) in capsys.readouterr().err
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved(wild).params))


def test_another_model_in_the_same_directory_is_refused_untouched(tiny):
    config = tiny("lm", **{"train.num_steps": 2})
    train(config)
    workdir = Path(config.workdir)
    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="model.mlp_features=24, not 32"):
        train(tiny("lm", **{"model.mlp_features": 32}))
    assert before == {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}


def test_input_errors_leave_no_directory(tiny):
    config = tiny("lm", **{"data.train": ("nothing.en",)})
    with pytest.raises(InputError, match="nothing.en"):
        train(config)
    assert not Path(config.workdir).exists()


def test_without_validation(tiny):
    result = train(tiny("lm", **{"data.validation": (), "train.num_steps": 2}))
    assert result["validation_loss"] is None
    assert result["best_step"] is None


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("loss", (5.0, 3.0, 4.0, 3.0, 7.0), 2),
        # The official score counts, and more of it is better; then the loss, here 1 + score.
        ("score", (-0.5, 0.7, 0.4, 0.7, 0.2), 2),
        ("tie", (3.0, 2.5, 2.0, 2.5, 2.0), 3),
    ],
)
def test_the_first_of_the_best_is_kept(tiny, saved, monkeypatch, name, values, best):
    """Its parameters are the average, as that is what was validated."""
    told = iter(values)

    def measure(self, found, batches):
        value = next(told)
        if name == "tie":
            return {"loss": value, "score": 0.7}
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


def test_a_tokenizer_of_a_start_that_became_no_run_is_made_anew(tiny, tmp_path):
    """It may have read other text."""
    whole = train(tiny("lm"))
    other = tiny("lm", workdir=str(tmp_path / "other"))
    other_tokenizer(tiny, Path(other.workdir) / resume.DRAFT)
    assert train(other)["best_validation_loss"] == whole["best_validation_loss"]
    assert not Path(other.workdir, resume.DRAFT).exists()


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


@pytest.mark.parametrize("named", [True, False])
def test_a_tokenizer_that_lies_in_the_workdir_is_used_and_stays(tiny, capsys, named):
    config = tiny("lm", **{"train.num_steps": 2})
    path = Path(config.workdir) / "tokenizer.model"
    other_tokenizer(tiny, path)
    before = path.read_bytes()
    train(set_field(config, "data.tokenizer", str(path)) if named else config)
    assert path.read_bytes() == before
    told = f"tokenizer: {path}, which was there before the run"
    assert told in capsys.readouterr().err


def test_a_tokenizer_under_another_name_in_the_workdir_stays(tiny):
    path = Path(tiny().workdir) / "mine.model"
    other_tokenizer(tiny, path)
    before = path.read_bytes()
    train(tiny("lm", **{"train.num_steps": 2, "data.tokenizer": str(path)}))
    assert path.read_bytes() == before == path.with_name("tokenizer.model").read_bytes()


def test_other_text_under_the_same_name_is_refused(tiny, text, tmp_path):
    for split in ("train", "validation"):
        shutil.copy(text / f"{split}.en", tmp_path / f"{split}.en")
    config = tiny("lm", **{"data.directory": str(tmp_path)})
    train(config)
    lines = (tmp_path / "train.en").read_text().splitlines(keepends=True)
    (tmp_path / "train.en").write_text("".join(lines[:100]))
    with pytest.raises(InputError, match="data.train has changed"):
        train(set_field(config, "train.num_steps", 9))
    assert steps_in(config) == [4, 6]


def test_eight_devices_give_the_numbers_of_one(tiny, tmp_path):
    changes = {"optimizer.epsilon": 1e-3, "train.num_steps": 3}
    one = train(tiny("mlm", **changes))
    many = loop.train(tiny("mlm", **changes, workdir=str(tmp_path / "many")))
    assert many["num_devices"] == 8
    assert one["validation_loss"] == pytest.approx(many["validation_loss"], abs=1e-5)
