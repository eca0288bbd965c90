"""One process at a time trains in a working directory: WORKDIR/lock.json says which.

    with locked(workdir) as lock:  # InputError: another process trains here
        lock.check()               # before a write: ends the process that has lost its lock

Only three things are done with the file, all of which an object store can do as well: it is created
whole if there is none, rewritten as a whole, and deleted.

The holder renews the lock every RENEWAL seconds. A process that finds one checks

1. for a holder of the same host, boot and process namespace: whether it still runs, and began when
   the lock says. A `kill -9` blocks nobody, nor does another program with its number; a holder that
   is merely stopped keeps its lock.
2. for any other, also after a reboot: whether the file changes within LEASE seconds. No clocks are
   compared, as they may differ or jump; a live holder shows itself within RENEWAL, and only a dead
   one costs the whole wait.

A dead lock is replaced, not deleted and created again. Whoever replaces it first takes a lock named
after it, so that exactly one process does. A holder that resumes after a pause longer than its
lease finds another's lock, or none, and ends at once. One gap is left: a pause of that length
between this check and the write that follows. No file can close it; they are microseconds apart.
"""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mhe_jax.config import InputError
from mhe_jax.config.places import Bucket
from mhe_jax.training.cluster import group

FILE = "lock.json"
RENEWAL, LEASE = 20.0, 120.0  # seconds
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Owner:
    """The contents of the file."""

    host: str
    process: int
    since: str
    # Boot and namespace in which `process` means something, and when it began there; None where
    # the system does not say.
    place: str | None
    began: int | None
    # Unique to this lock.
    token: str
    renewals: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


# On a file system without links, a process that ends while it makes the file leaves an empty one.
# It counts as the lock of another host that does not renew it.
UNKNOWN = Owner("an unknown host", 0, "an unknown time", None, None, "unknown")


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator["Lock"]:
    """For the block, no other process trains in `workdir`.

    Raises:
      InputError: one does, or the lock cannot be written.
    """
    lock = Lock(workdir / FILE)
    try:
        yield lock
    finally:
        lock.release()


def check_shared(workdir: Path, lock: "Lock | None") -> None:
    """Raises InputError if this process does not find the lock of process 0 in `workdir`.

    Processes without a directory in common would wait for each other at the first checkpoint.
    """
    token = group.of_first("lock", lock.token if lock else "")
    late = _now() + LEASE / 2  # a file of another host may take this long to appear
    while (found := _read(workdir / FILE)) is None or found.token != token:
        if _now() > late:
            raise InputError(
                f"workdir={workdir}: is not the directory of process 0: takes one that all "
                "processes share"
            )
        time.sleep(LEASE / 1200)


class Lock:
    """A lock that is held from here until `release`."""

    def __init__(self, path: Path):
        self._path, self._owner = path, _acquire(path)
        self._seen = _now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        return self._owner.token

    def check(self) -> None:
        """Before a write: after a long pause, checks that the lock is still our own."""
        if _now() - self._seen > LEASE / 2:
            self._look()

    def release(self) -> None:
        """Deletes the file where it is our own."""
        self._over.set()
        self._thread.join()
        _release(self._path, self._owner)

    def _renew(self) -> None:
        while not self._over.wait(RENEWAL):
            # A disk that is full or away now may be back the next time.
            with contextlib.suppress(InputError, OSError):
                self._look()
                self._owner = dataclasses.replace(self._owner, renewals=self._owner.renewals + 1)
                _write(self._path, self._owner)
                self._seen = _now()

    def _look(self) -> None:
        found = _read(self._path)
        if found is None or found.token != self._owner.token:
            _lost(self._path, found)


def _acquire(path: Path) -> Owner:
    mine = _myself()
    while not _create(path, mine):
        found = _settled(path)
        if found is None:  # released in between
            if path.is_symlink():
                raise _not_ours(path)
            time.sleep(LEASE / 1200)
            continue
        alive = _runs(found)
        if alive is None:
            alive = _changes(path, found)
        if not alive:
            # Only the holder of this claim replaces the dead lock, unless it finds it replaced.
            claim = path.with_name(f".{FILE}.{found.token}")
            claimed = _acquire(claim)
            try:
                if _read(path) == found:
                    _write(path, mine)
                    return mine
            finally:
                _release(claim, claimed)
        elif found := _read(path):
            raise InputError(f"{path.parent}: {found} has been training here since {found.since}")
    return mine


def _release(path: Path, owner: Owner) -> None:
    with contextlib.suppress(InputError, OSError):
        found = _read(path)
        if found is not None and found.token == owner.token:
            path.unlink()


