"""A place for the runs of an experiment: commands that are not repeated, and a record of them."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from benchmarks import command_line
from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.cli.sweep import plan
from mhe_jax.config import InputError
from mhe_jax.config.files import write_whole

ROOT = Path(__file__).parents[1]
# A command line is parsed in one thread at a time, and standard error is caught meanwhile.
PARSING = threading.Lock()
# At most so many learning rates are tried for a case.
MOST_RATES = 6


class Failed(Exception):
    """A command ended with another exit status than 0, for a reason of one line."""

    def __init__(self, run: Path, status: int, reason: str, log: Path):
        super().__init__(f"{run}: exit status {status}: {reason} (see {log})")
        self.status, self.reason = status, reason


class Workplace:
    """Calls train.py and eval.py for runs below one directory, unless they are done.

    In a `with` statement, a signal goes to all commands that run, none begins after it, and the
    statement ends by KeyboardInterrupt.
    """

    def __init__(self, directory: Path, data: Path, jobs: int):
        self.directory, self.data = directory, data
        # One command at a time for each run.
        self.locks: dict[Path, threading.Lock] = defaultdict(threading.Lock)
        # Processor time of the commands of each run.
        self.seconds: defaultdict[Path, float] = defaultdict(float)
        self.interrupted = 0  # the signal
        self.running: set[int] = set()
        self.environment = dict(os.environ)
        if jobs > 1:
            self.environment["NPROC"] = "1"  # threads of XLA on a CPU

    def __enter__(self) -> Self:
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under `nohup`
            caught.append(signal.SIGHUP)
        self.handlers = {number: signal.signal(number, self.catch) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.interrupted:
            raise KeyboardInterrupt from None

    def catch(self, number: int, _: object) -> None:
        # A hang-up means the same to a run as SIGTERM.
        self.interrupted = signal.SIGTERM if number == signal.SIGHUP else number
        for process in tuple(self.running):
            send(process, self.interrupted)

    @contextlib.contextmanager
    def begun(self, process: int) -> Iterator[None]:
        """A command runs, which gets the signals; one that came before it, too."""
        self.running.add(process)
        try:
            if self.interrupted:
                send(process, self.interrupted)
            yield
        finally:
            self.running.remove(process)

    def train(self, name: str, config: str, data: str, *flags: str) -> Path:
        """The finished run `name` of configs/`config` with the data in `data`."""
        run = self.directory / name
        arguments = self.arguments(config, data, "--workdir", str(run), *flags)
        with PARSING:
            asked = plan.PlannedRun(name, parse_train_arguments(arguments), arguments, {})
        with self.locks[run]:
            if asked.result() is None:
                self.call(run, str(ROOT / "train.py"), *arguments)
        return run

    def arguments(self, config: str, data: str, *flags: str) -> list[str]:
        directory = str(self.data / data)
        return [str(ROOT / "configs" / config), "--data.directory", directory, *flags]

    def evaluate(self, run: Path, what: str, *flags: str, name: str = "") -> None:
        """Leaves the scores of a run in eval_WHAT.json, where WHAT begins with the split.

        With `name` they move from there to a file of that name.
        """
        scores = run / f"eval_{what}.json"
        with self.locks[run]:
            if not (kept := run / (name or scores.name)).exists():
                split = what.partition("_")[0]
                self.call(run, str(ROOT / "eval.py"), str(run), "--split", split, *flags)
                scores.rename(kept)

    def call(self, run: Path, *command: str) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        name = command[2] if command[0] == "-m" else Path(command[0]).name
        note(f"{run}: {name}")
        log = run.with_name(f"{run.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as output:
            status, seconds = timed(
                [sys.executable, *command],
                begun=self.begun,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                process_group=0,  # Ctrl-C reaches it through us, once
            )
        self.seconds[run] += seconds
        if not status:
            return
        reason = log.read_text().rstrip().rpartition("\n")[2].removeprefix("error: ")
        # The run has saved, or was sent Ctrl-C by itself, or Python had not begun it yet.
        if status in (130, -signal.SIGINT) or reason == KeyboardInterrupt.__name__:
            self.interrupted = signal.SIGINT
        if self.interrupted:
            raise KeyboardInterrupt
        raise Failed(run, status, reason, log)


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(process, number)


def timed(
    command: list[str],
    begun: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    **options: Any,
) -> tuple[int, float]:
    """Exit status of a command, and its processor time in seconds, of all of its threads.

    Args:
      begun: what holds while it runs, of the number of its process.
    """
    process = subprocess.Popen(command, **options)
    with begun(process.pid):
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


class Record:
    """A file of lines, one for each run: with it alone, and without the runs, all goes on.

    In a `with` statement, it is read and then this process's alone.

    Args:
      about: what all lines have in common, and must have in a file that is there.

    Raises:
      InputError: the file is of something else, or another process adds to it.
    """

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.about = path, about
        self.lines: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(self.path.with_name(f".{self.path.name}.lock").open("w"))
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{self.path}: another process is measuring, and adds to it"
                raise InputError(message) from None
            self.lines = self.read()
            self.held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        found = json.loads(self.path.read_text())
        if not self.about.items() <= found.items():
            raise InputError(
                f"{self.path} was not measured with {self.about}: move it away to measure anew"
            )
        return found["lines"]

    def add(self, *lines: dict[str, Any]) -> None:
        with self.lock:
            self.lines = [*self.lines, *lines]
            about = json.dumps(self.about).removesuffix("}")
            each = ",\n".join(json.dumps(line) for line in self.lines)
            write_whole(self.path, f'{about}, "lines": [\n{each}\n]}}\n')


def add_flags(parser: command_line.PlainParser, each: str) -> None:
    """The flags of a `Workplace`; `each` is what goes side by side."""
    parser.add_argument("--workdir", type=Path, default=Path("runs"), help="where the runs go")
    parser.add_argument("--data.directory", dest="directory", type=Path, default=Path("data"))
    parser.add_argument("--jobs", type=command_line.positive, default=2, help=f"{each} at a time")


def note(line: str) -> None:
    with PARSING:
        print(line, file=sys.stderr, flush=True)


def loss(run: Path) -> float:
    return json.loads((run / plan.RESULT).read_text())["best_validation_loss"]


def search_rates(rates: Iterable[str], loss: Callable[[str], float]) -> dict[str, float]:
    """The loss of each learning rate that was tried.

    If the best of them is the lowest or highest, its half or double is tried too, until it is
    neither or there are `MOST_RATES`: where each step only does harm, lower is better without end.
    """
    losses: dict[str, float] = {}
    new = tuple(rates)
    while True:
        losses |= {rate: loss(rate) for rate in new}
        best = min(losses, key=losses.__getitem__)
        if not (factor := beyond(losses, best)):
            return losses
        new = (f"{float(best) * factor:g}",)


def beyond(rates: Iterable[str], best: str) -> float | None:
    """By what `best` is to be multiplied to have it between others, else None."""
    rates = sorted(rates, key=float)
    return {rates[0]: 0.5, rates[-1]: 2.0}.get(best) if len(rates) < MOST_RATES else None
