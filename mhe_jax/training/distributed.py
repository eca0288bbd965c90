"""Several processes that train one model: how they find each other, before jax starts.

    --distributed auto                                          # TPU pod, Slurm, GKE, Open MPI
    --coordinator HOST:PORT --num_processes N --process_id I    # anywhere else

The rest is `jax.distributed`, which ends all processes where one is lost, hangs or does not come.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mhe_jax.config import InputError

COMING, ANSWERING = 300, 45  # seconds, where --process_timeout does not say


class ProcessFlags(NamedTuple):
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
    if not any(value is not None for value in vars(flags).values()):
        return None, rest
    coordinator, count, index = flags.coordinator, flags.num_processes, flags.process_id
    timeout, given = flags.process_timeout, {x is not None for x in (coordinator, count, index)}
    if given != {not flags.distributed}:
        raise InputError(
            "several processes take --coordinator HOST:PORT, --num_processes and --process_id "
            "together, or --distributed auto alone"
        )
    if timeout is not None and timeout < 1:
        raise InputError(f"--process_timeout is {timeout}: takes 1 or more")
    if coordinator and not coordinator.rpartition(":")[2].isdecimal():
        raise InputError(f"--coordinator is {coordinator!r}: takes HOST:PORT")
    if coordinator and not 0 <= index < count:
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
    import jax
    from jax.experimental import multihost_utils

    coordinator, count, index, timeout = processes
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            cluster_detection_method="deactivate" if coordinator else None,
            initialization_timeout=timeout or COMING,
            heartbeat_timeout_seconds=timeout or ANSWERING,
            shutdown_timeout_seconds=timeout or ANSWERING,
        )
    except ValueError as error:  # no cluster is detected
        raise InputError(f"--distributed auto: {error}; see docs/pods.md") from None
    yield jax.process_index() == 0
    multihost_utils.sync_global_devices("end")
