"""Many runs of one config: every combination of some values and seeds, one after the other.

    python train.py configs/X.py --sweep model.attention.kind=mha,sha --seeds 3 --workdir runs/sweep

Each run is a process of its own, `train.py` with the values of the combination, in a directory of
its own below the sweep's, named after the values: `kind=mha,seed=0`. So a sweep needs no state but
the runs: the same command repeats none that is finished and goes on with one that is not. Runs that
differ in nothing that a tokenizer depends on share it; the data cache is shared anyway.

WORKDIR/sweep.json says how each run ended. Nothing here imports jax: the runs need the devices.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from mhe_jax.config import Config, InputError
from mhe_jax.fields import hints_of, leaves, load_json, to_dict, unknown_field
from mhe_jax.loading import options_of, parse_train_arguments

FILE = "sweep.json"
LOG = "log.txt"
# Of a run, see `mhe_jax.training`: what it is, what came of it, and its tokenizer.
CONFIG, RESULT, TOKENIZER = "config.json", "result.json", "tokenizer.model"

# Fields that no tokenizer depends on.
NOT_OF_TOKENIZER = re.compile(
    r"workdir|model\.(?!vocabulary_size|hashing).*|optimizer\..*|mesh\..*|evaluation\..*"
    r"|train\.(seed|num_steps|eval_every|eval_batches|checkpoint_every|keep_checkpoints|log_every)"
)
Status = Literal["done", "failed", "not run"]


@dataclass(frozen=True)
class Run:
    """One combination: its directory below the sweep's, its config, and train.py's arguments."""

    name: str
    config: Config
    arguments: list[str]
    values: dict[str, Any]

    @property
    def workdir(self) -> Path:
        return Path(self.config.workdir)

    def result(self) -> dict[str, Any] | None:
        """What train.py says of it, None while it is not finished as its config says."""
        try:
            result = json.loads((self.workdir / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        same = load_json(self.workdir / CONFIG) == self.config
        return result if same and result["steps"] == self.config.train.num_steps else None


@dataclass(frozen=True)
class Sweep:
    """All runs, in their order: every combination with the first seed, then with the next."""

    workdir: Path
    runs: list[Run]


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether a command line of train.py asks for a sweep."""
    names = {argument.partition("=")[0] for argument in arguments}
    return bool(names & {"--sweep", "--seeds"}) and not names & {"-h", "--help"}


def parse(arguments: Sequence[str]) -> Sweep:
    """The sweep of `train.py CONFIG [--sweep FIELD=A,B,...]... [--seeds N] [--field value ...]`.

    Every combination is checked as train.py itself would, before any of them runs.

    Raises:
      InputError: a field or value that is not allowed, a combination that breaks a rule, the same
        run twice, or a workdir that holds a run itself.
    """
    config, *options = options_of(arguments)
    swept, seeds, kept = _take_out(options)
    base = parse_train_arguments([*config, *kept])
    given = any(option[0].partition("=")[0] == "--workdir" for option in options)
    workdir = Path(base.workdir if given else f"{base.workdir}-sweep")
    if (workdir / CONFIG).exists():
        raise InputError(f"{workdir} holds a run: a sweep needs a --workdir of its own")
    names = short_names(list(swept))
    runs: dict[str, Run] = {}
    for seed in range(base.train.seed, base.train.seed + seeds):
        for texts in itertools.product(*swept.values()):
            pairs = [*zip(swept, texts, strict=True), ("train.seed", str(seed))]
            own = [part for field, text in pairs for part in (f"--{field}", text)]
            found = leaves(to_dict(parse_train_arguments([*config, *kept, *own])))
            values = {field: found[field] for field, _ in pairs}
            name = ",".join(f"{names[field]}={_plain(value)}" for field, value in values.items())
            if name in runs:
                raise InputError(f"--sweep gives the run {name} twice")
            own += ["--workdir", str(workdir / name)]
            full = [*config, *kept, *own]
            runs[name] = Run(name, parse_train_arguments(full), full, values)
    return Sweep(workdir, list(runs.values()))


def _take_out(options: list[list[str]]) -> tuple[dict[str, list[str]], int, list[str]]:
    """{swept field: its values}, the number of seeds, and what is left for train.py."""
    swept: dict[str, list[str]] = {}
    seeds, kept = 1, []
    for option in options:
        flag, equals, text = option[0].partition("=")
        values = [text, *option[1:]] if equals else option[1:]
        if flag == "--seeds":
            if len(values) != 1 or not values[0].isdecimal() or int(values[0]) < 1:
                raise InputError(f"--seeds is {' '.join(values)!r}: takes a whole number from 1")
            seeds = int(values[0])
        elif flag == "--sweep":
            if not values:
                raise InputError("--sweep has no value: takes FIELD=VALUE,VALUE,...")
            for value in values:
                name, found = _swept(value)
                if name in swept:
                    raise InputError(f"--sweep {name} is given twice")
                swept[name] = found
        else:
            kept.append(option)
    for option in kept:
        name = option[0].partition("=")[0].removeprefix("--").replace("-", "_")
        if name in swept:
            raise InputError(f"--{name} is given, and swept too: one of both")
    return swept, seeds, [part for option in kept for part in option]


