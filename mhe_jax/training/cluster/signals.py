"""Signals to save and stop: SIGTERM, Ctrl-C, SIGHUP, a standard error that nobody reads.

A second SIGTERM or Ctrl-C ends the process. Nothing else does: a terminal that closes may send
SIGHUP twice. A SIGHUP that is ignored, as under `nohup`, stays ignored.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from mhe_jax.training.cluster import group

_CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Errors of a pipe without a reader and a terminal that is gone; a full disk may have room again.
_NOBODY_READS = (errno.EPIPE, errno.EIO)


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
    that the loop must ask. Signals are caught on the main thread only, as Python requires;
    elsewhere none is ever received. If nobody reads standard error any more, that counts as a
    SIGPIPE until a real signal comes. What cannot be written there is dropped.
    """

    received = 0
    _told_to_end = False
    stepping = False

    def __enter__(self) -> "Signals":
        self._old = {}
        if threading.current_thread() is threading.main_thread():
            self._old = {
                caught: signal.signal(caught, self._catch)
                for caught in _CAUGHT
                if caught != signal.SIGHUP or signal.getsignal(caught) != signal.SIG_IGN
            }
        self._stderr = sys.stderr
        if self._stderr is not None:
            sys.stderr = _Watched(self._stderr, self._left)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stderr = self._stderr
        for caught, handler in self._old.items():
            signal.signal(caught, signal.SIG_DFL if handler is None else handler)
        if self.received == signal.SIGPIPE and error is not None:
            return  # an error stays what it is where nobody reads standard error
        if self.received and not self.stepping:
            # A library on the way up may have replaced it by an error of its own.
            stopped = error if isinstance(error, Stopped) else self._too_early()
            with contextlib.suppress(OSError):
                print(stopped.reason, file=sys.stderr, flush=True)
            raise stopped from None

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            if self._told_to_end:
                os._exit(128 + number)
            self._told_to_end = True
        if self.received not in (0, signal.SIGPIPE):
            return
        self.received = number
        if not self.stepping:
            raise self._too_early()
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # not by `print`, which it may have interrupted
            os.write(2, f"{name}: saving after this step; a second signal ends at once\n".encode())

    def _left(self) -> None:
        self.received = self.received or signal.SIGPIPE

    def _too_early(self) -> Stopped:
        name = signal.Signals(self.received).name
        return Stopped(128 + self.received, f"{name}: stopped before any step; nothing is lost")

    def agreed(self) -> int:
        """`received` by any process: all of them get the same answer at the same call."""
        return group.agreed(self.received)


class _Watched:
    """A text stream that tells us when nobody reads it, and drops what cannot be written."""

    def __init__(self, stream: Any, left: Callable[[], None]):
        self._stream, self._left = stream, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._noticing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._noticing():
            self._stream.flush()

    @contextlib.contextmanager
    def _noticing(self):
        try:
            yield
        except OSError as error:
            if error.errno in _NOBODY_READS:
                self._left()
