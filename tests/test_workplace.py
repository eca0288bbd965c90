"""Commands of an experiment: processor time, and signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed

from benchmarks import workplace

ROOT = Path(__file__).parents[1]


def test_processor_time_of_a_command():
    """Of its threads too; a command that waits takes none."""
    busy = """
import threading, time
def work():
    while time.thread_time() < 0.2: pass
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
time.sleep(2)
raise SystemExit(3)
"""
    status, seconds = workplace.timed([sys.executable, "-S", "-c", busy])
    assert status == 3
    assert 0.4 <= seconds < 2
    status, _ = workplace.timed([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert status == -9


WAITS = """
import os, pathlib, signal, sys, time
got, own = [], pathlib.Path(sys.argv[1])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
own.write_text("begun")
while not got:
    time.sleep(0.01)
time.sleep(0.3)  # one more would come meanwhile
own.write_text(f"{os.getpgrp() == os.getpid()} {got}")
sys.exit(128 + got[0])
"""


@pytest.mark.usefixtures("hang_ups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_this_process_alone_ends_its_commands_once(tmp_path, number):
    """They have groups of their own, which a terminal's Ctrl-C does not reach; no other begins."""
    (tmp_path / "waits.py").write_text(WAITS)
    files = [tmp_path / f"{name}.txt" for name in "abcd"]

    def strike():
        while not all(file.exists() and file.read_text() for file in files[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    def work():
        with workplace.Workplace(tmp_path, tmp_path, 2) as at, ThreadPoolExecutor(2) as pool:
            waits = str(tmp_path / "waits.py")
            list(pool.map(lambda file: at.call(file.with_suffix(""), waits, str(file)), files))

    before = signal.getsignal(number)
    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        work()
    passed = signal.SIGTERM if number == signal.SIGHUP else number
    assert [file.read_text() for file in files[:2]] == [f"True [{int(passed)}]"] * 2
    assert not any(file.exists() for file in files[2:])
    assert signal.getsignal(number) == before


def test_a_signal_while_a_command_begins(tmp_path, monkeypatch):
    """Before it counts as one that runs."""
    (tmp_path / "waits.py").write_text("import time; time.sleep(600)")
    given = subprocess.Popen

    def begin(*args, **kw):
        process = given(*args, **kw)
        signal.raise_signal(signal.SIGTERM)
        return process

    def work():
        with workplace.Workplace(tmp_path, tmp_path, 1) as at:
            at.call(tmp_path / "a", str(tmp_path / "waits.py"))

    monkeypatch.setattr(subprocess, "Popen", begin)
    with pytest.raises(KeyboardInterrupt):
        work()


def test_what_ignores_hang_ups_still_does(tmp_path):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with workplace.Workplace(tmp_path, tmp_path, 1) as at:
            signal.raise_signal(signal.SIGHUP)
            assert not at.interrupted
    finally:
        signal.signal(signal.SIGHUP, old)
