"""Metrics of the steps, read without making the device wait, and their speed."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from mhe_jax.tasks.sums import ratios
from mhe_jax.training.tracking import Tracker

# FLOP/s of a device in bfloat16 without sparsity, as its maker states.
PEAK = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_of(mesh: Mesh) -> float | None:
    """FLOP/s of all devices together, if known."""
    device = mesh.devices.flat[0].device_kind
    return PEAK[device] * mesh.size if device in PEAK else None


class NotFinite(ArithmeticError):
    """A number of a step that must be finite is not."""

    def __init__(self, step: int, what: str, skipped: int = 0):
        before = f", and {skipped} before it were left out" if skipped else ""
        super().__init__(f"step {step}: the {what} is not finite{before}")


class Meter:
    """Reads the metrics of step n - 1 while step n runs, and adds them up between log lines.

    A line comes after every `log_every` steps, and after the `last` one of the run.

    `totals` outlives the process with the checkpoints: `tokens` that were trained on (not padding;
    source and target in translation), `seconds` in all, `stepping_seconds` without compilation,
    validation and checkpoints, `skipped` updates, when the run was `started` (seconds since 1970),
    and `window`, the sums since the last log line. `skip` updates may be left out because something
    in them is not finite; `flops` are of a step with a batch of these shapes; `peak` is the FLOP/s
    of all devices together, if known.
    """

    def __init__(
        self,
        tracker: Tracker,
        log_every: int,
        last: int,
        totals: dict[str, Any],
        *,
        skip: int = 0,
        flops: Callable[[dict[str, tuple[int, ...]]], float] = lambda shapes: 0.0,
        peak: float | None = None,
    ):
        self.tracker, self.totals, self.skip = tracker, totals, skip
        self._log_every, self._last, self._flops, self._peak = log_every, last, flops, peak
        new = dict.fromkeys(("tokens", "seconds", "stepping_seconds"), 0.0)
        totals.update({**new, "skipped": 0, "started": time.time(), "window": {}, **totals})
        self._pending: tuple[int, Any, float] | None = None
        self._seen: dict[Any, float] = {}  # FLOPs of the shapes that are compiled
        self._begin_window()
        self._step_seconds, self._only_stepping = 0.0, False
        self._mark = time.monotonic()

    def run(self, train_step, state, batch, step: int):
        """Begins `step` and returns the state after it; reads the metrics of the step before it."""
        shapes = {name: array.shape for name, array in batch.items()}
        key = tuple(sorted(shapes.items()))
        if compiles := key not in self._seen:
            self._seen[key] = self._flops(shapes)
            self._lap(stepping=True)
            self.tracker.doing("compiling")
        state, metrics = train_step(state, batch)
        if compiles:
            self.idle()
        self.flush()
        self._pending = step, metrics, self._seen[key]
        return state

    def idle(self) -> None:
        """Counts the time since the last reading as spent on something other than steps."""
        self._lap(stepping=False)

    def _lap(self, *, stepping: bool) -> None:
        now = time.monotonic()
        elapsed, self._mark = now - self._mark, now
        self.totals["seconds"] += elapsed
        if stepping:
            self.totals["stepping_seconds"] += elapsed
            self._window_seconds += elapsed
            self._step_seconds += elapsed
        else:
            self._only_stepping = False

    def _begin_window(self) -> None:
        self._window_seconds = self._window_tokens = self._window_flops = 0.0
        self._times: list[float] = []

    def flush(self) -> None:
        """Waits for the last step that has begun, and reads its metrics."""
        if self._pending is None:
            return
        (step, found, flops), self._pending = self._pending, None
        metrics = {k: v.item() for k, v in jax.device_get(found).items()}
        self._lap(stepping=True)
        # A time counts from one reading to the next, if nothing but steps came in between.
        if self._only_stepping:
            self._times.append(self._step_seconds)
        self._step_seconds, self._only_stepping = 0.0, True
        self.tracker.advance(step)
        gradient_norm, learning_rate = metrics.pop("gradient_norm"), metrics.pop("learning_rate")
        window = self.totals["window"]
        if metrics.pop("finite"):
            for name, value in metrics.items():
                window[name] = window.get(name, 0.0) + value
            self.totals["tokens"] += metrics["tokens"]
            self._window_tokens += metrics["tokens"]
        else:
            self._skip(step, metrics["loss"], gradient_norm)
        self._window_flops += flops
        if step % self._log_every == 0 or step == self._last:
            self._log(step, gradient_norm, learning_rate)

    def _skip(self, step: int, loss: float, gradient_norm: float) -> None:
        what = "update" if math.isfinite(gradient_norm) else "gradient"
        what = what if math.isfinite(loss) else "loss"
        if self.totals["skipped"] >= self.skip:
            raise NotFinite(step, what, self.totals["skipped"])
        self.totals["skipped"] += 1
        self.tracker.note(
            f"step {step}: the {what} is not finite; left out, {self.totals['skipped']} of at most "
            f"{self.skip}"
        )

    def _log(self, step: int, gradient_norm: float, learning_rate: float) -> None:
        window, seconds = self.totals["window"], max(self._window_seconds, 1e-9)
        metrics = ratios(window) if window else {}
        if math.isfinite(gradient_norm):
            metrics["gradient_norm"] = gradient_norm
        metrics["learning_rate"] = learning_rate
        metrics["tokens_per_second"] = self._window_tokens / seconds
        if self._times:
            metrics["step_seconds_p50"] = statistics.median(self._times)
        if self._peak:
            metrics["mfu"] = self._window_flops / seconds / self._peak
        elapsed = max(time.time() - self.totals["started"], 1e-9)
        metrics["goodput"] = min(self.totals["stepping_seconds"] / elapsed, 1.0)
        if self.skip:
            metrics["skipped"] = self.totals["skipped"]
        self.tracker.log(step, "train", metrics)
        window.clear()
        self._begin_window()