def _swept(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    name = name.replace("-", "_")
    hints = hints_of(Config)
    if name not in hints:
        raise unknown_field(name, Config)
    if typing.get_origin(hints[name]) is tuple or name in ("workdir", "train.seed"):
        why = "--seeds does that" if name == "train.seed" else "takes fields of one value"
        raise InputError(f"--sweep {name}: {why}")
    found = values.split(",")
    if not equals or "" in found:
        raise InputError(f"--sweep is {text!r}: takes FIELD=VALUE,VALUE,...")
    return name, found


def short_names(fields: list[str]) -> dict[str, str]:
    """The last part of each name, or the whole where two have the same."""
    lasts = [field.rpartition(".")[2] for field in fields]
    short = {
        field: field if lasts.count(last) > 1 or last == "seed" else last
        for field, last in zip(fields, lasts, strict=True)
    }
    return short | {"train.seed": "seed"}


def _plain(value: Any) -> str:
    """A value as part of a file's name."""
    return re.sub(r"[^\w.+-]", "_", str(value))


def run(sweep: Sweep, entry: str | Path) -> dict[str, Any]:
    """All runs that are not finished, by `python entry ARGUMENTS`; then what came of each.

    A run that fails is told with its reason, and the others go on. SIGINT, SIGTERM and SIGHUP are
    passed on to the run, which saves; then the sweep ends with status 128 + signal.

    Returns:
      What is also in sweep.json: `runs`, each with name, workdir, values, status, the reason of a
      failure and the result of a success; and how many are `done` and `failed`.
    """
    try:
        sweep.workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {sweep.workdir}: {error.strerror}") from None
    about: dict[str, dict[str, Any]] = {
        one.name: {"name": one.name, "workdir": str(one.workdir), "values": one.values}
        | ({"status": "not run"} if (found := one.result()) is None else _done(found))
        for one in sweep.runs
    }
    with _Signals() as signals:
        for number, one in enumerate(sweep.runs, 1):
            if about[one.name]["status"] == "done":
                _note(f"[{number} of {len(sweep.runs)}] {one.name}: is finished")
                continue
            _note(f"[{number} of {len(sweep.runs)}] {one.name}")
            _share_tokenizer(one, sweep.runs)
            reason = _train(one, entry, signals)
            if signals.received:
                _save(sweep.workdir, list(about.values()))
                _note(f"{signals.received.name}: {one.name} ended with: {reason or 'finished'}")
                _note("the same command goes on from there")
                raise SystemExit(128 + signals.received)
            result = one.result()
            if reason is None and result is None:
                reason = f"left no {RESULT} that fits its config"
            if result is None or reason is not None:
                about[one.name] |= {"status": "failed", "reason": reason}
            else:
                about[one.name] |= _done(result)
            _save(sweep.workdir, list(about.values()))
    _save(sweep.workdir, list(about.values()))
    runs = list(about.values())
    statuses = [each["status"] for each in runs]
    return {
        "workdir": str(sweep.workdir),
        "done": statuses.count("done"),
        "failed": statuses.count("failed"),
        "runs": runs,
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One line a run, as Markdown: how it ended, its best validation loss, how long it took."""
    lines = ["| run | | best validation loss | seconds |", "|---|---|---:|---:|"]
    for each in runs:
        result = each.get("result") or {}
        loss, seconds = result.get("best_validation_loss"), result.get("training_seconds")
        status = each["status"]
        if status == "failed":
            status = "failed: " + each["reason"].replace("|", "/")
        shown = "" if loss is None else f"{loss:.4f}"
        lines.append(
            f"| {each['name']} | {status} | {shown} | {'' if seconds is None else seconds} |"
        )
    return "\n".join(lines)


def _done(result: dict[str, Any]) -> dict[str, Any]:
    return {"status": "done", "result": result}


def _share_tokenizer(run: Run, runs: Sequence[Run]) -> None:
    """Give `run` the tokenizer of another that would train the very same."""
    own = run.workdir / TOKENIZER
    run.workdir.mkdir(parents=True, exist_ok=True)
    if own.exists():
        return
    for other in runs:
        there = other.workdir / TOKENIZER
        if there.exists() and _of_tokenizer(other.config) == _of_tokenizer(run.config):
            draft = own.with_name(f".{TOKENIZER}.{os.getpid()}")
            shutil.copyfile(there, draft)
            draft.replace(own)
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
        self._old = {caught: signal.signal(caught, self._catch) for caught in self.CAUGHT}
        return self

    def __exit__(self, *exception: object) -> None:
        for caught, handler in self._old.items():
            signal.signal(caught, handler)

    def attach(self, process: subprocess.Popen | None) -> None:
        """Which process signals are for; it gets those that came before it was there."""
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


def _train(run: Run, entry: str | Path, signals: _Signals) -> str | None:
    """One process; why it failed, None where it did not."""
    command = [sys.executable, str(entry), *run.arguments]
    last = ""
    with (run.workdir / LOG).open("a", encoding="utf-8") as log:
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


def _save(workdir: Path, runs: list[dict[str, Any]]) -> None:
    """Writes sweep.json; runs of earlier sweeps in the same place stay in it."""
    path = workdir / FILE
    known = {each["name"]: each for each in read(workdir)} | {each["name"]: each for each in runs}
    draft = path.with_name(f".{FILE}.{os.getpid()}")
    draft.write_text(json.dumps({"runs": list(known.values())}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def read(workdir: Path) -> list[dict[str, Any]]:
    """The runs of sweep.json, [] where there is none.

    Raises:
      InputError: it is not what a sweep writes.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: is not what a sweep writes") from None


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
