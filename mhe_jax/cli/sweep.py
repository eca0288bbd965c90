"""`train.py CONFIG --sweep FIELD=A,B --seeds N`: every combination, one process after the other.

Nothing here imports jax: the runs need the devices.
"""

import argparse
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.config import Config, InputError
from mhe_jax.config.evaluation import result_name
from mhe_jax.config.fields import leaves, load_json, short_names, to_dict
from mhe_jax.config.files import CONFIG, RESULT
from mhe_jax.config.places import check_scheme
from mhe_jax.report import read_result, read_sweep, save_sweep

# Fields that train.py takes from the data set of a labelled task, if they are not given.
OF_DATA = ("data.labels", "model.num_classes", "model.num_spans")
ROOT = str(Path(__file__).parents[2])
COMMAND = (sys.executable, "-m", "mhe_jax")


class Sweep(NamedTuple):
    """The runs by name, in their order, each with the arguments of train.py."""

    workdir: Path
    runs: dict[str, tuple[Config, list[str]]]
    evaluate: bool


def is_sweep(options: Sequence[str]) -> bool:
    """Whether a command line of train.py asks for a sweep."""
    names = {option.partition("=")[0] for option in options}
    return bool(names & {"--sweep", "--seeds"}) and not names & {"-h", "--help"}


def parse(arguments: Sequence[str]) -> Sweep:
    """The sweep of `train.py CONFIG [--sweep FIELD=A,B,...]... [--seeds N] [--evaluate] [...]`.

    Every combination with the first seed, then with the next; all are checked before any runs.

    Raises:
      InputError: a field, value or combination that is not allowed, or is there twice, or a workdir
        that holds a run itself.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--sweep", nargs="+", action="extend", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--workdir")
    try:
        given, kept = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from None
    if not 0 < given.seeds < 1000:
        raise InputError(f"--seeds is {given.seeds}: takes 1 to 999")
    swept: dict[str, list[str]] = {}
    for value in given.sweep:
        name, _, texts = value.partition("=")
        if not all([name, *texts.split(",")]):
            raise InputError(f"--sweep is {value!r}: takes FIELD=VALUE,VALUE,...")
        if name == "train.seed":
            raise InputError("--sweep train.seed: give --seeds N, from --train.seed on")
        swept.setdefault(name.replace("-", "_"), []).extend(texts.split(","))
    base, fields = parse_train_arguments(kept), [*swept, "train.seed"]
    place = given.workdir or f"{base.workdir}-sweep"
    check_scheme("workdir", place, ())  # the log of each run grows line by line
    workdir, kept = Path(place), [*kept, "--workdir", place]
    if (workdir / CONFIG).exists():
        raise InputError(f"{workdir} holds a run: a sweep needs a --workdir of its own")
    scored, runs = base.evaluation, {}
    if given.evaluate and not (scored.sources or getattr(base.data, scored.split)):
        raise InputError(f"--evaluate: data.{scored.split} names nothing to score")
    numbers = map(str, range(base.train.seed, base.train.seed + given.seeds))
    for seed, *values in itertools.product(numbers, *swept.values()):
        pairs = zip(fields, [*values, seed], strict=True)
        own = [*kept, *(part for field, value in pairs for part in (f"--{field}", value))]
        found = parse_train_arguments(own)
        told = leaves(to_dict(found))
        name = ",".join(f"{short}={told[field]}" for field, short in short_names(fields).items())
        name = re.sub(r"[^\w.,=+-]", "_", name)
        if name in runs:
            raise InputError(f"--sweep gives the run {name} twice")
        place = str(workdir / name)
        runs[name] = dataclasses.replace(found, workdir=place), [*own, "--workdir", place]
    return Sweep(workdir, runs, given.evaluate)


def result_of(config: Config) -> dict[str, Any] | None:
    """What train.py left of a run; None until it is finished as its config says."""
    workdir = Path(config.workdir)
    try:
        result, ran = read_result(workdir / RESULT), leaves(to_dict(load_json(workdir / CONFIG)))
    except InputError:
        return None
    asked = leaves(to_dict(config))
    other = (name for name, value in asked.items() if ran[name] != value)
    same = all(name in OF_DATA and not asked[name] for name in other)
    return result if same and result.get("steps") == config.train.num_steps else None


def run(sweep: Sweep, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """Runs what is not finished, by `command train` and `eval`, and prints a table at the end.

    A failed run is told with its reason, and the others go on. A signal that ends the sweep ends
    its run too, which saves.

    Returns:
      What is also in sweep.json: `runs`, each with name, workdir, status, the reason of a failure
      and the result of a success; and how many are `done` and `failed`.

    Raises:
      InputError: the workdir cannot be made, or holds a sweep.json that is not one.
    """
    sweep.workdir.mkdir(parents=True, exist_ok=True)
    read_sweep(sweep.workdir)
    runs: list[dict[str, Any]] = []
    for name, (config, arguments) in sweep.runs.items():
        _note(f"[{len(runs) + 1} of {len(sweep.runs)}] {name}")
        workdir, reason = Path(config.workdir), None
        scores = workdir / f"eval_{result_name(config.evaluation)}.json"
        if result_of(config) is None:
            workdir.mkdir(exist_ok=True)
            reason = _call(workdir, [*command, "train", *arguments])
        result = result_of(config)
        stale = scores.exists() and scores.stat().st_mtime < (workdir / RESULT).stat().st_mtime
        if sweep.evaluate and result and not reason and (stale or not scores.exists()):
            reason = _call(workdir, [*command, "eval", str(workdir)])
        if result is None:
            reason = reason or f"left no {RESULT} that fits its config"
        told = {"status": "failed", "reason": reason} if reason else {"status": "done"}
        runs.append({"name": name, "workdir": str(workdir), **told, "result": result})
        save_sweep(sweep.workdir, runs)
    for run in runs:
        loss = (run["result"] or {}).get("best_validation_loss")
        told = "" if loss is None else f"best validation loss {loss:.4f}"
        _note(f"{run['name']}  {run['status']}  {run.get('reason', told)}")
    failed = sum(run["status"] == "failed" for run in runs)
    about = {"workdir": str(sweep.workdir), "done": len(runs) - failed, "failed": failed}
    return {**about, "runs": runs}


def _call(workdir: Path, command: Sequence[str]) -> str | None:
    """Runs one process, logged in `workdir`; returns why it failed, or None."""
    last = ""
    # A process group of its own: Ctrl-C reaches it through us, once.
    how: dict[str, Any] = {"text": True, "errors": "replace", "process_group": 0}
    how |= dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    # It imports what is imported here, wherever it is started.
    path = filter(None, (ROOT, os.environ.get("PYTHONPATH")))
    how["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with (
        (workdir / "log.txt").open("a", encoding="utf-8") as log,
        subprocess.Popen(command, stderr=subprocess.PIPE, **how) as process,
    ):

        def lines() -> Iterator[str]:
            for line in process.stderr or ():
                log.write(line)
                log.flush()
                _note(line.rstrip("\n"))
                yield line.strip()

        try:
            for line in lines():
                last = line or last
        except (KeyboardInterrupt, SystemExit):  # as run_entry_point raises for a signal
            process.terminate()
            list(lines())
            _note("the same command goes on from there")
            raise
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}"
    return (last.removeprefix("error: ") or "no word") if process.returncode else None


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
