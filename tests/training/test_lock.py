"""Who may train in a working directory: one at a time, and never nobody for long."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from mhe_jax.config import InputError
from mhe_jax.training import loop
from mhe_jax.training.run import lock
from mhe_jax.training.run.lock import FILE, locked

ROOT = Path(__file__).parents[2]
# Says "held", and waits for the end of standard input.
HOLDER = """
import sys
from pathlib import Path
from mhe_jax.training.run import lock
lock.RENEWAL, lock.LEASE = {}, {}
lock._place = lambda: {!r} or place()
with lock.locked(Path({!r})) as held:
    print("held", flush=True)
    while sys.stdin.readline():
        held.check()
        print("checked", flush=True)
"""
# Sixteen processes at once want what is there, in 12 directories; says how many got each.
CROWD = """
import os, sys, time
from pathlib import Path
from mhe_jax.config import InputError
from mhe_jax.training.run import lock
place, begin = Path(sys.argv[1]), time.time() + 0.3
children = []
for number in range(16):
    if child := os.fork():
        children.append(child)
        continue
    time.sleep(max(0, begin - time.time()))
    for directory in sorted(place.iterdir()):
        try:
            lock.Lock(directory / "lock.json")
            (directory / f"got.{number}").touch()
        except InputError as error:
            (directory / f"refused.{number}").write_text(str(error))
    os.close(1)
    sys.stdin.read()  # a dead one would lose it
    os._exit(0)
os.close(1)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.fixture
def soon(monkeypatch):
    """Leases of a third of a second."""
    monkeypatch.setattr(lock, "RENEWAL", 0.05)
    monkeypatch.setattr(lock, "LEASE", 0.3)


@pytest.fixture
def hold():
    """`hold(workdir)`: a process that holds its lock."""
    started = []

    def start(workdir, place="", renewal=20.0, lease=120.0):
        code = HOLDER.format(renewal, lease, place, str(workdir))
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from mhe_jax.training.run.lock import _place as place\n" + code,
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def left(workdir, **changes):
    """The lock of a process that has ended, with some things changed."""
    mine = dataclasses.replace(lock._myself(), process=2**22 + 7, **changes)
    (workdir / FILE).write_bytes(lock._bytes(mine))
    return mine


def names(workdir):
    return sorted(path.name for path in workdir.iterdir())


def test_the_second_is_refused_with_host_process_and_time(tmp_path, hold):
    holder = hold(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    said = json.loads(before)
    with pytest.raises(InputError) as refused, locked(tmp_path):
        pass
    assert str(refused.value) == (
        f"{tmp_path}: process {holder.pid} on {os.uname().nodename} has been training here since "
        f"{said['since']}"
    )
    assert said["since"].endswith(" UTC")
    assert (tmp_path / FILE).read_bytes() == before
    assert names(tmp_path) == [FILE]
    holder.communicate("")
    with locked(tmp_path):
        assert names(tmp_path) == [FILE]
    assert names(tmp_path) == []


def test_one_process_holds_it_once(tmp_path):
    with locked(tmp_path):
        with pytest.raises(InputError, match=f"process {os.getpid()} on "), locked(tmp_path):
            pass
        assert names(tmp_path) == [FILE]
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_a_killed_process_blocks_nobody(tmp_path, hold):
    holder = hold(tmp_path)
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet buried
    with locked(tmp_path):
        assert json.loads((tmp_path / FILE).read_bytes())["process"] == os.getpid()
    assert names(tmp_path) == []


def test_another_program_with_the_number_of_a_dead_one(tmp_path):
    began = lock._began(os.getppid())
    assert began
    parent = dataclasses.replace(lock._myself(), process=os.getppid(), began=began - 3)
    (tmp_path / FILE).write_bytes(lock._bytes(parent))
    with locked(tmp_path):
        pass
    (tmp_path / FILE).write_bytes(lock._bytes(dataclasses.replace(parent, began=began)))
    with pytest.raises(InputError, match=f"process {os.getppid()} on "), locked(tmp_path):
        pass


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"place": "before the reboot"}])
def test_one_that_cannot_be_seen_is_dead_when_its_lease_has_run_out(tmp_path, soon, capsys, change):
    found = left(tmp_path, **change)
    begin = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - begin > 0.29
    host = change.get("host", found.host)
    told = f"a sign of life from process {found.process} on {host}, which began to train here at"
    assert told in capsys.readouterr().err


