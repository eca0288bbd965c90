"""Who may train in a working directory: one at a time, and never nobody for long."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from mhe_jax.config import InputError
from mhe_jax.training import lock, loop
from mhe_jax.training.lock import FILE, locked

ROOT = Path(__file__).parents[2]
# Says "held", and waits for the end of standard input.
HOLDER = """
import sys
from pathlib import Path
from mhe_jax.training import lock
lock.RENEWAL, lock.LEASE = {}, {}
with lock.locked(Path({!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
RENEWAL, LEASE = 0.2, 2.0


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(lock, "RENEWAL", RENEWAL)
    monkeypatch.setattr(lock, "LEASE", LEASE)


@pytest.fixture
def hold():
    """`hold(workdir)`: a process that holds its lock."""
    started = []

    def start(workdir):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER.format(RENEWAL, LEASE, str(workdir))],
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


def names(workdir):
    return sorted(path.name for path in workdir.iterdir())


def from_elsewhere(workdir):
    """As if the process that holds the lock were of another host."""
    text = (workdir / FILE).read_text()
    with (workdir / FILE).open("r+") as file:  # the same file, as it is another host's
        file.write(text.replace(os.uname().nodename, "x" * len(os.uname().nodename)))


def test_the_second_is_refused_with_owner_and_how_to_remove_it(tmp_path, hold):
    holder = hold(tmp_path)
    with pytest.raises(InputError) as refused, locked(tmp_path):
        pass
    assert f"process {holder.pid} on {os.uname().nodename}" in str(refused.value)
    assert str(refused.value).endswith(f": rm {tmp_path / FILE}")
    assert names(tmp_path) == [FILE]
    holder.communicate("")
    with locked(tmp_path):
        assert names(tmp_path) == [FILE]
    assert names(tmp_path) == []


def test_a_killed_process_blocks_nobody(tmp_path, hold):
    holder = hold(tmp_path)
    holder.kill()
    holder.wait()
    begin = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - begin < LEASE / 2
    assert names(tmp_path) == []


def test_one_of_another_host_lives_while_it_renews(tmp_path, hold):
    hold(tmp_path)
    from_elsewhere(tmp_path)
    time.sleep(1.5 * RENEWAL)
    with pytest.raises(InputError, match="on x+ trains here"), locked(tmp_path):
        pass


def test_one_of_another_host_is_dead_when_its_lease_has_run_out(tmp_path, hold, capsys):
    hold(tmp_path).kill()
    from_elsewhere(tmp_path)
    begin = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - begin > 0.9 * LEASE
    assert "waiting up to" in capsys.readouterr().err
    assert names(tmp_path) == []


def test_one_that_was_stopped_for_long_ends_when_it_goes_on(tmp_path, hold):
    holder = hold(tmp_path)
    holder.send_signal(signal.SIGSTOP)
    with locked(tmp_path):
        holder.send_signal(signal.SIGCONT)
        # Its standard input stays open: at its end it would leave by itself.
        holder.wait(timeout=60)
        assert (tmp_path / FILE).exists()
    assert holder.returncode == 1
    err = holder.stderr.read()
    assert "this process has lost the lock of its run" in err
    assert err.count("\n") == 1


def test_a_second_run_is_refused_before_it_writes(tiny):
    config = tiny("lm")
    workdir = Path(config.workdir)
    workdir.mkdir()
    with locked(workdir):
        with pytest.raises(InputError, match=f"process {os.getpid()} on .* trains here"):
            loop.train(config, jax.devices()[:1])
        assert names(workdir) == [FILE]


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    says = f"^cannot write .*/{FILE}: No space left on device$"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(InputError, match=says), locked(tmp_path):
            pass
    assert names(tmp_path) == []
