"""Runs of train.py and eval.py, several at a time, and a record of them.

A run that is done is not repeated, one that was interrupted goes on. Where one fails its case ends,
the other cases go on, and the exit status is 1.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments import command_line

ROOT = Path(__file__).parents[1]
RESULT = "result.json"
# The config and flags that made a run, once it is done.
DONE = "done.json"
# At most so many learning rates are tried for a case.
MOST_RATES = 6


class Failed(Exception):
    """A command ended with another exit status than 0, for a reason of one line."""

    def __init__(self, run: Path, status: int, reason: str):
        super().__init__(f"{run}: exit status {status}: {reason} (see {run}.log)")
        self.status, self.reason = status, reason


class OutOfTime(Exception):
    """The time that was given is over; the same command goes on."""


class Runs:
    """Calls train.py and eval.py for runs below one directory, unless they are done.

    Args:
      minutes: then commands get Ctrl-C, which makes them save, and no more begin.
    """

    def __init__(self, args: argparse.Namespace, minutes: float | None = None):
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.directory, self.data, self.jobs = args.workdir, args.directory, args.jobs
        # One command at a time for each run.
        self.locks: dict[Path, threading.Lock] = defaultdict(threading.Lock)
        # Threads of XLA on a CPU.
        self.environment = os.environ | ({"NPROC": "1"} if self.jobs > 1 else {})

    def train(self, name: str, config: str, data: str, *flags: str) -> Path:
        """The finished run `name` of configs/`config` with the data in `data`."""
        run = self.directory / name
        asked, done = [config, *flags], run / DONE
        with self.locks[run]:
            if read(done) != asked:
                train = str(ROOT / "train.py"), *self.arguments(config, data)
                self.call(run, *train, "--workdir", str(run), *flags)
                done.write_text(json.dumps(asked))
        return run

    def arguments(self, config: str, data: str) -> list[str]:
        return [str(ROOT / "configs" / config), "--data.directory", str(self.data / data)]

    def evaluate(self, run: Path, what: str, *flags: str, name: str = "") -> dict[str, Any]:
        """The scores of a run in eval_WHAT.json, where WHAT begins with the split.

        With `name` they move from there to a file of that name.
        """
        scores = run / f"eval_{what}.json"
        kept = run / (name or scores.name)
        with self.locks[run]:
            if not kept.exists():
                split = what.partition("_")[0]
                self.call(run, str(ROOT / "eval.py"), str(run), "--split", split, *flags)
                scores.rename(kept)
        return read(kept)

    def call(self, run: Path, *command: str) -> None:
        """A command of Python, which adds to RUN.log."""
        note(f"{run}: {command[2] if command[0] == '-m' else Path(command[0]).name}")
        log = run.with_name(f"{run.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as output:
            status = self.wait([sys.executable, *command], output)
        if status and time.monotonic() > self.end:
            raise OutOfTime
        if status:
            reason = log.read_text().rstrip().rpartition("\n")[2].removeprefix("error: ")
            raise Failed(run, status, reason)

    def wait(self, command: list[str], output) -> int:
        """The exit status of a command, once it has ended."""
        if (left := self.end - time.monotonic()) <= 0:
            raise OutOfTime
        how: dict[str, Any] = {"stdout": output, "stderr": output, "env": self.environment}
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, **how) as process:
            try:
                return process.wait(None if math.isinf(left) else left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                return process.wait()

    def each(self, call: Callable[[Any], object], cases: Iterable[Any]) -> bool:
        """Calls all cases, some at a time. A failure ends its case alone; whether none failed.

        After Ctrl-C, which all commands get and which makes them save, no case begins.
        """

        def succeeds(case: Any) -> bool:
            try:
                call(case)
            except Failed as error:
                note(f"error: {error}")
                return False
            return True

        pool = ThreadPoolExecutor(self.jobs)
        try:
            return all(list(pool.map(succeeds, cases)))
        finally:
            pool.shutdown(cancel_futures=True)


class Record:
    """A file of lines, one for each run: with it alone, and without the runs, all goes on.

    Args:
      about: what all lines have in common, and must have in a file that is there.
    """

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.about, self.lock = path, about, threading.Lock()
        found = read(path) or about | {"lines": []}
        if not about.items() <= found.items():
            raise SystemExit(f"error: {path} was not measured with {about}: move it away")
        self.lines: list[dict[str, Any]] = found["lines"]

    def add(self, *lines: dict[str, Any]) -> None:
        with self.lock:
            self.lines = [*self.lines, *lines]
            about = json.dumps(self.about).removesuffix("}")
            each = ",\n".join(json.dumps(line) for line in self.lines)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(".draft")
            draft.write_text(f'{about}, "lines": [\n{each}\n]}}\n')
            draft.replace(self.path)


def parser(doc: str | None) -> command_line.PlainParser:
    """With the flags of `Runs`."""
    made = command_line.PlainParser(doc)
    made.add_argument("--workdir", type=Path, default=Path("runs"), help="of all runs")
    made.add_argument("--data.directory", dest="directory", type=Path, default=Path("data"))
    made.add_argument("--jobs", type=command_line.positive, default=2, help="at a time")
    return made


def flags_of(fields: dict[str, Any], before: str = "") -> list[str]:
    return [part for field, value in fields.items() for part in (f"--{before}{field}", str(value))]


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read(file: Path) -> dict[str, Any]:
    """{} where there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def loss(run: Path) -> float:
    return read(run / RESULT)["best_validation_loss"]


def mean_and_deviation(values: list[float]) -> tuple[float, float | None]:
    """The deviation is the sample's; None of one number."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def search_rates(rates: Iterable[str], loss: Callable[[str], float]) -> dict[str, float]:
    """The loss of each learning rate that was tried.

    If the best of them is the lowest or highest, its half or double is tried too, until it is
    neither or there are `MOST_RATES`: where each step only does harm, lower is better without end.
    """
    losses = {rate: loss(rate) for rate in rates}
    while factor := beyond(losses, best := min(losses, key=losses.__getitem__)):
        new = f"{float(best) * factor:g}"
        losses[new] = loss(new)
    return losses


def beyond(rates: Iterable[str], best: str) -> float | None:
    """By what `best` is to be multiplied to have it between others, else None."""
    rates = sorted(rates, key=float)
    return {rates[0]: 0.5, rates[-1]: 2.0}.get(best) if len(rates) < MOST_RATES else None
