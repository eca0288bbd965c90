"""Several processes that train one model: how they find each other, before jax starts.

    --distributed auto                                          # TPU pod, Slurm, GKE, Open MPI
    --coordinator HOST:PORT --num_processes N --process_id I    # anywhere else

All processes first meet at the coordinator's port, see `meeting.py`. What they do together later is
in `group.py`.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mhe_jax.config import InputError
from mhe_jax.training.cluster.meeting import meet

COMING, ANSWERING = 300, 100  # seconds, where --process_timeout does not say


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
        return ProcessFlags(timeout=timeout), rest
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
    return ProcessFlags(given["coordinator"], count, index, timeout), rest


def _number(given: dict[str, str], name: str, least: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if text.isdecimal() and len(text) < 7 and int(text) >= least:
        return int(text)
    raise InputError(f"--{name} is {text[:99]!r}: takes a whole number from {least} to 999,999")


@contextlib.contextmanager
def joined(processes: ProcessFlags | None) -> Iterator[bool]:
    """Inside, `jax` knows all processes, and `group` binds them; must come before jax is used.

    Yields whether this process is the one that writes.

    An exception that leaves the block ends all processes, each with a line that says why.

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
    named = meet(coordinator, count, index, patience)

    import jax

    from mhe_jax.training.cluster import group

    # SIGTERM is caught by `signals.py`, whose handler this service would replace by its own.
    jax.config.update("jax_enable_preemption_service", False)
    answering = processes.timeout or ANSWERING
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        local_device_ids=devices,
        coordinator_bind_address=coordinator if named else None,
        cluster_detection_method="deactivate",
        initialization_timeout=max(10, round(patience - (time.monotonic() - begin))),
        heartbeat_timeout_seconds=3 * answering,  # `group` should be first, with a name
        shutdown_timeout_seconds=answering,
    )
    # JAX has no public name for its key-value store.
    from jax._src import distributed

    with group.bound(distributed.global_state.client, answering):
        yield jax.process_index() == 0


def _detected(processes: ProcessFlags) -> tuple[str, int, int, Sequence[int] | None]:
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
            "--distributed auto: this is not a TPU pod or a Slurm, GKE or Open MPI job; give "
            "--coordinator, --num_processes and --process_id"
        )
    return coordinator, count, index, devices
