"""Times, speeds and shares of time, on a clock that the test holds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mhe_jax.config.fields import set_field
from mhe_jax.config.loading import load_config
from mhe_jax.training import meter as meter_module
from mhe_jax.training.meter import PEAK, Meter, NotFinite, peak_of

NEVER = 10**6  # the last step of a run that goes on


class Lines:
    """A tracker that keeps."""

    def __init__(self):
        self.logged, self.notes = [], []

    def note(self, line):
        self.notes.append(line)

    def log(self, step, split, numbers):
        self.logged.append(numbers)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, time=lambda: clock.now)
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


@pytest.fixture
def step(clock):
    """`step(meter, number, seconds, length, **metrics)`: one step that takes so long."""

    def run(meter, number, seconds=1.0, length=5, **metrics):
        found = {"loss": 2.0, "nats": 2.0, "correct": 1.0, "count": 1.0, "tokens": 7.0}
        found |= {"gradient_norm": 3.0, "learning_rate": 0.1, "finite": True, **metrics}

        def train_step(state, batch):
            clock.now += seconds
            return state, {name: np.asarray(value) for name, value in found.items()}

        meter.run(train_step, None, {"tokens": np.zeros((2, length))}, number)

    return run


LEFT_OUT = {
    "loss": {"loss": np.nan, "gradient_norm": np.nan, "finite": False},
    "gradient": {"gradient_norm": np.inf, "finite": False},
    "update": {"finite": False},
}


@pytest.fixture
def run_steps(step):
    """`run_steps(totals, faults)`: the tracker after steps, each good (None) or not finite."""

    def run(totals, faults, **options):
        meter = Meter(lines := Lines(), 1, NEVER, totals, **options)
        for number, fault in enumerate(faults, 1):
            step(meter, number, **(LEFT_OUT[fault] if fault else {}))
        meter.flush()
        return lines

    return run


def test_steps_that_are_left_out_count_no_tokens_and_say_what_was_wrong(run_steps):
    totals, faults = {}, [None, "loss", "gradient", None, "update"]
    lines = run_steps(totals, faults, skip=3)
    assert [numbers["skipped"] for numbers in lines.logged] == [0, 1, 2, 2, 3]
    norms = ["gradient_norm" in numbers for numbers in lines.logged]
    assert norms == [fault in (None, "update") for fault in faults]  # JSON has no NaN
    trained = [numbers["tokens_per_second"] > 0 for numbers in lines.logged[1:]]
    assert trained == [fault is None for fault in faults[1:]]
    assert (totals["tokens"], totals["skipped"]) == (14.0, 3)
    said = [note.partition(" is not finite")[0] for note in lines.notes]
    assert said == ["step 2: the loss", "step 3: the gradient", "step 5: the update"]


def test_times_speed_mfu_and_goodput(clock, step):
    lines, totals = Lines(), {}
    meter = Meter(
        lines, 101, NEVER, totals, flops=lambda shapes: 3.0 * shapes["tokens"][1], peak=100.0
    )
    # 20 s of compiling, then 100 steps of 1 s, one of which takes 11 s; 10 s of validation.
    step(meter, 1, 20.0)
    for number in range(2, 102):
        step(meter, number, 11.0 if number == 50 else 1.0)
    clock.now += 10.0
    meter.idle()
    meter.flush()
    (numbers,) = lines.logged
    assert numbers["step_seconds_p50"] == 1.0
    assert numbers["tokens_per_second"] == pytest.approx(101 * 7 / 110)
    assert numbers["mfu"] == pytest.approx(101 * 15 / 110 / 100)
    assert numbers["goodput"] == pytest.approx(110 / 140)
    assert (totals["seconds"], totals["stepping_seconds"]) == (140, 110)
    assert "skipped" not in numbers


def test_the_peak_is_that_of_all_devices():
    for kind, peak in (("TPU v4", 8 * PEAK["TPU v4"]), ("an abacus", None)):
        devices = np.array([SimpleNamespace(device_kind=kind)] * 8)
        mesh: Any = SimpleNamespace(devices=devices.reshape(2, 2, 2), size=8)
        assert peak_of(mesh) == peak


def test_a_warmup_as_long_as_the_run_is_noted():
    device = SimpleNamespace(device_kind="cpu")
    mesh: Any = SimpleNamespace(devices=np.array([device]), shape={"data": 1}, size=1)
    for steps, noted in ((401, False), (400, True)):
        config = set_field(load_config("multi30k"), "train.num_steps", steps)
        *_, last = meter_module.first_lines(config, mesh, {})
        assert ("warmup_steps is 400" in last) is noted


def test_goodput_counts_the_time_that_nothing_ran(clock, step):
    lines, totals = Lines(), {}
    for numbers in ((1, 2, 3, 4), (5, 6)):
        meter = Meter(lines, 2, NEVER, totals)
        for number in numbers:
            step(meter, number)
        meter.flush()
        clock.now += 96.0
    assert lines.logged[-1]["goodput"] == pytest.approx(4 / 102)
    assert "mfu" not in lines.logged[-1]


def test_the_last_line_is_of_the_steps_that_are_left(step):
    meter = Meter(lines := Lines(), 2, 5, {})
    for number in range(1, 6):
        step(meter, number, loss=float(number))
    meter.flush()
    assert [numbers["loss"] for numbers in lines.logged] == [1.5, 3.5, 5.0]


@pytest.mark.parametrize("compiles", [True, False])
def test_no_time_of_a_step_spans_something_else(clock, step, compiles):
    """A program for another shape in step 3, or a validation before it."""
    meter = Meter(lines := Lines(), 2, NEVER, {})
    for number in range(1, 6):
        long = compiles and number == 3
        step(meter, number, 50.0 if long else 5.0, 7 if long else 5)
        if number == 2 and not compiles:
            meter.flush()
            clock.now += 50.0
            meter.idle()
    first, second = lines.logged
    assert ("step_seconds_p50" in first) != compiles
    assert second["step_seconds_p50"] == 5.0


def test_a_line_is_of_the_steps_since_the_last_one(step):
    """Sums over counts; of what is left out nothing counts."""
    lines, totals = Lines(), {}
    meter = Meter(lines, 2, NEVER, totals, skip=1)
    for number, metrics in enumerate(
        (
            {"loss": 3.0, "count": 5.0, "correct": 0.0},
            {"loss": 4.0, "count": 2.0, "correct": 0.0, "gradient_norm": 11.0, "learning_rate": 2},
            {"loss": 6.0, "count": 3.0, "correct": 1.0},
            {"loss": np.inf, "count": 13.0, "finite": False},
        ),
        1,
    ):
        step(meter, number, **metrics)
    meter.flush()
    first, second = lines.logged
    assert (first["loss"], first["accuracy"]) == (1.0, 0.0)
    assert (first["gradient_norm"], first["learning_rate"]) == (11.0, 2)
    assert (second["loss"], second["accuracy"]) == (2.0, pytest.approx(1 / 3))
    assert (first["skipped"], second["skipped"]) == (0, 1)
    assert totals["tokens"] == 3 * 7
    step(meter, 5, gradient_norm=np.nan, finite=False)
    with pytest.raises(NotFinite, match=r"step 5: the gradient .* 1 before it"):
        meter.flush()
