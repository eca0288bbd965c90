"""One process at a time trains in a working directory: WORKDIR/lock says which.

    with locked(workdir):  # InputError: another process trains here

On a disk it is a lease of `filelock`, renewed every RENEWAL seconds. Who finds the lock of a
process of its own host that has ended takes it over at once, so that a `kill -9` blocks nobody;
any other, when it has not been renewed for LEASE seconds, by no clock but its own. A process that
was stopped for longer, and whose lock another has, ends when it goes on.

In a bucket it is an object, created if there is none. Nobody renews it: one that a process of
another host has left must be removed by hand.
"""

import contextlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import filelock

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket
from mhe_jax.training import group

FILE = "lock"
RENEWAL, LEASE = 5.0, 120.0  # seconds
START = uuid.uuid4().hex  # of this process: in a container each start may have the same number


def locked(workdir: Path) -> contextlib.AbstractContextManager[None]:
    """For the block, no other process trains in `workdir`; InputError if one does."""
    path = workdir / FILE
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"workdir={workdir}: {error.strerror}") from None
    return _in_bucket(path) if isinstance(path, Bucket) else _on_disk(path)


def check_shared(workdir: Path) -> None:
    """Raises InputError if this process does not find the lock of process 0 in `workdir`.

    Processes without a directory in common would wait for each other at the first checkpoint.
    """
    path = workdir / FILE
    late = time.monotonic() + LEASE / 2  # a file of another host may take this long to appear
    lock = group.of_first("lock", path.read_text() if path.exists() else "")
    while not path.exists() or path.read_text() != lock:
        if time.monotonic() > late:
            raise InputError(
                f"workdir={workdir}: is not the directory of process 0: takes one that all "
                "processes share"
            )
        time.sleep(LEASE / 1200)


@contextlib.contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    lease = filelock.SoftFileLease(
        path, lease_duration=LEASE, heartbeat_interval=RENEWAL, on_compromise=_lost
    )
    try:
        try:
            lease.acquire(blocking=False)
        except filelock.Timeout:
            note = f"waiting up to {LEASE:.0f} s for a sign of life of who trains here"
            print(f"note: {path}: {note}", file=sys.stderr, flush=True)
            seen = _renewed(path)
            lease.acquire(
                timeout=1.5 * LEASE,
                poll_interval=LEASE / 240,
                cancel_check=lambda: _renewed(path) != seen,
            )
    except filelock.Timeout:
        owner = lease.owner
        who = f"process {owner.pid} on {owner.hostname}" if owner else "an unknown process"
        raise _taken(path, f"{who} trains here", "rm") from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield
    finally:
        lease.release()


def _renewed(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns


@contextlib.contextmanager
def _in_bucket(path: Bucket) -> Iterator[None]:
    mine = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "start": START,
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    try:
        path.write_bytes(json.dumps(mine).encode(), mode="create")
    except FileExistsError:
        other = json.loads(path.read_text())
        if other["host"] != mine["host"] or _runs(**other):
            who = "process {process} on {host} began to train here at {since}".format(**other)
            raise _taken(path, who, "gcloud storage rm") from None
        path.write_bytes(json.dumps(mine).encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _runs(process: int, start: str = "", **_: str) -> bool:
    if process == os.getpid():
        return start == START
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _taken(path: Path | Bucket, who: str, remove: str) -> InputError:
    return InputError(f"{path.parent}: {who}; if it has ended: {remove} {path}")


def _lost(compromise: filelock.LeaseCompromise) -> None:
    """Ends the process at once: from here on it would write into the run of another."""
    with contextlib.suppress(OSError):  # nobody may read it
        what = f"this process has lost the lock of its run ({compromise.reason})"
        print(f"error: {compromise.lock_file}: {what}", file=sys.stderr, flush=True)
    os._exit(1)
