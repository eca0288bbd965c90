"""TensorBoard and Weights & Biases get what metrics.jsonl gets, from one run to its end."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mhe_jax.config import InputError
from mhe_jax.config.fields import set_field, to_dict
from mhe_jax.config.files import METRICS
from mhe_jax.training.loop import train
from mhe_jax.training.tracking import NEEDS, Tracker, make_writers


def writers_of(config, start):
    return make_writers(config.train, Path(config.workdir), start, to_dict(config))


class Kept:
    def __init__(self, broken=False):
        self.found, self.closed, self.broken = [], False, broken

    def __iter__(self):
        yield lambda step, split, metrics: self.found.append((step, split, dict(metrics)))
        yield self.close

    def close(self):
        self.closed = True
        if self.broken:
            raise OSError("no network")


def test_every_writer_gets_the_metrics_and_is_closed(tmp_path):
    writers = [Kept(), Kept()]
    with Tracker(tmp_path, 10, writers=[(*writer,) for writer in writers]) as tracker:
        tracker.log(2, "train", {"loss": 1.5})
        tracker.log(3, "validation", {"loss": 2.5})
    for writer in writers:
        assert writer.found == [(2, "train", {"loss": 1.5}), (3, "validation", {"loss": 2.5})]
        assert writer.closed
    assert (tmp_path / METRICS).exists()


@pytest.mark.parametrize(("divisor", "error"), [(0, ZeroDivisionError), (1, OSError)])
def test_a_writer_that_cannot_be_closed(tmp_path, divisor, error):
    """It leaves no other open, and why a run ends comes first."""
    writers = [Kept(), Kept(broken=True), Kept()]
    with pytest.raises(error), Tracker(tmp_path, 10, writers=[(*w,) for w in writers]):
        _ = 1 // divisor
    assert all(writer.closed for writer in writers)


def test_tensorboard_forgets_what_comes_again(tiny, tmp_path, monkeypatch):
    """The step that a run goes on from is kept, and those after it are not."""
    tensorboard = pytest.importorskip("tensorboardX")
    make, told = tensorboard.SummaryWriter, []
    monkeypatch.setattr(
        tensorboard, "SummaryWriter", lambda *at, **how: told.append(how) or make(*at, **how)
    )
    config = tiny("lm", **{"train.tensorboard": True, "workdir": str(tmp_path)})
    ((log, close),) = writers_of(config, 4)
    assert told == [{"purge_step": 5}]
    log(5, "train", {"loss": 1.5})
    close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the library: how each run was begun, and what it was told."""
    library, begun, told = ModuleType("wandb"), [], []
    library.__spec__ = ModuleSpec("wandb", None)
    run = SimpleNamespace(
        define_metric=lambda *names, **how: told.append((*names, how)),
        log=told.append,
        finish=lambda: told.append("finish"),
    )
    vars(library).update(init=lambda **said: begun.append(said) or run)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return SimpleNamespace(library=library, begun=begun, told=told)


def test_a_run_that_goes_on_is_one_run_of_wandb_and_others_are_others(
    tiny, tmp_path, monkeypatch, wandb
):
    config = tiny("lm", **{"train.wandb": True, "workdir": str(tmp_path / "mine")})
    ((log, close),) = writers_of(config, 0)
    log(3, "validation", {"loss": 2.0})
    close()
    assert wandb.told == [
        ("*", {"step_metric": "step"}),  # its own count never goes back
        {"step": 3, "validation/loss": 2.0},
        "finish",
    ]
    writers_of(config, 4)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    writers_of(set_field(config, "workdir", str(tmp_path / "other")), 0)
    first, again, other = wandb.begun
    assert first == again
    assert first["id"] != other["id"]
    assert (first["project"], other["project"]) == ("mhe_jax", "ours")
    assert (first["name"], first["dir"], first["resume"]) == ("mine", config.workdir, "allow")
    assert first["config"] == to_dict(config)


@pytest.mark.parametrize("field", NEEDS)
def test_without_its_library_no_run_is_begun(tiny, tmp_path, monkeypatch, field):
    library, extra = NEEDS[field]
    monkeypatch.setitem(sys.modules, library, None)
    config = tiny("lm", **{f"train.{field}": True})
    with pytest.raises(InputError, match=rf"train.{field}=True needs {library}.*\[{extra}\]"):
        train(config)
    assert not (tmp_path / "run").exists()