def _myself() -> Owner:
    return Owner(
        host=socket.gethostname(),
        process=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        place=_place(),
        began=_began(os.getpid()),
        token=secrets.token_hex(8),
    )


def _runs(owner: Owner) -> bool | None:
    """Whether the process is alive; None where that cannot be seen from here."""
    if owner.place is None or (socket.gethostname(), _place()) != (owner.host, owner.place):
        return None
    began = _began(owner.process)
    if began is None:
        try:
            os.kill(owner.process, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):  # somebody else's, hidden from us
            return None
    return began == owner.began


def _place() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _began(process: int) -> int | None:
    """When a process began, in ticks since the boot; None if it has ended or cannot be seen."""
    try:
        # The name, in parentheses, may hold anything.
        words = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if words[0] in (b"Z", b"X") else int(words[19])


def _changes(path: Path, owner: Owner) -> bool:
    """Whether the file is renewed, replaced or deleted while we look at it for a lease."""
    print(
        f"note: {path.parent}: waiting up to {LEASE:.0f} s for a sign of life from {owner}, "
        f"which began to train here at {owner.since}",
        file=sys.stderr,
        flush=True,
    )
    end = _now() + LEASE
    while _now() < end:
        time.sleep(LEASE / 120)
        if _read(path) != owner:
            return True
    return False


def _create(path: Path, owner: Owner) -> bool:
    """Creates the file, whole or not at all; returns whether there was none."""
    if isinstance(path, Bucket):
        with _telling(path):
            # A network may repeat what was done already.
            return path.create(_bytes(owner)) or _read(path) == owner
    draft = _draft(path, owner)
    try:
        os.link(draft, path)
    except FileExistsError:
        # A network may repeat what was done already.
        with _telling(path):
            return draft.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise _not_written(path, error) from error
        return _create_without_links(path, owner)
    finally:
        _drop(draft)
    return True


def _create_without_links(path: Path, owner: Owner) -> bool:
    """As `_create`, but for a moment the file is there and empty; see `_settled`."""
    try:
        with _telling(path):
            file = path.open("xb")
    except FileExistsError:
        return False
    try:
        with _telling(path), file:
            file.write(_bytes(owner))
    except BaseException:
        _drop(path)
        raise
    return True


def _write(path: Path, owner: Owner) -> None:
    if isinstance(path, Bucket):
        with _telling(path):
            path.write_bytes(_bytes(owner))
        return
    draft = _draft(path, owner)
    try:
        with _telling(path):
            draft.replace(path)
    finally:
        _drop(draft)


def _draft(path: Path, owner: Owner) -> Path:
    draft = path.with_name(f".{path.name}.{owner.token}.draft")
    try:
        with _telling(path), draft.open("wb") as file:
            file.write(_bytes(owner))
            file.flush()
            os.fsync(file.fileno())
    except InputError:
        _drop(draft)
        raise
    return draft


def _drop(path: Path) -> None:
    """Deletes a file; if the disk is away, the write reports that."""
    with contextlib.suppress(OSError):
        path.unlink()


def _bytes(owner: Owner) -> bytes:
    return (json.dumps(dataclasses.asdict(owner), indent=2) + "\n").encode()


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot write {path}: {error.strerror}")


def _settled(path: Path) -> Owner | None:
    """As `_read`, but waits for a file that is being written."""
    with contextlib.suppress(InputError):
        found = _read(path)
        if found != UNKNOWN:
            return found
    time.sleep(LEASE / 120)
    return _read(path)


def _read(path: Path) -> Owner | None:
    """None where there is no file, UNKNOWN where it is empty."""
    try:
        text = path.read_bytes()
        if not text:
            return UNKNOWN
        owner = Owner(**json.loads(text))
        texts, numbers = (owner.host, owner.since, owner.token), (owner.process, owner.renewals)
        typed = {*map(type, texts)} == {str} and {*map(type, numbers)} == {int}
        if typed and owner.token.isalnum():  # a part of a file's name
            return owner
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError):
        pass
    raise _not_ours(path)


def _not_ours(path: Path) -> InputError:
    return InputError(f"{path}: is not the lock of a run: delete it if no process trains here")


def _now() -> float:
    """Seconds, including those in which the machine slept, where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _lost(path: Path, found: Owner | None) -> NoReturn:
    """Ends the process at once: from here on it would write into the run of another."""
    by = "it is gone" if found is None else f"{found} has held it since {found.since}"
    reason = f"this process has lost the lock of its run: {by}; nothing more is written"
    with contextlib.suppress(OSError):  # nobody may read it
        print(f"error: {path.parent}: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
