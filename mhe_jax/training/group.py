"""The processes of a run, besides computing: they agree, and stop after the same step."""

import contextlib
import json
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from mhe_jax.config import InputError
from mhe_jax.config.fields import shown

T = TypeVar("T")


@contextlib.contextmanager
def fine_in_all() -> Iterator[None]:
    """An InputError of the block in one process is one in all of them."""
    mine = None
    try:
        yield
    except InputError as error:
        mine = error
    if not np.all(multihost_utils.process_allgather(np.bool_(mine is None))):
        raise mine or InputError("another process cannot begin: see its error")


def check_alike(mine: Mapping[str, Any]) -> None:
    """Raises InputError in all processes if one has another value than process 0."""
    names = sorted(mine)
    sums = np.array([zlib.crc32(json.dumps(mine[name]).encode()) for name in names], np.uint32)
    differs = sums != multihost_utils.broadcast_one_to_all(sums)
    with fine_in_all():
        for name in np.array(names)[differs]:
            raise InputError(
                f"{name} is {shown(mine[name])} in process {jax.process_index()}, and not as in "
                "process 0: give all processes the same"
            )


def first_one_first(make: Callable[[], T]) -> T:
    """`make()`, in process 0 before all others; an InputError in one is one in all of them."""
    first = jax.process_index() == 0
    with fine_in_all():
        made: Any = make() if first else None
    with fine_in_all():
        return made if first else make()


class Stopped(SystemExit):
    """A run ended before its last step; `code` is the exit status, `reason` one line for people."""

    def __init__(self, code: int, reason: str):
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Signals:
    """In the block SIGTERM, Ctrl-C and SIGHUP ask the loop to save and stop.

    A second SIGTERM or Ctrl-C ends the process; a terminal that closes may send SIGHUP twice.
    With several processes SIGTERM is JAX's, which tells all; the others become SIGTERM.
    """

    def __init__(self):
        self.received, self._calls, self._told_to_end = 0, 0, False
        self._several = jax.process_count() > 1

    def __enter__(self) -> "Signals":
        caught = [signal.SIGINT, signal.SIGHUP] + [signal.SIGTERM] * (not self._several)
        on_main = threading.current_thread() is threading.main_thread()
        self._old = {
            number: signal.signal(number, self._catch)
            for number in caught
            if on_main and signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        ends = number != signal.SIGHUP
        if ends and self._told_to_end:
            os._exit(128 + number)
        self._told_to_end |= ends
        if self.received:
            return
        self.received = number
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # not by `print`, which it may have interrupted
            os.write(2, f"{name}: saving after this step; a second signal ends at once\n".encode())

    def agreed(self) -> int:
        """The signal to stop for, 0 for none: the same at the same call in all processes."""
        if not self._several:
            return self.received
        self._calls += 1
        reached = multihost_utils.reached_preemption_sync_point(self._calls)
        return signal.SIGTERM if reached else 0
