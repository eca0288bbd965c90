"""A command as a process: what it keeps, what it writes, and how it ends.

A user's mistake becomes one line on standard error. Nothing here imports jax.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mhe_jax.config import InputError
from mhe_jax.config.files import cache_directory

# Signals that end a command by an exception, so that drafts of files are removed.
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def called(command: str, *places: str) -> str:
    """How to call one of our commands, as this one was called."""
    program = Path(sys.argv[0]).name
    known = {"mhe-jax": f"mhe-jax {command}", f"{command}.py": f"python {program}"}
    return " ".join([known.get(program, f"python -m mhe_jax {command}"), *places])


def output(text: str) -> None:
    """Writes to standard output, in UTF-8 and at once."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def output_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows of the same names for people, without the columns that have no value."""
    from rich.console import Console
    from rich.table import Table

    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    table, console = (
        Table(box=None, padding=(0, 2, 0, 0), header_style="none"),
        Console(markup=False, highlight=False),
    )
    for name in names:
        text = any(isinstance(row[name], str) for row in rows)
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_shown(row[name]) for name in names))
    with console.capture() as captured:
        console.print(table)
    output("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def say_that_jax_starts() -> None:
    """On a terminal, which else shows nothing for seconds."""
    if "jax" not in sys.modules and sys.stderr.isatty():
        print("starting JAX ...", file=sys.stderr, flush=True)


def keep_programs() -> None:
    """Has jax, which has not started, keep what it compiles: the next start takes half the time."""
    if "jax" in sys.modules or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError, InputError):  # without a home directory
        place = cache_directory().absolute() / "programs"
        place.mkdir(exist_ok=True)
        if os.access(place, os.W_OK):
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(place)
            os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30))  # bytes
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


# Arrays of up to 1 GiB in one heap, of huge pages. Else glibc maps them anew in every step, and
# Linux clears their pages: a tenth of the time of a small model.
TUNABLES = "hugetlb=1", "mmap_threshold=1073741824", "trim_threshold=4294967296", "arena_max=1"


def ask_for_huge_pages() -> None:
    """Restarts the command in the same process with `TUNABLES`, for huge pages that glibc keeps.

    glibc reads GLIBC_TUNABLES only as a program begins. Inside another one nothing is started.
    """
    module = ["-m", "mhe_jax", *sys.argv[1:]]
    if not any(given == sys.orig_argv[-len(given) :] for given in (sys.argv, module)):
        return
    with contextlib.suppress(OSError, ValueError):
        given = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        # Before 2.35 it has no huge pages, and refuses thresholds as high.
        major, minor = (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0.0").split()[-1].split(".")[:2]
        new = (int(major), int(minor)) >= (2, 35)
        if new and "GLIBC_TUNABLES" not in os.environ and "[madvise]" in given:
            tunables = ":".join(f"glibc.malloc.{each}" for each in TUNABLES)
            environment = {**os.environ, "GLIBC_TUNABLES": tunables}
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def run_entry_point(main: Callable[[], Any]) -> NoReturn:
    """Calls `main` and exits: a mistake, or the system's error, is one line and 2, Ctrl-C is 130.

    With MHE_JAX_TRACEBACK=1 in the environment every exception shows its traceback.
    """
    # SIG_DFL: see __main__.py. An ignored signal stays ignored.
    for caught in _CAUGHT:
        if signal.getsignal(caught) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(caught, _interrupt)
    ask_for_huge_pages()
    keep_programs()
    status, line = 0, None
    try:
        main()
        output("")
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except KeyboardInterrupt:
        status = 130
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        if isinstance(error, InputError):
            status, line = 2, str(error)
        elif isinstance(error, OSError) and error.strerror:
            status, line = 2, f"{error.filename or 'input or output'}: {error.strerror}"
        elif isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            less = "(less is needed with a smaller data.batch_size, or model.remat True)"
            status, line = 1, f"{str(error).splitlines()[0]} {less}"
        elif isinstance(error, RuntimeError) and "Unable to initialize backend" in str(error):
            status, line = 2, f"JAX_PLATFORMS: {str(error).splitlines()[0]}"
        if line is None or os.environ.get("MHE_JAX_TRACEBACK") == "1":
            traceback.print_exception(error)
            status = 1
        else:
            print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    _end(status)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, or SystemExit for another signal.

    Ends the process if a module is being loaded: some of those that are not written in Python turn
    the exception into an error of their own, or crash.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _end(status: int) -> NoReturn:
    """Exits; after a signal, or where other processes may wait, before the interpreter shuts down.

    XLA keeps compiling on its own threads, and crashes when the interpreter frees what they work
    on. `jax.distributed` would wait at exit for processes that wait for this one.
    """
    for caught in _CAUGHT:  # exit handlers would show the exception and go on
        if signal.getsignal(caught) is _interrupt:
            signal.signal(caught, signal.SIG_DFL)
    jax = sys.modules.get("jax")
    several = jax is not None and jax.distributed.is_initialized()
    if not status or jax is None or not (several or status > 128):
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if several and jax.process_index() == 0:
        time.sleep(10)  # jax aborts the others, which may end by themselves, once process 0 is gone
    os._exit(status)
