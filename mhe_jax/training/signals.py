"""SIGTERM and Ctrl-C: the first asks the loop to save and stop, the second ends the process."""

import os
import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils

_CAUGHT = (signal.SIGTERM, signal.SIGINT)


class Stopped(SystemExit):
    """A run ended before its last step; `code` is the exit status, `reason` one line for people."""

    def __init__(self, code: int, reason: str):
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Signals:
    """Within the `with`, `received` becomes the number of the first signal; 0 is none.

    Signals are caught on the main thread only, as Python wants it; elsewhere none is ever received.
    """

    received = 0

    def __enter__(self) -> "Signals":
        self._old = {}
        if threading.current_thread() is threading.main_thread():
            self._old = {caught: signal.signal(caught, self._catch) for caught in _CAUGHT}
        return self

    def __exit__(self, *exception: object) -> None:
        for caught, handler in self._old.items():
            signal.signal(caught, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number

    def agreed(self) -> int:
        """`received` by any process: all of them get the same answer at the same call."""
        received = self.received
        if jax.process_count() > 1:
            received = int(multihost_utils.process_allgather(received).max())
        return received
