"""A command as a process: its memory, what it writes, and how it ends.

A user's mistake becomes one line on standard error. Nothing here imports jax.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mhe_jax.config import InputError

# Commands that a clone has as scripts.
SCRIPTS = {
    "train": "train.py",
    "eval": "eval.py",
    "compare": "eval.py compare",
    "paper": "eval.py paper",
}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Signals that end a command by an exception, so that drafts of files are removed.
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LESS_MEMORY = (
    "Less is needed with fewer rows (data.batch_size, data.tokens_per_batch, "
    "evaluation.batch_size), a larger optimizer.accumulate_steps, or model.remat True"
)


def called(command: str) -> str:
    """How to call one of our commands, in the way this process was called.

    >>> called("export"), called("compare")
    ('python -m mhe_jax export', 'eval.py compare')
    """
    program = Path(sys.argv[0])
    if program.stem == "mhe-jax":
        return f"mhe-jax {command}"
    if command in SCRIPTS and program.parts[-2:] != ("mhe_jax", "__main__.py"):
        return SCRIPTS[command]
    return f"python -m mhe_jax {command}"


def output(text: str) -> None:
    """Writes to standard output, in UTF-8 and at once.

    Raises:
      InputError: there is no room for it.
    """
    if sys.stdout is None:  # closed by who started us
        return
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"standard output: {error.strerror}") from error


def ask_for_huge_pages() -> None:
    """Restarts the command in the same process, with GLIBC_TUNABLES for huge pages.

    Each step on a CPU works through hundreds of megabytes, for which 4 KB pages are small: in huge
    ones a step of configs/multi30k.py takes 0.41 s instead of 0.59. glibc reads its environment
    only before a program begins. Does nothing if that variable is set already, even to nothing, if
    Linux does not give huge pages on request, or inside another program, such as a debugger.
    """
    options, command = sys.orig_argv[1 : -len(sys.argv)], sys.orig_argv[-len(sys.argv) :]
    program = "mhe_jax" if options[-1:] == ["-m"] else sys.argv[0]  # as it was typed
    is_whole_program = command == [program, *sys.argv[1:]] and all(
        option.startswith("-") for option in options
    )
    if "GLIBC_TUNABLES" in os.environ or not is_whole_program:
        return
    with contextlib.suppress(OSError):
        if "[madvise]" in HUGE_PAGES.read_text():
            environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def run_entry_point(main: Callable[[], Any]) -> NoReturn:
    """Calls `main` and exits: a user's mistake is one line and 2, Ctrl-C is 130, SIGTERM 143.

    An error of the operating system, with the name of the file, and a name that is not UTF-8 count
    as a user's mistake. A device without enough memory is one line and 1. With MHE_JAX_TRACEBACK=1
    in the environment every exception shows its traceback.
    """
    if sys.stderr is None:  # closed by who started us: print would take standard output instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        # SIG_DFL: see train.py. An ignored signal stays ignored.
        for caught in _CAUGHT:
            if signal.getsignal(caught) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(caught, _interrupt)
                sys.unraisablehook = _interrupt_again
        ask_for_huge_pages()
        _check_names()
        main()
        output("")
        for caught in _CAUGHT:
            if signal.getsignal(caught) is _interrupt:
                # All is done. Exit handlers would show the exception and continue.
                signal.signal(caught, signal.SIG_DFL)
    except BrokenPipeError:  # the reader, such as `head`, has enough
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (InputError, KeyboardInterrupt, OSError, UnicodeEncodeError) as error:
        if os.environ.get("MHE_JAX_TRACEBACK") == "1":
            raise
        if isinstance(error, KeyboardInterrupt):
            _end_at_once(130)
        _tell(_line_of(error))
        sys.exit(2)
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code > 128:  # a signal
            _end_at_once(ended.code)
        raise
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or os.environ.get("MHE_JAX_TRACEBACK") == "1":
            raise
        reason = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(". ")
        _tell(f"{reason}. {LESS_MEMORY}")
        sys.exit(1)
    sys.exit(0)


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


def _interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
    """Sends a signal again that came in a callback, where Python drops exceptions.

    JAX has one for each collection of garbage.
    """
    error = lost.exc_value
    status = error.code if isinstance(error, SystemExit) else 0
    status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else status
    if isinstance(status, int) and status > 128:
        # After the callback, and after this hook, even on a busy machine.
        threading.Timer(0.1, os.kill, (os.getpid(), status - 128)).start()
    else:
        sys.__unraisablehook__(lost)


def _end_at_once(status: int) -> NoReturn:
    """Ends the process before the interpreter shuts down, unless other processes wait for it.

    XLA keeps compiling on its own threads, and crashes when the interpreter frees what they work
    on.
    """
    jax = sys.modules.get("jax")
    if jax is None or jax.distributed.is_initialized():
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
    os._exit(status)


def _check_names() -> None:
    """Raises UnicodeEncodeError for a name that most libraries cannot even pass on."""
    for name in (*sys.argv[1:], os.environ.get("MHE_JAX_CACHE", ""), _here()):
        name.encode()


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # deleted, or not accessible; whoever needs it says so
        return ""


def _line_of(error: BaseException) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:300]!a}: is not UTF-8"
    if isinstance(error, OSError) and error.strerror:
        place = error.filename or (None if _here() else "the current directory")
        return ": ".join(str(part) for part in (place, error.strerror) if part)
    return str(error)


def _tell(what: str) -> None:
    """Prints one line for people, if anyone reads it."""
    try:
        print(f"error: {' '.join(what.split())}", file=sys.stderr, flush=True)
    except OSError:
        # What is left in the buffer would fail again at exit, and set the exit status.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
