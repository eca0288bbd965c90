"""Times, speeds and shares of time, on a clock that the test holds."""

import jax
import numpy as np
import pytest

from mhe_jax.training import meter as meter_module
from mhe_jax.training.meter import Meter, NotFinite, Profile


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


class Lines:
    """A tracker that keeps."""

    def __init__(self):
        self.logged, self.notes, self.did = [], [], ""

    def advance(self, step):
        self.did = ""

    def doing(self, what):
        self.did = what

    def note(self, line):
        self.notes.append(line)

    def log(self, step, split, numbers):
        self.logged.append((step, numbers))


def batch_of(length):
    return {"tokens": np.zeros((2, length))}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


def stepper(clock, lines, seconds, tokens=10.0, **changed):
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
        } | {name: np.asarray(value, np.float32) for name, value in changed.items()}

    return step


LEFT_OUT = {
    "loss": {"loss": np.nan, "gradient_norm": np.nan, "finite": False},
    "gradient": {"gradient_norm": np.inf, "finite": False},
    "update": {"finite": False},
}


def run_steps(clock, totals, faults, **options):
    """The tracker after these steps, each good (None) or with something that is not finite."""
    lines = Lines()
    meter = Meter(lines, 1, totals, **options)
    for step, fault in enumerate(faults, 1):
        changed = LEFT_OUT[fault] if fault else {}
        meter.run(stepper(clock, lines, 1.0, tokens=7.0, **changed), None, batch_of(5), step)
    meter.flush()
    return lines


def test_it_says_when_it_compiles(clock):
    lines, said = Lines(), []

    def step(state, batch):
        said.append(lines.did)
        return stepper(clock, lines, 1.0)(state, batch)

    meter = Meter(lines, 1, {})
    for number, length in enumerate((5, 5, 7, 5, 7), 1):
        meter.run(step, None, batch_of(length), number)
    # The first step is read while the second runs.
    assert said == ["compiling", "compiling", "compiling", "", ""]


def test_steps_that_are_left_out_count_no_tokens_and_say_what_was_wrong(clock):
    totals = {}
    faults = [None, "loss", "gradient", None, "update"]
    lines = run_steps(clock, totals, faults, skip=3)
    assert [numbers["skipped"] for _, numbers in lines.logged] == [0, 1, 2, 2, 3]
    assert [numbers["tokens_per_second"] > 0 for _, numbers in lines.logged[1:]] == [
        fault is None for fault in faults[1:]
    ]
    assert (totals["tokens"], totals["skipped"]) == (14.0, 3)
    assert lines.notes == [
        "step 2: the loss is not finite; left out, 1 of at most 3",
        "step 3: the gradient is not finite; left out, 2 of at most 3",
        "step 5: the update is not finite; left out, 3 of at most 3",
    ]


@pytest.mark.parametrize("fault", LEFT_OUT)
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_one_more_than_may_be_left_out_ends_the_run(clock, fault, limit):
    """Wherever the good steps lie: the limit is for the whole run, not for those in a row."""
    totals = {}
    run_steps(clock, totals, [None, *[fault, None] * limit], skip=limit)
    assert totals["skipped"] == limit
    before = f", and {limit} before it were left out" if limit else ""
    with pytest.raises(NotFinite, match=f"^step 2: the {fault} is not finite{before}$"):
        run_steps(clock, totals, [None, fault], skip=limit)
    assert totals["skipped"] == limit


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


def given(**metrics):
    """A train step that gives these."""
    found = {
        "loss": 2.0,
        "nats": 1.0,
        "correct": 0.0,
        "count": 1.0,
        "tokens": 7.0,
        "gradient_norm": 3.0,
        "learning_rate": 0.1,
        "finite": True,
        **metrics,
    }
    return lambda state, batch: (state, {name: np.asarray(x) for name, x in found.items()})


def test_a_line_is_of_the_steps_since_the_last_one(clock):
    """Sums over counts; of what is left out nothing counts."""
    lines, totals = Lines(), {}
    meter = Meter(lines, 2, totals, skip=1)
    for step, metrics in enumerate(
        (
            {"loss": 3.0, "count": 5.0},
            {"loss": 4.0, "count": 2.0, "gradient_norm": 11.0, "learning_rate": 0.2},
            {"loss": 6.0, "count": 3.0, "correct": 1.0},
            {"loss": np.inf, "count": 13.0, "finite": False},
        ),
        1,
    ):
        meter.run(given(**metrics), None, batch_of(5), step)
    meter.flush()
    (_, first), (_, second) = lines.logged
    assert (first["loss"], first["accuracy"]) == (1.0, 0.0)
    assert (first["gradient_norm"], first["learning_rate"]) == (11.0, 0.2)
    assert (second["loss"], second["accuracy"]) == (2.0, pytest.approx(1 / 3))
    assert (first["skipped"], second["skipped"]) == (0, 1)
    assert totals["tokens"] == 3 * 7
    meter.run(given(gradient_norm=np.nan, finite=False), None, batch_of(5), 5)
    with pytest.raises(meter_module.NotFinite, match="step 5: the gradient .* 1 before it"):
        meter.flush()


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ((2, 3), [1, "run", 2, 3, "stop", 4]),
        ((3, 99), [1, 2, "run", 3, 4, "stop"]),
        ((), [1, 2, 3, 4]),
    ],
)
def test_chosen_steps_are_traced(tmp_path, monkeypatch, steps, calls):
    """Also where a run ends before the last of them."""
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda _: seen.append("run"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    with Profile(tmp_path, steps) as profile:
        for step in range(1, 5):
            profile.before(step)
            seen.append(step)
            profile.after(step, None)
    assert seen == calls
