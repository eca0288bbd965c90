"""TensorBoard and Weights & Biases get what metrics.jsonl gets, from one run to its end."""

import json
import struct
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mhe_jax.config import InputError
from mhe_jax.config.fields import set_field, to_dict
from mhe_jax.config.files import METRICS
from mhe_jax.training import metric_writers, tracking
from mhe_jax.training.loop import train
from mhe_jax.training.metric_writers import NEEDS, make_writers
from mhe_jax.training.tracking import Tracker


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Weights & Biases without a network, and without an account."""
    pytest.importorskip("wandb", reason="needs wandb (extra `wandb`)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def records(data):
    """Of a log of LevelDB: blocks of 32 KiB, each of parts with checksum, length and type."""
    record, place = b"", 7  # after the name of the format
    while place + 7 <= len(data):
        if (left := -place % (1 << 15)) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def logged(file):
    """The metrics of each call of `log`, as the library wrote them down."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for data in records(file.read_bytes()):
        items = Record.FromString(data).history.item
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
        found.append({key: v for key, v in values.items() if not key.startswith("_")})
    return [values for values in found if values]


def parts(config):
    """The local files of each process that went on with the run of Weights & Biases, in order."""

    return sorted(
        Path(config.workdir).glob("wandb/*run-*/*.wandb"), key=lambda p: p.stat().st_mtime
    )


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


def test_why_a_run_ends_comes_before_a_writer_that_cannot_be_closed(tmp_path, capsys):
    writers = [Closable(False), Closable(True)]
    with pytest.raises(ZeroDivisionError), Tracker(tmp_path, 10, writers=writers):
        raise ZeroDivisionError
    assert all(writer.closed for writer in writers)
    assert capsys.readouterr().err == "note: OSError: no network\n"


@pytest.mark.parametrize("broken", [False, True])
def test_a_log_that_cannot_be_opened_leaves_no_writer_open(tmp_path, broken):
    (tmp_path / METRICS).mkdir()
    writers = [Closable(broken), Closable(False)]
    with pytest.raises(IsADirectoryError):
        Tracker(tmp_path, 10, writers=writers)
    assert all(writer.closed for writer in writers)


def test_a_writer_that_is_refused_leaves_no_other_open(tiny, monkeypatch):
    made = []

    def opened(*_):
        made.append(Closable(False))
        return made[-1]

    def refused(*_):
        raise InputError("train.wandb=True: nobody is logged in")

    monkeypatch.setattr(metric_writers, "check_writers", lambda _: None)
    monkeypatch.setattr(metric_writers, "TensorBoard", opened)
    monkeypatch.setattr(metric_writers, "WeightsAndBiases", refused)
    with pytest.raises(InputError, match="nobody is logged in"):
        make_writers(tiny("lm", **{"train.tensorboard": True, "train.wandb": True}), 0)
    assert [writer.closed for writer in made] == [True]


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


def test_what_wandb_is_told(tiny, tmp_path, monkeypatch):
    """Also where the library is not installed."""
    told = []
    library = ModuleType("wandb")
    library.__spec__ = ModuleSpec("wandb", None)
    run = SimpleNamespace(define_metric=lambda *_, **__: None)
    fake = {"init": lambda **said: told.append(said) or run, "Error": OSError, "Settings": dict}
    vars(library).update(fake)
    monkeypatch.setitem(sys.modules, "wandb", library)
    config = tiny("lm", **{"train.wandb": True, "workdir": str(tmp_path / "mine")})
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    make_writers(config, 0)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    make_writers(config, 4)
    first, second = told
    assert (first.pop("project"), second.pop("project")) == ("mhe_jax", "ours")
    assert first == second
    assert (first["name"], first["dir"], first["resume"]) == ("mine", config.workdir, "allow")
    assert first["config"] == to_dict(config)


@pytest.mark.whole_run
def test_a_run_that_goes_on_is_one_run_of_wandb(tiny, offline):
    config = tiny("lm", **{"train.wandb": True, "train.num_steps": 4})
    train(config)
    train(set_field(config, "train.num_steps", 6))
    first, second = parts(config)
    assert first.name == second.name  # run-ID.wandb
    assert [
        (line["step"], sorted({key.split("/")[0] for key in line})) for line in logged(first)
    ] == [
        (2, ["step", "train"]),
        (3, ["step", "validation"]),
        (4, ["step", "train"]),
        (4, ["step", "validation"]),
    ]
    assert [line["step"] for line in logged(second)] == [6, 6]
    written = tracking.read(Path(config.workdir, METRICS))
    for line, sent in zip(written, logged(first) + logged(second), strict=True):
        assert sent[f"{line['split']}/loss"] == pytest.approx(line["loss"], rel=1e-6)


def test_other_runs_are_others_of_wandb(tiny, offline, tmp_path):
    names = set()
    for name in ("a", "b"):
        config = tiny("lm", **{"train.wandb": True, "workdir": str(tmp_path / name)})
        (writer,) = make_writers(config, 0)
        writer.close()
        (part,) = parts(config)
        names.add(part.name)
    assert len(names) == 2


def test_what_wandb_refuses_is_one_line(tiny, offline, monkeypatch):
    import wandb

    def refuses(**settings):
        raise wandb.errors.UsageError("No API key configured.\n Use `wandb login`.")

    monkeypatch.setattr(wandb, "init", refuses)
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
