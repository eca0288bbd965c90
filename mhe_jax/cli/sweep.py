"""`train.py CONFIG --sweep FIELD=A,B --seeds N`: every combination, one process after the other.

Nothing here starts a device: the runs need them.
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
from mhe_jax.report import read_result, save_sweep

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
    if names & {"-h", "--help"}:
        return False
    if "--evaluate" in names and not names & {"--sweep", "--seeds"}:
        raise InputError("--evaluate goes with --sweep or --seeds")
    return bool(names & {"--sweep", "--seeds"})


def parse(arguments: Sequence[str]) -> Sweep:
    """The sweep of `train.py CONFIG [--sweep FIELD=A,B,...]... [--seeds N] [--evaluate] [...]`.

    Every combination with the first seed, then with the next; all are checked before any runs.
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
    base = parse_train_arguments(kept)
    first, scored = base.train.seed, base.evaluation
    if given.evaluate and not (scored.sources or getattr(base.data, scored.split)):
        raise InputError(f"--evaluate: data.{scored.split} names nothing to score")
    swept = {"train.seed": [str(seed) for seed in range(first, first + given.seeds)]}
    for value in given.sweep:
        name, _, texts = value.partition("=")
        if not texts:
            raise InputError(f"--sweep {value}: takes FIELD=A,B,...")
        if name == "train.seed":
            raise InputError("--sweep train.seed: give --seeds N, from --train.seed on")
        swept.setdefault(name.replace("-", "_"), []).extend(texts.split(","))
    workdir = given.workdir or f"{base.workdir}-sweep"
    check_scheme("workdir", workdir, ())  # the log of each run grows line by line
    short, runs = short_names([*swept][1:]), {}
    for values in itertools.product(*swept.values()):
        own = [f"--{name}={value}" for name, value in zip(swept, values, strict=True)]
        config = parse_train_arguments([*kept, *own, "--workdir", workdir])
        told = leaves(to_dict(config))
        name = ",".join(f"{short[field]}={told[field]}" for field in short)
        name = re.sub(r"[^\w.,=+-]", "_", name)
        if name in runs:
            raise InputError(f"--sweep gives the run {name} twice")
        place = str(Path(workdir, name))
        runs[name] = dataclasses.replace(config, workdir=place), [*kept, *own, "--workdir", place]
    from mhe_jax.model.layers import check_attention  # loads jax, and starts no device

    for config, _ in runs.values():
        check_attention(config)
    return Sweep(Path(workdir), runs, given.evaluate)


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
    its run too, which saves. Returns `runs`, also in sweep.json, each with name, workdir, status,
    reason and result; and how many are `done` and `failed`.
    """
    runs: list[dict[str, Any]] = []
    for name, (config, arguments) in sweep.runs.items():
        _note(f"[{len(runs) + 1} of {len(sweep.runs)}] {name}")
        workdir, reason = Path(config.workdir), None
        workdir.mkdir(parents=True, exist_ok=True)
        if result_of(config) is None:
            reason = _call(workdir, [*command, "train", *arguments])
        result = result_of(config)
        if result is None:
            reason = reason or f"left no {RESULT} that fits its config"
        scores = workdir / f"eval_{result_name(config.evaluation)}.json"
        if sweep.evaluate and not reason and not _newer(scores, workdir / RESULT):
            reason = _call(workdir, [*command, "eval", str(workdir)])
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


def _newer(one: Path, other: Path) -> bool:
    return one.exists() and one.stat().st_mtime >= other.stat().st_mtime


def _call(workdir: Path, command: Sequence[str]) -> str | None:
    """Runs one process, logged in `workdir`; returns why it failed, or None."""
    last = ""
    # It imports what is imported here, wherever it is started.
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    how: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    how |= {"text": True, "errors": "replace", "env": {**os.environ, "PYTHONPATH": path}}
    with (
        (workdir / "log.txt").open("a", encoding="utf-8") as log,
        # A process group of its own: Ctrl-C reaches it through us, once.
        subprocess.Popen(command, stderr=subprocess.PIPE, process_group=0, **how) as process,
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
