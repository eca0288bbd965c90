"""How processes are told of each other, and call the roll."""

import socket
import threading
import time

import pytest
from free_ports import free_port

from mhe_jax.config import InputError
from mhe_jax.training.distributed import ProcessFlags, call_roll, take_flags

EXPLICIT = ["--coordinator", "host:1234", "--num_processes", "4", "--process_id", "3"]


def test_flags_are_taken_out_of_the_command_line():
    rest = ["config.py", "--data.train", "a", "b", "--workdir", "runs/a"]
    assert take_flags(rest) == (None, rest)
    assert take_flags([*rest, "--distributed", "auto"]) == (ProcessFlags(), rest)
    assert take_flags([*EXPLICIT, *rest]) == (ProcessFlags("host:1234", 4, 3), rest)
    timeout = [*EXPLICIT[:4], "--process-timeout=9", *EXPLICIT[4:]]
    assert take_flags([*rest, *timeout]) == (ProcessFlags("host:1234", 4, 3, 9), rest)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--distributed", "slurm"], "--distributed.*'slurm'.*auto"),
        (["--distributed", "auto", "--process_id", "1"], "--process_id"),
        (EXPLICIT[2:], "--coordinator"),
        (EXPLICIT[:4], "--process_id"),
        (["--process_timeout", "9"], "--coordinator"),
        ([*EXPLICIT[:5], "4"], "--process_id is 4.*3"),
        ([*EXPLICIT[:5], "x"], "--process_id.*'x'"),
        ([*EXPLICIT, "--process_timeout", "0"], "--process_timeout is 0.*1 or more"),
        (["--coordinator", "host", *EXPLICIT[2:]], "--coordinator is 'host'.*HOST:PORT"),
    ],
)
def test_wrong_flags_are_one_line(flags, named):
    with pytest.raises(InputError, match=named) as error:
        take_flags(["config.py", *flags])
    assert "\n" not in str(error.value)


def met(*arrivals, timeout=20.0, strangers=()):
    """What becomes of processes (index, their count), one None or one line each."""
    port, outcomes = free_port(), [""] * len(arrivals)

    def come(i, index, count):
        try:
            outcomes[i] = call_roll(f"localhost:{port}", count, index, timeout)
        except InputError as error:
            outcomes[i] = str(error)

    def start(i):
        threads.append(threading.Thread(target=come, args=(i, *arrivals[i])))
        threads[-1].start()

    threads = []
    for i in range(len(arrivals)):
        start(i)
        for saying in strangers if arrivals[i][0] == 0 else ():
            said = False
            while not said:
                try:
                    with socket.create_connection(("localhost", port), timeout=20) as stranger:
                        stranger.sendall(saying)
                        said = True
                except OSError:
                    time.sleep(0.02)
    for thread in threads:
        thread.join()
    return outcomes


def test_all_come():
    strangers = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff 1")
    assert met((2, 3), (0, 3), (1, 3), strangers=strangers) == [None] * 3


@pytest.mark.parametrize(
    ("arrivals", "named"),
    [
        ([(0, 4), (2, 4)], "[1, 3] of 4"),
        ([(0, 3), (1, 3), (1, 3)], "[2] of 3"),
    ],
)
def test_who_is_missing_is_named_to_all_that_came(arrivals, named):
    told = met(*arrivals, timeout=1.5)
    assert set(told) == {told[0]}
    assert named in told[0]


def test_nobody_at_the_coordinator():
    (told,) = met((1, 2), timeout=0.5)
    assert told.startswith("process 0 did not answer at localhost:")


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of the coordinator: Address already"):
            call_roll(f"localhost:{port}", 2, 0, 1.0)
