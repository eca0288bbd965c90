"""The processes of a run, besides computing: they wait, stop together, and notice who is lost.

All of it goes over the key-value store of `jax.distributed`, in a thread of its own, so that steps
cost no more. Every `period` seconds each process

- says that it is alive, and how many steps it has seen;
- hears whether a signal came to any of them, and then agrees with the others on the step to stop
  after: one past the furthest of them, which none can pass while they agree;
- hears whether another has failed, and ends with that one's reason.

Process 0 also looks for processes not heard from for `timeout` seconds, and says which ones keep
the others waiting for as long.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mhe_jax.config import InputError
from mhe_jax.training.cluster.meeting import names

ROOT = "mhe_jax"
GRACE = 4  # periods, in which a process can end by itself before it is ended
DAY = 86_400

_processes: "Processes | None" = None


def failed(error: BaseException) -> None:
    """Tells the others of an unforeseen error: a lost process may be its cause.

    Must come before anything that waits for the others.
    """
    if _processes is not None and not _foreseen(error):
        _processes.fail(error)


@contextlib.contextmanager
def bound(store: Any, timeout: float) -> Iterator[None]:
    """Binds the processes of `jax.distributed` for the block; `store` is its key-value store."""
    global _processes
    _processes = Processes(store, timeout)
    try:
        yield
    except BaseException as error:
        _processes.fail(error)
        raise
    else:
        _processes.leave()
    finally:
        _processes = None


def check() -> None:
    """Raises InputError if there are other processes that we are not bound to."""
    if jax.process_count() > 1 and _processes is None:
        raise InputError(
            f"this is process {jax.process_index()} of {jax.process_count()}: "
            "give --distributed auto"
        )


def agreed(received: int) -> int:
    """The signal number that any process has `received`, at the same call in all of them."""
    return received if _processes is None else _processes.agreed(received)


def all_of_them(mine: bool) -> bool:
    """Whether `mine` is true in every process."""
    return bool(np.all(multihost_utils.process_allgather(mine)))


def of_first(name: str, mine: str) -> str:
    """The `mine` of process 0, in each process; use each `name` once."""
    return mine if _processes is None else _processes.of_first(name, mine)


@contextlib.contextmanager
def first_one_first(name: str) -> Iterator[None]:
    """Process 0 runs the block, and once it is done all others do."""
    if _processes is not None and _processes.index:
        _processes.wait(name)
    yield
    if _processes is not None and not _processes.index:
        _processes.wait(name)


def together(name: str) -> None:
    """Returns in each process once all are here."""
    if _processes is not None:
        _processes.wait(name)


class Processes:
    """The processes, as one of them sees them."""

    def __init__(self, store: Any, timeout: float):
        self._client = store
        self.index, self.count, self.timeout = jax.process_index(), jax.process_count(), timeout
        self.period = min(max(1.0, self.count / 100), timeout / 4)
        self._lock = threading.Lock()
        self._calls = self._received = self._stop = 0
        self._stop_at: int | None = None
        self._heard: dict[int, tuple[str, float]] = {}
        self._moved = time.monotonic()
        self._told_of: str | None = None
        self._ending, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="group", daemon=True).start()

    # What the main thread calls.

    def agreed(self, received: int) -> int:
        with self._lock:
            self._received = self._received or received
            self._calls += 1
            past = self._stop_at is not None and self._calls >= self._stop_at
            return self._stop if past else 0

    def wait(self, name: str) -> None:
        """Waits until all processes wait for `name`."""
        self._client.wait_at_barrier(f"{ROOT}/{name}", timeout_in_ms=DAY * 1000)

    def of_first(self, name: str, mine: str) -> str:
        key = f"{ROOT}/first/{name}"
        if self.index == 0:
            self._client.key_value_set(key, mine)
            return mine
        return self._client.blocking_key_value_get(key, DAY * 1000)

    def leave(self) -> None:
        """The work is done: wait for the others, who may still write."""
        self._ending.set()
        self.wait("end")
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Tells the others why this process ends. Returns if all end, else ends it at once."""
        if self._ending.is_set():
            return
        code, reason = _outcome(error)
        known = _foreseen(error)
        if not known and (gone := self._silent()):
            reason, known = f"lost {names(gone)} of {self.count}: {reason}", True
        else:
            reason = f"process {self.index}: {reason}"
        self._ending.set()
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{ROOT}/verdict", f"{code} {reason}")
        try:
            within = round(2 * GRACE * self.period * 1000)
            self._client.wait_at_barrier(f"{ROOT}/end", timeout_in_ms=within)
            self._over.set()
        except Exception:  # some do not end: a normal exit would wait for them
            if not known or os.environ.get("MHE_JAX_TRACEBACK") == "1":
                with contextlib.suppress(OSError):
                    traceback.print_exception(error)
            _end(code, reason)

    def _silent(self) -> list[int]:
        """Who has said nothing for a few periods."""
        before = self._beats()
        time.sleep(GRACE * self.period)
        after = self._beats()
        return [p for p in range(self.count) if before.get(p) == after.get(p)]

    # The thread.

    def _watch(self) -> None:
        number = 0
        while not self._over.wait(self.period):
            number += 1
            try:
                self._client.key_value_set(
                    f"{ROOT}/beat/{self.index}", f"{number} {self._calls}", allow_overwrite=True
                )
                said = dict(self._client.key_value_dir_get(f"{ROOT}/stop"))
                if self._received and not said:
                    # Of two signals, the first counts for all.
                    with contextlib.suppress(Exception):
                        self._client.key_value_set(f"{ROOT}/stop/signal", str(self._received))
                elif said and self._stop_at is None:
                    self._agree(int(said[f"{ROOT}/stop/signal"]))
                self._obey(self._client.key_value_try_get(f"{ROOT}/verdict"))
            except Exception as error:
                if "NOT_FOUND" not in str(error):
                    continue  # a store that stays away is the end: jax says so and aborts
            if self.index == 0 and not self._ending.is_set():
                self._look_around()

    def _agree(self, signal: int) -> None:
        with self._lock:
            self._client.key_value_set(f"{ROOT}/at/{self.index}", str(self._calls))
            self._client.wait_at_barrier(f"{ROOT}/at", timeout_in_ms=round(self.timeout * 1000))
            calls = [int(value) for _, value in self._client.key_value_dir_get(f"{ROOT}/at")]
            self._stop_at, self._stop = max(calls) + 1, signal

    def _obey(self, verdict: str) -> None:
        if not self._ending.is_set() and not self._ending.wait(GRACE * self.period):
            code, reason = verdict.split(" ", 1)
            # The store goes with process 0, and jax aborts every process that is still there.
            _end(int(code), reason, 2 * GRACE * self.period if self.index == 0 else 0)

    def _beats(self) -> dict[int, str]:
        found = self._client.key_value_dir_get(f"{ROOT}/beat")
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def _look_around(self) -> None:
        beats, now = self._beats(), time.monotonic()
        calls = {p: int(beats[p].split()[1]) for p in beats}
        for p in range(self.count):
            if p not in self._heard or beats.get(p, "") != self._heard[p][0]:
                old = self._heard.get(p, ("", now))[0].split()
                if len(old) == 2 and p in calls and int(old[1]) != calls[p]:
                    self._moved = now
                self._heard[p] = beats.get(p, ""), now
        gone = [p for p, (_, when) in self._heard.items() if now - when > self.timeout]
        if gone:
            reason = f"{names(gone)} of {self.count}: nothing heard for {self.timeout:.0f} s"
            with contextlib.suppress(Exception):
                self._client.key_value_set(f"{ROOT}/verdict", f"1 {reason}")
            return
        slow = [p for p, n in calls.items() if n < max(calls.values())]
        if slow and now - self._moved > self.timeout:
            line = f"no step for {self.timeout:.0f} s or more: waiting for {names(slow)}"
            if line != self._told_of:
                print(f"note: {line}", file=sys.stderr, flush=True)
            self._told_of = line
        else:
            self._told_of = None


def _outcome(error: BaseException) -> tuple[int, str]:
    """Exit status and one line."""
    if isinstance(error, InputError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "Ctrl-C"
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1, str(error)
    return 1, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _foreseen(error: BaseException) -> bool:
    return isinstance(error, (InputError, SystemExit, KeyboardInterrupt))


def _end(code: int, reason: str, after: float = 0) -> None:
    """Ends the process: what is not finished by now waits for a process that is lost."""
    with contextlib.suppress(OSError):  # nobody may read it
        print(f"error: {reason}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    time.sleep(after)
    os._exit(code)
