"""What is written down, what is shown, and what is drawn."""

import errno
import io
import json
import sys

import pytest

from mhe_jax.config.files import METRICS
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
        "step 2/10 train: loss 1.235, tokens_per_second 12,346",
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


def test_other_processes_write_nothing(tmp_path, capsys):
    with Tracker(tmp_path, 10, writes=False) as tracker:
        tracker.log(1, "train", numbers(1.0))
        tracker.note("a note")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


class Broken(io.StringIO):
    def __init__(self, reason):
        super().__init__()
        self.reason = reason

    def write(self, text):
        raise OSError(self.reason, "")


@pytest.mark.parametrize("reason", [errno.EPIPE, errno.ENOSPC])
def test_training_outlives_the_reader_of_its_notes(tmp_path, monkeypatch, reason):
    """A pipe without a reader, a full disk."""
    monkeypatch.setattr(sys, "stderr", Broken(reason))
    with Tracker(tmp_path, 10) as tracker:
        tracker.log(2, "train", {"loss": 2.0})
        tracker.note("another")
    assert [line["loss"] for line in lines(tmp_path)] == [2.0]
