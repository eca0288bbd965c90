"""Several processes that train one model: how they find each other, before jax starts.

    --distributed auto                                          # TPU pod, Slurm, GKE, Open MPI
    --coordinator HOST:PORT --num_processes N --process_id I    # anywhere else

All processes first meet at the coordinator's port, by plain sockets: `jax.distributed` alone would
abort without naming who did not come. What they do together later is in `group.py`.
"""

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mhe_jax.config import InputError

COMING, ANSWERING = 300, 100  # seconds, where --process_timeout does not say


@dataclass(frozen=True)
class Processes:
    """What the flags say; with None for `coordinator` the cluster is asked."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    timeout: int | None = None


def take_flags(arguments: Sequence[str]) -> tuple[Processes | None, list[str]]:
    """The processes that a command line asks for (None: only this one), and its other arguments.

    >>> take_flags(["config.py", "--distributed", "auto", "--workdir", "runs/a"])[1]
    ['config.py', '--workdir', 'runs/a']

    Raises:
      InputError: a flag has a wrong value, or others are missing beside it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names = ("distributed", "coordinator", "num_processes", "process_id", "process_timeout")
    for name in names:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
    try:
        flags, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise InputError(f"{(error.argument_name or '').split('/')[0]} has no value") from None
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    if not given:
        return None, rest
    timeout = _number(given, "process_timeout", 1)
    explicit = [name for name in names[1:4] if name in given]
    if "distributed" in given:
        if given["distributed"] != "auto":
            raise InputError(f"--distributed is {given['distributed']!r}: takes auto")
        if explicit:
            raise InputError(f"--{explicit[0]}: not with --distributed auto")
        return Processes(timeout=timeout), rest
    if missing := [name for name in names[1:4] if name not in given]:
        raise InputError(
            f"--{missing[0]} is missing: --coordinator HOST:PORT, --num_processes and --process_id "
            "go together; else --distributed auto"
        )
    host, _, port = given["coordinator"].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"--coordinator is {given['coordinator']!r}: takes HOST:PORT")
    count = _number(given, "num_processes", 1)
    index = _number(given, "process_id", 0)
    assert count is not None
    assert index is not None
    if index >= count:
        raise InputError(f"--process_id is {index}: takes 0 to {count - 1}, see --num_processes")
    return Processes(given["coordinator"], count, index, timeout), rest


def _number(given: dict[str, str], name: str, least: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if text.isdecimal() and int(text) >= least:
        return int(text)
    raise InputError(f"--{name} is {text!r}: takes a whole number, {least} or more")


@contextlib.contextmanager
def joined(processes: Processes | None) -> Iterator[bool]:
    """Inside, `jax` knows all processes, and `group` binds them; must come before jax is used.

    Gives whether this is the one that writes.

    An exception that leaves the block ends all of them, each with a line that says why.

    Raises:
      InputError: no cluster is found, a process does not come in time, a port is taken.
    """
    if processes is None:
        yield True
        return
    coordinator, count, index, devices = _detected(processes)
    if count == 1:
        yield True
        return
    begin = time.monotonic()
    patience = processes.timeout or COMING
    meet(coordinator, count, index, patience)

    import jax

    from mhe_jax.training import group

    # SIGTERM is caught by `signals.py`, whose handler this service would replace by its own.
    jax.config.update("jax_enable_preemption_service", False)
    answering = processes.timeout or ANSWERING
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(10, round(patience - (time.monotonic() - begin))),
        heartbeat_timeout_seconds=3 * answering,  # `group` is to be first, with a name
        shutdown_timeout_seconds=answering,
    )
    with group.bound(answering):
        yield jax.process_index() == 0


def _detected(processes: Processes) -> tuple[str, int, int, Sequence[int] | None]:
    """Coordinator, number of processes, own index and device numbers, by the flags or cluster."""
    p = processes
    if p.coordinator is not None and p.num_processes is not None and p.process_id is not None:
        return p.coordinator, p.num_processes, p.process_id, None
    from jax._src.clusters import ClusterEnv  # what `jax.distributed.initialize()` asks

    try:
        coordinator, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, p.timeout or COMING
        )
    except Exception as error:  # whatever a metadata server does
        raise InputError(f"--distributed auto: {type(error).__name__}: {error}") from error
    if coordinator is None or count is None or index is None:
        raise InputError(
            "--distributed auto: this is no TPU pod, Slurm, GKE or Open MPI job; give "
            "--coordinator, --num_processes and --process_id"
        )
    return coordinator, count, index, devices


def meet(coordinator: str, count: int, index: int, timeout: float) -> None:
    """Returns in all processes once all have come; process 0 waits at the coordinator's port.

    Raises:
      InputError: in all that came, naming those that did not; the port is taken; two processes
        have one number, or differ in how many there are.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    if index == 0:
        _receive(int(port), count, deadline, timeout)
        return
    greeting = f"mhe_jax {index} {count}\n".encode()
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as to_first:
                to_first.sendall(greeting)
                # Process 0 knows the same deadline, and is to be heard about those missing.
                to_first.settimeout(left + 10)
                answer = to_first.makefile(encoding="utf-8").readline().strip()
            if answer == "go":
                return
            if answer:
                raise InputError(answer)
        except socket.gaierror as error:
            raise InputError(f"--coordinator {coordinator}: {error.strerror}") from None
        except OSError:  # it is not there yet
            pass
        time.sleep(0.2)
    raise InputError(f"process 0 did not answer at {coordinator} within {timeout:.0f} s")


def _receive(port: int, count: int, deadline: float, timeout: float) -> None:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=count)
    except OSError as error:
        raise InputError(f"port {port} of the coordinator: {error.strerror}") from None
    present: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)

        def told(answer: str) -> None:
            for connection in present.values():
                with contextlib.suppress(OSError):
                    connection.sendall(f"{answer}\n".encode())

        while len(present) < count - 1:
            left = deadline - time.monotonic()
            missing = [p for p in range(1, count) if p not in present]
            reason = f"{names(missing)} of {count} did not come within {timeout:.0f} s"
            try:
                server.settimeout(max(left, 0.001))
                connection, _ = server.accept()
                stack.enter_context(connection)
                connection.settimeout(5)
                words = connection.makefile(encoding="utf-8").readline().split()
                if len(words) != 3 or words[0] != "mhe_jax":
                    continue  # nobody of ours
                index, their_count = int(words[1]), int(words[2])
                if index not in present and their_count == count:
                    present[index] = connection
                    continue
                reason = f"two processes have --process_id {index}"
                if their_count != count:
                    reason = f"process {index} has --num_processes {their_count}, 0 has {count}"
                connection.sendall(f"{reason}\n".encode())
            except (OSError, ValueError):
                if time.monotonic() < deadline:
                    continue
            told(reason)
            raise InputError(reason)
        told("go")


def names(processes: Sequence[int]) -> str:
    """For a message.

    >>> names([3]), names([1, 2])
    ('process 3', 'processes 1, 2')
    """
    word = "process" if len(processes) == 1 else "processes"
    return f"{word} {', '.join(map(str, processes))}"
