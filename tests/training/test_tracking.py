"""What is written down, what is shown, and what is drawn."""

import errno
import io
import json
import sys

import pytest

from mhe_jax.config.files import METRICS
from mhe_jax.training import tracking
from mhe_jax.training.tracking import Tracker


def lines(workdir):
    return [json.loads(line) for line in (workdir / METRICS).read_text().splitlines()]


def numbers(loss):
    return {"loss": loss, "tokens_per_second": 12345.6}


def test_lines_are_written_and_shown(tmp_path, capsys):
    with Tracker(tmp_path, 10) as tracker:
        tracker.log(2, "train", numbers(1.23456789))
        tracker.log(2, "validation", {"loss": 2.0})
        tracker.note("a note")
    assert lines(tmp_path) == [
        {"step": 2, "split": "train", "loss": 1.234568, "tokens_per_second": 12345.6},
        {"step": 2, "split": "validation", "loss": 2.0},
    ]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "step 2/10 train: loss 1.235, tokens/s 12,346",
        "step 2/10 validation: loss 2",
        "a note",
    ]


def test_what_comes_again_is_dropped(tmp_path):
    with Tracker(tmp_path, 10) as tracker:
        for step in range(1, 7):
            tracker.log(step, "train", numbers(float(step)))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "spl')  # as kill -9 leaves it
    with Tracker(tmp_path, 10, start_step=4) as tracker:
        tracker.log(5, "train", numbers(50.0))
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.0),
        (5, 50.0),
    ]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


@pytest.mark.parametrize("step", ["null", '"3"', "2.5", "[]", "true", "1" * 5000])
def test_a_line_whose_step_is_no_number_is_left_out(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"step": {step}, "split": "train"}}\n{{"step": 2, "split": "train"}}\n'
    )
    tracking.truncate(tmp_path / "metrics.jsonl", 5)
    assert [line["step"] for line in lines(tmp_path)] == [2]


def test_other_processes_write_nothing(tmp_path, capsys):
    with Tracker(tmp_path, 10, writes=False) as tracker:
        tracker.log(1, "train", numbers(1.0))
        tracker.advance(1)
        tracker.note("a note")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def shown(tracker, capsys):
    """What a terminal has got since the last look, the bar as it is now included."""
    tracker._progress.refresh()
    return capsys.readouterr().err


def test_progress_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    from rich.console import Console

    terminal = lambda **options: Console(force_terminal=True, width=120, **options)  # noqa: E731
    monkeypatch.setattr(tracking, "Console", terminal)
    with Tracker(tmp_path, 10, start_step=3) as tracker:
        tracker.doing("compiling")
        assert "compiling" in shown(tracker, capsys)
        tracker.advance(4)
        assert "compiling" not in shown(tracker, capsys)
        tracker.log(4, "train", numbers(1.5))
        tracker.log(4, "validation", {"loss": 1.75})
        assert "step 4 validation: loss 1.75" in shown(tracker, capsys)
        tracker.log(5, "train", numbers(1.5))
        tracker.note("demo:train:0:10")  # two names of emoji, if one is not careful
        last = shown(tracker, capsys)
    assert "4/10" in last
    assert "loss 1.5, tokens/s 12,346" in last
    assert "demo:train:0:10" in last


class Broken(io.StringIO):
    def __init__(self, reason):
        super().__init__()
        self.reason = reason

    def write(self, text):
        raise OSError(self.reason, "")


@pytest.mark.parametrize("reason", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_training_outlives_the_reader_of_its_notes(tmp_path, monkeypatch, reason):
    """A pipe without a reader, a terminal that is gone, a full disk."""
    monkeypatch.setattr(sys, "stderr", Broken(reason))
    with Tracker(tmp_path, 10) as tracker:
        tracker.log(2, "train", {"loss": 2.0})
        tracker.note("another")
    assert [line["loss"] for line in lines(tmp_path)] == [2.0]
