"""Rules for the files that a run names: it may come from somebody else.

A file that a run names is read only if it lies, once links are followed, in the run itself or below
a directory that the command line trusts. A file that the command line names by its whole path needs
no trust. Nor does one named by a config that this user has trained: the user's cache holds a digest
of each.
"""

import contextlib
import hashlib
import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

from mhe_jax.config import InputError
from mhe_jax.config.files import CONFIG, cache_directory, files_of, write_whole
from mhe_jax.config.places import Bucket, scheme_of, source_path

# Prefixes of TFDS data sets, which lie where the user keeps them, and of built-in data.
NOT_FILES = ("tfds:", "demo:")


def _trace(run: Path) -> Path:
    digest = hashlib.sha256((run / CONFIG).read_bytes()).hexdigest()
    return cache_directory() / "trained" / digest


def remember(run: Path) -> None:
    """Notes in the user's cache that the config of this run is the user's, if possible."""
    with contextlib.suppress(InputError):
        write_whole(_trace(run), "")


def is_own(run: Path) -> bool:
    """Whether the config of `run` is one that this user has trained, bit for bit."""
    try:
        return _trace(run).exists()
    except InputError:
        return False


def _real(path: str) -> str:
    return path if scheme_of(path) else os.path.realpath(path)


def check_files(
    run: Path,
    directory: str,
    names: Sequence[str],
    trusted: Sequence[str],
    *,
    by_user: bool,
    python: bool = False,
) -> None:
    """Raises InputError for files outside of what is trusted, and says how to allow them.

    Args:
      run: the directory of the run; its links and special files are looked at too.
      directory: where relative names start.
      names: sources that will be read.
      trusted: directories.
      by_user: the command line gave the names, and not the run.
      python: the user gives `trusted` in Python, and not by the command line.
    """
    # Objects have no links, so their names need no resolving.
    roots = [_real(str(place)) for place in (run, *map(os.path.expanduser, trusted))]

    refused: list[str] = []
    missing: dict[str, None] = {}  # directories, in order

    def check(path: str, what: str) -> None:
        real = _real(path)
        if any(f"{real}/".startswith(f"{root.rstrip('/')}/") for root in roots):
            return
        refused.append(f"{what} {real}")
        missing.setdefault(os.path.dirname(real))

    for place, directories, files in () if isinstance(run, Bucket) else os.walk(run):
        for path in (os.path.join(place, name) for name in (*directories, *files)):
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:  # the run is training
                continue
            if stat.S_ISLNK(mode):
                check(path, f"{path} leads to")
            elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise InputError(f"{path}: is neither a file nor a directory")
    for name in () if is_own(run) else names:
        whole = scheme_of(name) or os.path.isabs(os.path.expanduser(name))
        if not name.startswith(NOT_FILES) and not (by_user and whole):
            check(place := str(source_path(directory, name)), f"{run} names")
            if not refused:
                for file in files_of(directory, name):
                    check(str(source_path(directory, file)), f"{place} leads to")
    if refused:
        allowed = [*trusted, *missing]
        flags = f"trust={allowed}" if python else shlex.join(["--trust", *allowed])
        told = f"below {', '.join(trusted)}" if trusted else "trusted"
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise InputError(f"{refused[0]}{more}: not in the run, and not {told}; {flags} allows it")
