"""Numbers of the steps, read without making the device wait, and how fast they come."""

import math
import time
from typing import Any

import jax

from mhe_jax.training import objective
from mhe_jax.training.tracking import Tracker


class NotFinite(ArithmeticError):
    """A number of a step that must be finite is not."""

    def __init__(self, step: int, what: str):
        super().__init__(f"step {step}: the {what} is not finite")


class Meter:
    """Reads the metrics of step n - 1 while step n runs, and adds them up between log lines.

    `totals` outlives the process with the checkpoints: `tokens` that were trained on (not padding;
    source and target in translation), `seconds` in all, `stepping_seconds` without compilation,
    validation and checkpoints, and `window`, the sums since the last log line.
    """

    def __init__(self, tracker: Tracker, log_every: int, totals: dict[str, Any]):
        self.tracker, self.log_every, self.totals = tracker, log_every, totals
        for name in ("tokens", "seconds", "stepping_seconds"):
            totals.setdefault(name, 0.0)
        totals.setdefault("window", {})
        self._pending: tuple[int, Any] | None = None
        self._shapes: set[Any] = set()
        self._window_seconds = self._window_tokens = 0.0
        self._mark = time.monotonic()

    def run(self, train_step, state, batch, step: int):
        """The state after `step`, which has only begun; then the numbers of the step before it."""
        shape = tuple(sorted((name, array.shape) for name, array in batch.items()))
        compiles = shape not in self._shapes
        self._shapes.add(shape)
        if compiles:
            self._lap(stepping=True)
        state, metrics = train_step(state, batch)
        if compiles:
            self._lap(stepping=False)
        before, self._pending = self._pending, (step, metrics)
        self._read(before)
        return state

    def flush(self) -> None:
        """Wait for the last step and read it."""
        pending, self._pending = self._pending, None
        self._read(pending)

    def idle(self) -> None:
        """The time since the last reading went into something else than steps."""
        self._lap(stepping=False)

    def _lap(self, *, stepping: bool) -> None:
        now = time.monotonic()
        elapsed, self._mark = now - self._mark, now
        self.totals["seconds"] += elapsed
        if stepping:
            self.totals["stepping_seconds"] += elapsed
            self._window_seconds += elapsed

    def _read(self, pending: tuple[int, Any] | None) -> None:
        if pending is None:
            return
        step, metrics = pending[0], {k: v.item() for k, v in jax.device_get(pending[1]).items()}
        self._lap(stepping=True)
        self.tracker.advance(step)
        gradient_norm, learning_rate = metrics.pop("gradient_norm"), metrics.pop("learning_rate")
        if not metrics.pop("finite"):
            loss_is_finite = math.isfinite(metrics["loss"])
            gradient_is_finite = math.isfinite(gradient_norm)
            what = "update" if gradient_is_finite else "gradient"
            raise NotFinite(step, what if loss_is_finite else "loss")
        window = self.totals["window"]
        for name, value in metrics.items():
            window[name] = window.get(name, 0.0) + value
        self.totals["tokens"] += metrics["tokens"]
        self._window_tokens += metrics["tokens"]
        if step % self.log_every == 0:
            numbers = objective.ratios(window) | {
                "gradient_norm": gradient_norm,
                "learning_rate": learning_rate,
                "tokens_per_second": self._window_tokens / max(self._window_seconds, 1e-9),
            }
            self.tracker.log(step, "train", numbers)
            window.clear()
            self._window_seconds = self._window_tokens = 0.0
