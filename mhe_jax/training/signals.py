"""SIGTERM and Ctrl-C: the first asks the loop to save and stop, the second ends the process."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

from mhe_jax.training import group

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

    Before `stepping` is set there is nothing to save: a signal ends the block by `Stopped`. After
    that it is for the loop to ask. Signals are caught on the main thread only, as Python wants it;
    elsewhere none is ever received.
    """

    received = 0
    stepping = False

    def __enter__(self) -> "Signals":
        self._old = {}
        if threading.current_thread() is threading.main_thread():
            self._old = {caught: signal.signal(caught, self._catch) for caught in _CAUGHT}
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for caught, handler in self._old.items():
            signal.signal(caught, signal.SIG_DFL if handler is None else handler)
        if self.received and not self.stepping:
            # Whatever library it went through on its way up may have made another error of it.
            stopped = error if isinstance(error, Stopped) else self._too_early()
            print(stopped.reason, file=sys.stderr, flush=True)
            raise stopped from None

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        if not self.stepping:
            raise self._too_early()

    def _too_early(self) -> Stopped:
        name = signal.Signals(self.received).name
        return Stopped(128 + self.received, f"{name}: stopped before any step; nothing is lost")

    def agreed(self) -> int:
        """`received` by any process: all of them get the same answer at the same call."""
        return group.agreed(self.received)
