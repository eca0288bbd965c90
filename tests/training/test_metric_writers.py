"""TensorBoard and Weights & Biases get what metrics.jsonl gets, from one run to its end."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from mhe_jax.config import InputError
from mhe_jax.config.fields import set_field, to_dict
from mhe_jax.config.files import METRICS
from mhe_jax.training.loop import train
from mhe_jax.training.metric_writers import NEEDS, make_writers
from mhe_jax.training.tracking import Tracker


def test_every_writer_gets_the_metrics_and_is_closed(tmp_path):
    class Kept:
        def __init__(self):
            self.found, self.closed = [], False

        def log(self, step, split, metrics):
            self.found.append((step, split, dict(metrics)))

        def close(self):
            self.closed = True

    writers = [Kept(), Kept()]
    with Tracker(tmp_path, 10, writers=writers) as tracker:
        tracker.log(2, "train", {"loss": 1.5})
        tracker.log(3, "validation", {"loss": 2.5})
    for writer in writers:
        assert writer.found == [(2, "train", {"loss": 1.5}), (3, "validation", {"loss": 2.5})]
        assert writer.closed
    assert (tmp_path / METRICS).exists()


class Closable:
    def __init__(self, broken):
        self.broken, self.closed = broken, False

    def close(self):
        self.closed = True
        if self.broken:
            raise OSError("no network")


def test_a_writer_that_cannot_be_closed_leaves_no_other_open(tmp_path):
    writers = [Closable(True), Closable(False)]
    with pytest.raises(OSError, match="no network"):
        Tracker(tmp_path, 10, writers=writers).close()
    assert all(writer.closed for writer in writers)


def test_why_a_run_ends_comes_before_a_writer_that_cannot_be_closed(tmp_path):
    writers = [Closable(False), Closable(True)]
    with pytest.raises(ZeroDivisionError), Tracker(tmp_path, 10, writers=writers):
        raise ZeroDivisionError
    assert all(writer.closed for writer in writers)


def test_none_is_made_unless_asked_for(tiny):
    assert make_writers(tiny("lm"), 0) == []


def test_tensorboard(tiny, tmp_path):
    pytest.importorskip("tensorboardX")
    config = tiny("lm", **{"train.tensorboard": True, "workdir": str(tmp_path)})
    (writer,) = make_writers(config, 0)
    writer.log(1, "train", {"loss": 1.5})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_tensorboard_forgets_what_comes_again(tiny, monkeypatch):
    """The step that a run goes on from is kept, and those after it are not."""
    tensorboard = pytest.importorskip("tensorboardX")
    told = []
    monkeypatch.setattr(tensorboard, "SummaryWriter", lambda *_, **settings: told.append(settings))
    make_writers(tiny("lm", **{"train.tensorboard": True}), 4)
    assert told == [{"purge_step": 5}]


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
    fake = {"init": lambda **said: begun.append(said) or run, "Error": OSError, "Settings": dict}
    vars(library).update(fake)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return SimpleNamespace(library=library, begun=begun, told=told)


def test_a_run_that_goes_on_is_one_run_of_wandb_and_others_are_others(
    tiny, tmp_path, monkeypatch, wandb
):
    config = tiny("lm", **{"train.wandb": True, "workdir": str(tmp_path / "mine")})
    (writer,) = make_writers(config, 0)
    writer.log(3, "validation", {"loss": 2.0})
    writer.close()
    assert wandb.told == [
        ("*", {"step_metric": "step"}),  # its own count never goes back
        {"step": 3, "validation/loss": 2.0},
        "finish",
    ]
    make_writers(config, 4)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    make_writers(set_field(config, "workdir", str(tmp_path / "other")), 0)
    first, again, other = wandb.begun
    assert first == again
    assert first["id"] != other["id"]
    assert (first["project"], other["project"]) == ("mhe_jax", "ours")
    assert (first["name"], first["dir"], first["resume"]) == ("mine", config.workdir, "allow")
    assert first["config"] == to_dict(config)


def test_what_wandb_refuses_is_one_line(tiny, wandb):
    def refuses(**settings):
        raise OSError("No API key configured.\n Use `wandb login`.")

    wandb.library.init = refuses
    refused = "^train.wandb=True: No API key configured. Use `wandb login`.$"
    with pytest.raises(InputError, match=refused):
        make_writers(tiny("lm", **{"train.wandb": True}), 0)


@pytest.mark.parametrize("field", NEEDS)
def test_without_its_library_no_run_is_begun(tiny, tmp_path, monkeypatch, field):
    library, extra = NEEDS[field]
    monkeypatch.setitem(sys.modules, library, None)
    config = tiny("lm", **{f"train.{field}": True})
    with pytest.raises(InputError, match=rf"train.{field}=True needs {library}.*\[{extra}\]"):
        train(config)
    assert not (tmp_path / "run").exists()
