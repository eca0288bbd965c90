"""Runs what a sweep has planned, one process after the other."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mhe_jax.cli.sweep.plan import PlannedRun, Sweep
from mhe_jax.config import Config, InputError
from mhe_jax.config.evaluation import result_name
from mhe_jax.config.fields import leaves, to_dict
from mhe_jax.config.files import RESULT, TOKENIZER, publish
from mhe_jax.report.results import read_sweep, save_sweep

LOG = "log.txt"
# Fields that no tokenizer depends on.
NOT_OF_TOKENIZER = re.compile(
    r"workdir|model\.(?!vocabulary_size|hashing).*|optimizer\..*|mesh\..*|evaluation\..*"
    r"|train\.(?!init_from).*"
    r"|data\.(validation|test|cache_directory|sequence_length|packing|batch_size|tokens_per_batch"
    r"|length_buckets|row_multiple|mask_rate|corruption_rate|window_stride|question_length)"
)


def run(sweep: Sweep, command: Sequence[str]) -> dict[str, Any]:
    """Runs what is not finished, each run by `command ARGUMENTS`; returns what came of each.

    `command` ends in `train` or train.py; with `eval` or eval.py in its place it scores a run.

    A failed run is reported with its reason, and the others go on. SIGINT, SIGTERM and SIGHUP are
    passed on to the run, which saves; then the sweep ends with status 128 + signal.

    Returns:
      What is also in sweep.json: `runs`, each with name, workdir, values, status, the reason of a
      failure and the result of a success; and how many are `done` and `failed`.

    Raises:
      InputError: the workdir cannot be made, or holds a sweep.json that is not one.
    """
    try:
        sweep.workdir.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"workdir={sweep.workdir}: is a file, takes a directory") from None
    except OSError as error:
        raise InputError(f"cannot make {sweep.workdir}: {error.strerror}") from None
    read_sweep(sweep.workdir)
    about: dict[str, dict[str, Any]] = {
        one.name: {"name": one.name, "workdir": str(one.workdir), "values": one.values}
        | ({"status": "not run"} if (found := one.result()) is None else _done(found))
        for one in sweep.runs
    }
    entry = Path(command[-1])
    score = [*command[:-1], str(entry.with_name(entry.name.replace("train", "eval")))]
    with _Signals() as signals:
        for number, one in enumerate(sweep.runs, 1):
            done = about[one.name]["status"] == "done"
            scores = one.workdir / f"eval_{result_name(one.config.evaluation)}.json"
            if done and (scores.exists() or not sweep.evaluate):
                _note(f"[{number} of {len(sweep.runs)}] {one.name}: is finished")
                continue
            _note(f"[{number} of {len(sweep.runs)}] {one.name}")
            reason = None
            if not done:
                _share_tokenizer(one, sweep.runs)
                reason = _call(one.workdir, [*command, *one.arguments], signals)
            if sweep.evaluate and reason is None and not signals.received and one.result():
                reason = _call(one.workdir, [*score, str(one.workdir)], signals)
                reason = reason and f"trained, but not scored: {reason}"
            if signals.received:
                save_sweep(sweep.workdir, list(about.values()))
                _note(f"{signals.received.name}: {one.name}: {reason or 'finished'}")
                _note("the same command goes on from there")
                raise SystemExit(128 + signals.received)
            result = one.result()
            if reason is None and result is None:
                reason = f"left no {RESULT} that fits its config"
            if result is None or reason is not None:
                about[one.name] |= {"status": "failed", "reason": reason}
            else:
                about[one.name] |= _done(result)
            save_sweep(sweep.workdir, list(about.values()))
    save_sweep(sweep.workdir, list(about.values()))
    runs = list(about.values())
    statuses = [each["status"] for each in runs]
    return {
        "workdir": str(sweep.workdir),
        "done": statuses.count("done"),
        "failed": statuses.count("failed"),
        "runs": runs,
    }


def _done(result: dict[str, Any]) -> dict[str, Any]:
    return {"status": "done", "result": result}


def _share_tokenizer(run: PlannedRun, runs: Sequence[PlannedRun]) -> None:
    """Gives `run` the tokenizer of another run that would train the same one."""
    own = run.workdir / TOKENIZER
    run.workdir.mkdir(parents=True, exist_ok=True)
    if own.exists():
        return
    for other in runs:
        there = other.workdir / TOKENIZER
        if there.exists() and _of_tokenizer(other.config) == _of_tokenizer(run.config):
            with publish(own) as draft:
                shutil.copyfile(there, draft)
            return


def _of_tokenizer(config: Config) -> dict[str, Any]:
    found = leaves(to_dict(config))
    return {name: value for name, value in found.items() if not NOT_OF_TOKENIZER.fullmatch(name)}


class _Signals:
    """Within the `with`, signals go to the running process; `received` is the first of them."""

    CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self):
        self.received: signal.Signals | None = None
        self._process: subprocess.Popen | None = None
        self._waiting: list[int] = []

    def __enter__(self) -> "_Signals":
        self._old = {
            caught: signal.signal(caught, self._catch)
            for caught in self.CAUGHT
            # If ignored, as under `nohup`, it stays ignored.
            if caught != signal.SIGHUP or signal.getsignal(caught) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for caught, handler in self._old.items():
            signal.signal(caught, handler)

    def attach(self, process: subprocess.Popen | None) -> None:
        """Sets the process that signals go to; it also gets those that came before it."""
        self._process = process
        while process is not None and self._waiting:
            process.send_signal(self._waiting.pop(0))

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        # A hang-up means the same to a run as SIGTERM.
        number = signal.SIGTERM if number == signal.SIGHUP else number
        if self._process is None:
            self._waiting.append(number)
        else:
            self._process.send_signal(number)


def _call(workdir: Path, command: Sequence[str], signals: _Signals) -> str | None:
    """Runs one process, logged in `workdir`; returns why it failed, or None."""
    last = ""
    with (workdir / LOG).open("a", encoding="utf-8") as log:
        # A process group of its own: Ctrl-C reaches it through us, once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        with process:
            signals.attach(process)
            assert process.stderr is not None
            for line in process.stderr:
                log.write(line)
                log.flush()
                _note(line.rstrip("\n"))
                last = line.strip() or last
        signals.attach(None)
    status = process.returncode
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if status:
        return last.removeprefix("error: ") or f"exit status {status}"
    return None


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
