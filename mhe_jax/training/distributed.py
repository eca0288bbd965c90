"""Several processes that train one model: how they find each other, before jax starts.

    --distributed auto                                          # TPU pod, Slurm, GKE, Open MPI
    --coordinator HOST:PORT --num_processes N --process_id I    # anywhere else

The rest is `jax.distributed`, which ends all processes where one is lost or hangs. What they do
together later is in `group.py`.
"""

import argparse
import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mhe_jax.config import InputError

COMING, ANSWERING = 300, 45  # seconds, where --process_timeout does not say
GREETING = 5  # seconds that a connection may take to say its number


@dataclass(frozen=True)
class ProcessFlags:
    """The flags; with None for `coordinator` the cluster is asked."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    timeout: int | None = None


def take_flags(arguments: Sequence[str]) -> tuple[ProcessFlags | None, list[str]]:
    """The processes that a command line asks for (None: only this one), and its other arguments.

    >>> take_flags(["config.py", "--distributed", "auto", "--workdir", "runs/a"])[1]
    ['config.py', '--workdir', 'runs/a']
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--distributed", choices=["auto"])
    parser.add_argument("--coordinator")
    for name in ("num_processes", "process_id", "process_timeout"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, type=int)
    try:
        flags, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise InputError(str(error).removeprefix("argument ")) from None
    explicit = (flags.coordinator, flags.num_processes, flags.process_id)
    timeout = flags.process_timeout
    if explicit == (None, None, None) and flags.distributed is None and timeout is None:
        return None, rest
    cluster, by_hand = flags.distributed is not None, None not in explicit
    if cluster == by_hand or (cluster and explicit != (None, None, None)):
        raise InputError(
            "several processes take --coordinator HOST:PORT, --num_processes and --process_id "
            "together, or --distributed auto alone"
        )
    if timeout is not None and timeout < 1:
        raise InputError(f"--process_timeout is {timeout}: takes 1 or more")
    if cluster:
        return ProcessFlags(timeout=timeout), rest
    coordinator, count, index = explicit
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:9]) < 1 << 16:
        raise InputError(f"--coordinator is {coordinator!r}: takes HOST:PORT")
    if not 0 <= index < count:
        raise InputError(f"--process_id is {index}: takes 0 to --num_processes - 1, {count - 1}")
    return ProcessFlags(coordinator, count, index, timeout), rest


@contextlib.contextmanager
def joined(processes: ProcessFlags | None) -> Iterator[bool]:
    """Inside, `jax` knows all processes; must come before jax is used.

    Yields whether this process is the one that writes. Each waits for the others at the end.
    """
    if processes is None or processes.num_processes == 1:
        yield True
        return
    p, patience = processes, processes.timeout or COMING
    if p.coordinator is not None and p.num_processes is not None and p.process_id is not None:
        call_roll(p.coordinator, p.num_processes, p.process_id, patience)

    import jax
    from jax.experimental import multihost_utils

    try:
        jax.distributed.initialize(
            p.coordinator,
            p.num_processes,
            p.process_id,
            cluster_detection_method="deactivate" if p.coordinator else None,
            initialization_timeout=patience,
            heartbeat_timeout_seconds=p.timeout or ANSWERING,
            shutdown_timeout_seconds=p.timeout or ANSWERING,
        )
    except ValueError as error:  # no cluster is detected
        raise InputError(f"--distributed auto: {error}; see docs/pods.md") from None
    yield jax.process_index() == 0
    multihost_utils.sync_global_devices("end")


def call_roll(coordinator: str, count: int, index: int, timeout: float) -> None:
    """Returns in all processes once all have come; process 0 waits at the coordinator's port.

    If not, InputError in all that came names those that did not. `jax.distributed` alone would
    abort without naming anybody.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    if index:
        return _answer_roll((host.strip("[]"), int(port)), index, deadline)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", int(port)), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise InputError(f"port {port} of the coordinator: {error.strerror}") from None
    missing, greeted = set(range(1, count)), []
    with server, contextlib.ExitStack() as connections:
        while missing and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError):  # nobody, or a stranger
                connection = connections.enter_context(server.accept()[0])
                connection.settimeout(GREETING)
                missing.discard(int(connection.recv(99).removeprefix(b"mhe_jax ")))
                greeted.append(connection)
        verdict = f"processes {sorted(missing)} of {count} did not come within {timeout:.0f} s"
        for connection in greeted:
            with contextlib.suppress(OSError):
                connection.sendall(f"mhe_jax {verdict if missing else 'all'}\n".encode())
    if missing:
        raise InputError(verdict)


def _answer_roll(address: tuple[str, int], index: int, deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        # Until it is there.
        with contextlib.suppress(OSError), socket.create_connection(address, left) as to_first:
            to_first.sendall(f"mhe_jax {index}".encode())
            # Process 0 has the same deadline; this leaves it time to name those missing.
            to_first.settimeout(left + 10)
            answer = to_first.makefile(errors="replace").readline().strip()
            if answer == "mhe_jax all":
                return
            if answer.startswith("mhe_jax "):
                raise InputError(answer.removeprefix("mhe_jax "))
        time.sleep(0.2)
    raise InputError(f"process 0 did not answer at {':'.join(map(str, address))}")
