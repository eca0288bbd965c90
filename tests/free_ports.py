"""Ports for processes that meet, which nobody else takes before they do."""

import itertools
import os
import socket

# Below those that Linux gives to whoever asks for any; each worker of pytest-xdist has its own.
FIRST, PORTS, WORKERS = 20_000, 1000, 12
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_numbers = itertools.count(os.getpid())  # two runs of the tests hardly ever begin at the same one


def free_port() -> int:
    """None comes twice soon."""
    for number in itertools.islice(_numbers, PORTS):
        port = FIRST + PORTS * _worker + number % PORTS
        with socket.socket() as trial:
            try:
                trial.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
