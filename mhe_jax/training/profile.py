"""A profiler trace of chosen steps, for TensorBoard's profile page or xprof."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mhe_jax.training.tracking import second_to

DIRECTORY = "profile"


class Profile:
    """Traces the steps from `steps[0]` to `steps[1]`, as far as they run; none without `steps`."""

    def __init__(self, workdir: Path, steps: Sequence[int]):
        self._directory = workdir / DIRECTORY
        self._first, self._last = steps or (1, 0)
        self._tracing = False

    def before(self, step: int) -> None:
        """Called when `step` is about to begin."""
        if not self._tracing and self._first <= step <= self._last:
            jax.profiler.start_trace(self._directory)
            self._tracing = True

    def after(self, step: int, state: Any) -> None:
        """Called when `step` has begun, and will give `state`."""
        if self._tracing and step == self._last:
            jax.block_until_ready(state)
            self._stop()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: Any) -> None:
        with second_to(error):
            self._stop()

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