def test_one_that_cannot_be_seen_lives_while_it_renews(tmp_path, soon, hold):
    holder = hold(tmp_path, place="another machine", renewal=0.05, lease=0.3)
    for _ in range(2):
        with pytest.raises(InputError, match=f"process {holder.pid} on "), locked(tmp_path):
            pass
    assert holder.poll() is None


def test_one_that_was_stopped_for_long_ends_when_it_goes_on(tmp_path, soon, hold):
    holder = hold(tmp_path, place="another machine", renewal=0.05, lease=0.3)
    holder.send_signal(signal.SIGSTOP)
    with locked(tmp_path):
        mine = (tmp_path / FILE).read_bytes()
        holder.send_signal(signal.SIGCONT)
        # Its standard input stays open: at its end it would leave by itself.
        holder.wait(timeout=60)
        err = holder.stderr.read()
        assert (tmp_path / FILE).read_bytes()[:100] == mine[:100]
    assert holder.returncode == 1
    assert err.startswith(f"error: {tmp_path}: this process has lost the lock of its run: process ")
    assert err.endswith("; nothing more is written\n")
    assert err.count("\n") == 1


def test_before_a_write_it_looks_for_itself(tmp_path, hold):
    """Where the write comes before the renewal."""
    holder = hold(tmp_path, renewal=100.0, lease=0.0)
    assert holder.stdin
    assert holder.stdout
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "checked\n"
    (tmp_path / FILE).unlink()
    out, err = holder.communicate("\n")
    assert (holder.returncode, out) == (1, "")
    assert "lost the lock of its run: it is gone; nothing more is written" in err


def test_a_holder_renews_and_never_shows_half_a_lock(tmp_path, soon):
    renewals = set()
    with locked(tmp_path):
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            renewals.add(json.loads((tmp_path / FILE).read_bytes())["renewals"])
    assert len(renewals) > 3


