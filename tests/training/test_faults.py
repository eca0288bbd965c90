"""Disks that are full or closed, checkpoints that are broken, updates that are not numbers."""

import gc
import io
import os
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from whole_runs import assert_same, logged, steps_in, train

from mhe_jax.config import InputError
from mhe_jax.config.fields import set_field
from mhe_jax.data import TrainBatches
from mhe_jax.training import group as signals
from mhe_jax.training import loop, tracking
from mhe_jax.training.group import Stopped
from mhe_jax.training.optimizer import make_schedule

pytestmark = pytest.mark.whole_run


def test_a_damaged_newest_checkpoint_costs_one_and_is_told(copied, saved, capsys):
    config = copied("lm")
    wanted, workdir = saved(config), Path(config.workdir)
    file = next((workdir / "checkpoints/6/optimizer/ocdbt.process_0/d").iterdir())
    file.write_bytes(file.read_bytes()[::-1])
    capsys.readouterr()
    train(config)
    told = capsys.readouterr().err
    aside = workdir / "checkpoints_unreadable" / "6"
    assert f"warning: {file}: " in told
    assert f"is now at {aside}" in told
    assert "4 of 6 steps are done" in told
    assert told.index("compiling") < told.index("step 6/6 train")
    assert aside.is_dir()
    assert_same(wanted, saved(config))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=10000", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


# Orbax's other writes fail too, each with a warning of its own.
@pytest.mark.filterwarnings("ignore")
def test_a_full_disk_stops_the_run_with_the_last_good_step(copied, small_disk, capsys):
    config = copied("lm", small_disk / "run")
    left = os.statvfs(small_disk)
    with open(small_disk / "other", "wb") as other:  # someone else's
        other.write(bytes(left.f_bavail * left.f_bsize - 32 * 1024))
    with pytest.raises(Stopped) as stopped:
        train(set_field(config, "train.num_steps", 200))
    told = str(stopped.value)
    assert stopped.value.code == 1
    assert "; last good checkpoint: step 6 in " in told
    assert "\n" not in told
    assert {4, 6} <= {*steps_in(config)}
    gc.collect()
    assert told in capsys.readouterr().err


def test_a_log_on_a_full_disk_is_told_with_the_last_good_step(tiny, monkeypatch):
    """Its last line is still in memory when the log is closed, and has no room then either."""
    opened = tracking._open_log

    class Full(io.TextIOWrapper):
        def write(self, text):
            if '"step": 4' in text:
                self.full = True
            return super().write(text)

        def flush(self):
            if getattr(self, "full", False):
                raise OSError(28, "No space left on device")
            super().flush()

    monkeypatch.setattr(tracking, "_open_log", lambda path: Full(opened(path).detach(), "utf-8"))
    with pytest.raises(Stopped, match="No space left on device; last good checkpoint: step"):
        train(tiny("lm"))


def test_a_directory_that_cannot_be_written_is_an_input_error(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=f"workdir={workdir}: "):
            train(tiny("lm", workdir=str(workdir)))


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(step, ...)`: weights of these steps make loss and gradient infinite."""
    whole = TrainBatches.batch

    def make(*steps):
        def spoiled(self, number):
            rows = whole(self, number)
            if number + 1 in steps:
                rows = rows | {"weights": np.full_like(rows["weights"], np.inf)}
            return rows

        monkeypatch.setattr(TrainBatches, "batch", spoiled)

    return make


def skipping(tiny, num_steps, limit):
    """Logs every step, and leaves out so many."""
    changes = {"train.log_every": 1, "train.num_steps": num_steps, "train.skip_nonfinite": limit}
    return tiny("lm", **changes, **{"data.validation": (), "optimizer.ema_decay": 0.9})


def test_updates_that_are_not_finite_are_left_out_up_to_a_limit(tiny, saved, spoil, capsys):
    config = skipping(tiny, 5, 2)
    spoil(2, 4)
    train(config)
    lines = logged(config.workdir)
    assert [line["skipped"] for line in lines] == [0, 1, 1, 2, 2]
    # What was left out does not count: the rate stands still, as the optimizer's does.
    schedule = make_schedule(config.optimizer, 5)
    rates = [float(schedule(n)) for n in (0, 1, 1, 2, 2)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    assert ["loss" in line for line in lines] == [True, False, True, False, True]
    assert all(np.isfinite(value) for line in lines for value in line.values() if value != "train")
    told = capsys.readouterr().err
    assert "step 2: the loss is not finite; left out, 1 of at most 2" in told
    assert "step 4: the loss is not finite; left out, 2 of at most 2" in told
    state = saved(config)
    assert state.step == 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    # The count goes on with the run.
    spoil(6)
    with pytest.raises(Stopped) as stopped:
        train(skipping(tiny, 7, 2))
    why = "step 6: the loss is not finite, and 2 before it were left out; last good checkpoint: "
    assert str(stopped.value).startswith(why)


def test_a_signal_before_the_first_step_leaves_nothing_in_the_way(tiny, monkeypatch):
    """The command's own handler raises an exception there."""

    def interrupt(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.tasks, "train_batches", interrupt)
    config = tiny("lm", **{"train.num_steps": 1})
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    assert train(config)["steps"] == 1


def test_a_signal_in_the_validation_that_was_left_over_is_heard(finished, tmp_path, monkeypatch):
    """A run that was stopped in its last step validates first, when it goes on."""
    whole, wanted = finished("lm")
    config = set_field(whole, "workdir", str(tmp_path / "run"))

    def killing(make, when):
        def made(*arguments):
            step, calls = make(*arguments), []

            def run(*given):
                calls.append(None)
                if len(calls) == when:
                    signal.raise_signal(signal.SIGTERM)
                return step(*given)

            return run

        return made

    for name, when in (("train_step_of", config.train.num_steps), ("make_eval_step", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(loop, name, killing(getattr(loop, name), when))
            with pytest.raises(Stopped) as stopped:
                train(config)
        assert stopped.value.code == 128 + signal.SIGTERM
        assert not (Path(config.workdir) / "result.json").exists()
    result = train(config)
    assert (result["validation_loss"], result["best_step"]) == (
        wanted["validation_loss"],
        wanted["best_step"],
    )


@pytest.mark.parametrize("before", [signal.SIG_IGN, lambda *_: None])
def test_a_hang_up_that_is_ignored_stays_so_and_afterwards_signals_do_what_they_did(before):
    """As under nohup."""
    old = signal.signal(signal.SIGHUP, before)
    try:
        with signals.Signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
            assert caught.agreed() == (0 if before == signal.SIG_IGN else signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.usefixtures("hang_ups")
@pytest.mark.parametrize(
    ("numbers", "received", "ended"),
    [
        ("TERM HUP HUP", "TERM", None),
        ("HUP INT", "HUP", None),
        ("HUP TERM INT", "HUP", 130),
        ("INT TERM", "INT", 143),
    ],
)
def test_only_a_second_order_to_end_ends_at_once(monkeypatch, numbers, received, ended):
    """A terminal that closes sends SIGHUP twice."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    with signals.Signals() as caught:
        for name in numbers.split():
            signal.raise_signal(signal.Signals[f"SIG{name}"])
        assert caught.agreed() == signal.Signals[f"SIG{received}"]
    assert exits == ([ended] if ended else [])
