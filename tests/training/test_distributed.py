"""How processes are told of each other, and how they meet."""

import socket
import threading
import time

import pytest
from free_ports import free_port

from mhe_jax.config import InputError
from mhe_jax.training.distributed import Processes, meet, take_flags

EXPLICIT = ["--coordinator", "host:1234", "--num_processes", "4", "--process_id", "3"]


def test_flags_are_taken_out_of_the_command_line():
    rest = ["config.py", "--data.train", "a", "b", "--workdir", "runs/a"]
    assert take_flags(rest) == (None, rest)
    assert take_flags([*rest, "--distributed", "auto"]) == (Processes(), rest)
    assert take_flags([*EXPLICIT, *rest]) == (Processes("host:1234", 4, 3), rest)
    timeout = [*EXPLICIT[:4], "--process-timeout=9", *EXPLICIT[4:]]
    assert take_flags([*rest, *timeout]) == (Processes("host:1234", 4, 3, 9), rest)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distributed", "slurm"], "--distributed is 'slurm': takes auto"),
        (["--distributed"], "--distributed has no value"),
        (["--distributed", "auto", "--process_id", "1"], "--process_id: not with --distributed"),
        (EXPLICIT[2:], "--coordinator is missing"),
        (EXPLICIT[:4], "--process_id is missing"),
        (["--process_timeout", "9"], "--coordinator is missing"),
        ([*EXPLICIT[:5], "4"], "--process_id is 4: takes 0 to 3"),
        ([*EXPLICIT[:5], "x"], "--process_id is 'x': takes a whole number, 0 or more"),
        ([*EXPLICIT, "--process_timeout", "0"], "--process_timeout is '0': .* 1 or more"),
        (["--coordinator", "host", *EXPLICIT[2:]], "--coordinator is 'host': takes HOST:PORT"),
        (["--coordinator", "host:99999", *EXPLICIT[2:]], "takes HOST:PORT"),
    ],
)
def test_wrong_flags_are_one_line(flags, message):
    with pytest.raises(InputError, match=message) as error:
        take_flags(["config.py", *flags])
    assert "\n" not in str(error.value)


def meeting(arrivals, timeout=20.0):
    """What becomes of processes (index, their count) that come to one port."""
    port, outcomes = free_port(), {}

    def come(i, index, count):
        try:
            outcomes[i] = meet(f"localhost:{port}", count, index, timeout)
        except InputError as error:
            outcomes[i] = str(error)

    threads = [
        threading.Thread(target=come, args=(i, *arrival)) for i, arrival in enumerate(arrivals)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[i] for i in range(len(arrivals))]


def test_all_come():
    assert meeting([(2, 3), (0, 3), (1, 3)]) == [None] * 3


def test_those_that_do_not_come_are_named_to_all_that_do():
    told = meeting([(0, 4), (2, 4)], timeout=5.0)
    assert told == ["processes 1, 3 of 4 did not come within 5 s"] * 2


def test_nobody_at_the_coordinator():
    (told,) = meeting([(1, 2)], timeout=0.5)
    assert told.startswith("process 0 did not answer at localhost:")


def test_two_with_one_number():
    told = meeting([(0, 3), (1, 3), (1, 3)])
    assert told == ["two processes have --process_id 1"] * 3


def test_two_counts():
    told = meeting([(0, 3), (1, 4)])
    assert told == ["process 1 has --num_processes 4, 0 has 3"] * 2


def test_a_stranger_at_the_port_is_ignored():
    port = free_port()
    first = threading.Thread(target=meet, args=(f"localhost:{port}", 2, 0, 20.0))
    first.start()
    while True:
        try:
            with socket.create_connection(("localhost", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                break
        except OSError:
            time.sleep(0.05)
    meet(f"localhost:{port}", 2, 1, 20.0)
    first.join()


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of the coordinator: Address already"):
            meet(f"localhost:{port}", 2, 0, 1.0)