@pytest.mark.parametrize(
    "there", ["nothing", "a dead lock", "a dead one who took over a dead lock"]
)
def test_of_many_exactly_one_gets_it(tmp_path, there):
    for number in range(12):
        (directory := tmp_path / f"{number:02}").mkdir()
        if there != "nothing":
            dead = left(directory)
        if there.endswith("a dead lock") and there != "a dead lock":
            left(directory, token="abc")
            (directory / FILE).rename(directory / f".{FILE}.{dead.token}")
            (directory / FILE).write_bytes(lock._bytes(dead))
    with subprocess.Popen(
        [sys.executable, "-c", CROWD, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as crowd:
        assert crowd.stdout
        crowd.stdout.read()  # all are through
        for directory in tmp_path.iterdir():
            got = list(directory.glob("got.*"))
            assert len(got) == 1, directory
            assert len(list(directory.glob("refused.*"))) == 15
            kept = [path.name for path in directory.iterdir() if "lock" in path.name]
            assert kept == [FILE]
        crowd.communicate(b"")


def test_where_there_are_no_links(tmp_path, monkeypatch):
    def no_links(*arguments):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    left(tmp_path)
    with locked(tmp_path):
        with pytest.raises(InputError, match=f"process {os.getpid()} on "), locked(tmp_path):
            pass
        assert names(tmp_path) == [FILE]
    assert names(tmp_path) == []


def test_an_empty_lock_is_dead_when_a_lease_has_run_out(tmp_path, soon, capsys):
    """Of a process that was killed before it wrote it, where there are no links."""
    (tmp_path / FILE).touch()
    begin = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - begin > 0.29
        assert json.loads((tmp_path / FILE).read_bytes())["process"] == os.getpid()
    assert "a sign of life from process 0 on an unknown host" in capsys.readouterr().err
    assert names(tmp_path) == []


@pytest.mark.parametrize("half", ["", '{"host"'])
def test_a_lock_that_is_being_written_is_somebodys(tmp_path, monkeypatch, capsys, half):
    monkeypatch.setattr(lock, "LEASE", 20.0)
    (tmp_path / FILE).write_text(half)
    mine = lock._bytes(lock._myself())
    writer = threading.Timer(0.05, (tmp_path / FILE).write_bytes, [mine])
    writer.start()
    with pytest.raises(InputError, match=f"process {os.getpid()} on "), locked(tmp_path):
        pass
    writer.join()
    assert capsys.readouterr().err == ""  # it was no matter of a lease


def test_without_links_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    def no_links(*arguments):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    def full(path, mode="r", *arguments, **options):
        file = opened(path, mode, *arguments, **options)
        if mode == "xb":
            file.close()
            return opened(Path("/dev/full"), "wb")
        return file

    opened = Path.open
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(InputError, match="No space left on device$"), locked(tmp_path):
        pass
    assert names(tmp_path) == []


def test_without_proc_only_time_tells(tmp_path, soon, monkeypatch):
    monkeypatch.setattr(lock, "_place", lambda: None)
    monkeypatch.setattr(lock, "_began", lambda process: None)
    left(tmp_path)
    with (
        locked(tmp_path),
        pytest.raises(InputError, match="has been training here since"),
        locked(tmp_path),
    ):
        pass


@pytest.mark.parametrize("text", ["{}", "[1]", "\xff", '{"host": 3}', None, "a link"])
def test_what_is_no_lock_is_left_alone(tmp_path, soon, text):
    path = tmp_path / FILE
    if text is None:
        path.mkdir()
    elif text == "a link":
        path.symlink_to("nowhere")
    else:
        path.write_text(text, encoding="latin-1")
    says = r"lock\.json: (is not the lock of a run|Is a directory)"
    with pytest.raises(InputError, match=says) as told, locked(tmp_path):
        pass
    assert "\n" not in str(told.value)
    assert names(tmp_path) == [FILE]


def test_a_token_is_no_path(tmp_path, soon):
    left(tmp_path, token="../../other")
    with pytest.raises(InputError, match="is not the lock of a run"), locked(tmp_path):
        pass


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    says = r"cannot write .*/lock\.json: No space left on device$"
    with pytest.raises(InputError, match=says), locked(tmp_path):
        pass
    assert names(tmp_path) == []


def test_a_disk_that_fills_up_later_does_not_end_the_run(tmp_path, soon, monkeypatch):
    failed = threading.Event()

    def full(descriptor):
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    with locked(tmp_path) as held:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            assert failed.wait(10)
        renewals = json.loads((tmp_path / FILE).read_bytes())["renewals"]
        end = time.monotonic() + 10
        while json.loads((tmp_path / FILE).read_bytes())["renewals"] == renewals:
            assert time.monotonic() < end
        held.check()
    assert names(tmp_path) == []


def test_a_disk_that_is_away_for_a_while_does_not_end_the_renewing(tmp_path, soon, monkeypatch):
    failed = threading.Event()

    def away(*arguments, **options):
        failed.set()
        raise OSError(errno.ESTALE, "Stale file handle")

    def readable(path, mode="r", *arguments, **options):
        return (away if mode == "wb" else opened)(path, mode, *arguments, **options)

    opened = Path.open
    with locked(tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", readable)
            patch.setattr(Path, "unlink", away)
            assert failed.wait(10)
            time.sleep(0.1)
        renewals = json.loads((tmp_path / FILE).read_bytes())["renewals"]
        end = time.monotonic() + 3
        while json.loads((tmp_path / FILE).read_bytes())["renewals"] == renewals:
            assert time.monotonic() < end
    assert names(tmp_path) == []


def test_a_second_run_is_refused_before_it_writes(tiny):
    config = tiny("lm")
    workdir = Path(config.workdir)
    workdir.mkdir()
    with locked(workdir):
        held = (workdir / FILE).read_bytes()
        with pytest.raises(InputError, match="has been training here since"):
            loop.train(config, jax.devices()[:1])
        assert names(workdir) == [FILE]
        assert (workdir / FILE).read_bytes() == held


@pytest.mark.parametrize(("leases", "ends"), [(0.4, False), (0.6, True)])
def test_a_write_after_a_long_pause_looks_first(tmp_path, monkeypatch, leases, ends):
    """Half a lease without a renewal: another may have taken the lock."""
    lost = []
    monkeypatch.setattr(lock, "_lost", lambda path, found: lost.append(found))
    with locked(tmp_path) as held:
        later = lock._now() + leases * lock.LEASE
        monkeypatch.setattr(lock, "_now", lambda: later)
        file = tmp_path / FILE
        file.write_text(json.dumps({**json.loads(file.read_text()), "token": "another"}))
        held.check()
        monkeypatch.undo()
    assert bool(lost) == ends
