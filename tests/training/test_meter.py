"""Times, speeds and shares of time, on a clock that the test holds."""

import numpy as np
import pytest

from mhe_jax.training import meter as meter_module
from mhe_jax.training.meter import Meter


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


class Lines:
    """A tracker that keeps."""

    def __init__(self):
        self.logged = []

    def advance(self, step):
        pass

    def note(self, line):
        pass

    def log(self, step, split, numbers):
        self.logged.append((step, numbers))


def batch_of(length):
    return {"tokens": np.zeros((2, length))}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


def stepper(clock, lines, seconds, tokens=10.0):
    """A train step during which so much time passes."""

    def step(state, batch):
        clock.now += seconds
        return state, {
            "loss": np.float32(2.0),
            "nats": np.float32(2.0),
            "correct": np.float32(1.0),
            "count": np.float32(1.0),
            "tokens": np.float32(tokens),
            "gradient_norm": np.float32(1.0),
            "learning_rate": np.float32(0.1),
            "finite": np.bool_(True),
        }

    return step


def test_percentiles_speed_mfu_and_goodput(clock):
    lines, totals = Lines(), {}
    meter = Meter(lines, 101, totals, flops=lambda shapes: 3.0 * shapes["tokens"][1], peak=100.0)
    # 20 s of compiling, then 100 steps of 1 s, one of which takes 11 s; 10 s of validation.
    meter.run(stepper(clock, lines, 20.0), None, batch_of(5), 1)
    for step in range(2, 102):
        meter.run(stepper(clock, lines, 11.0 if step == 50 else 1.0), None, batch_of(5), step)
    clock.now += 10.0
    meter.idle()
    meter.flush()
    ((step, numbers),) = lines.logged
    assert step == 101
    assert numbers["step_seconds_p50"] == 1.0
    assert 1.0 <= numbers["step_seconds_p95"] < 2.0
    assert numbers["step_seconds_max"] == 11.0
    assert numbers["tokens_per_second"] == pytest.approx(101 * 10 / 110)
    assert numbers["mfu"] == pytest.approx(101 * 15 / 110 / 100)
    assert numbers["goodput"] == pytest.approx(110 / 140)
    assert "skipped" not in numbers


def test_goodput_counts_the_time_that_nothing_ran(clock):
    lines, totals = Lines(), {}
    meter = Meter(lines, 2, totals)
    for step in (1, 2, 3, 4):
        meter.run(stepper(clock, lines, 1.0), None, batch_of(5), step)
    meter.flush()
    clock.now += 96.0
    meter = Meter(lines, 2, totals)
    for step in (5, 6):
        meter.run(stepper(clock, lines, 1.0), None, batch_of(5), step)
    meter.flush()
    assert lines.logged[-1][1]["goodput"] == pytest.approx(4 / 102)
    assert "mfu" not in lines.logged[-1][1]


def test_no_time_of_a_step_spans_something_else(clock):
    lines, totals = Lines(), {}
    meter = Meter(lines, 6, totals)
    for step in range(1, 7):
        # Another shape is compiled at step 3.
        meter.run(stepper(clock, lines, 5.0), None, batch_of(7 if step == 3 else 5), step)
    meter.flush()
    ((_, numbers),) = lines.logged
    assert numbers["step_seconds_max"] == 5.0
