"""`train.py CONFIG --sweep FIELD=A,B --seeds N`: every combination, one process after the other.

Nothing here starts a device: the runs need them.
"""

import argparse
import dataclasses
import itertools
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.cli.process import called, output_table
from mhe_jax.config import Config, InputError, result_name
from mhe_jax.config.fields import leaves, load_json, short_names, to_dict
from mhe_jax.config.files import CONFIG, RESULT
from mhe_jax.config.places import check_scheme
from mhe_jax.report import read_result, save_sweep

# Fields that train.py takes from the data set of a labelled task, if they are not given.
OF_DATA = ("data.labels", "model.num_classes", "model.num_spans")
ROOT = str(Path(__file__).parents[2])
COMMAND = (sys.executable, "-m", "mhe_jax")
LOG = "log.txt"
# What says which run is best, as `result.json` calls it; times its sign, less is better.
BETTER = {"best_validation_score": -1, "best_validation_loss": 1}


class Sweep(NamedTuple):
    """The runs, in their order, each with the arguments of train.py."""

    workdir: Path
    runs: list[tuple[Config, list[str]]]
    evaluate: bool


def parse(arguments: Sequence[str]) -> Sweep:
    """The sweep of `train.py CONFIG [--sweep FIELD=A,B,...]... [--seeds N] [--evaluate] [...]`.

    Every combination with the first seed, then with the next; all are checked before any runs.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--sweep", nargs="+", action="extend", default=[])
    parser.add_argument("--seeds", type=int, choices=range(1, 1000), metavar="1-999", default=1)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--workdir")
    try:
        given, kept = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from None
    others: dict[str, list[str]] = {}
    for value in given.sweep:
        name, _, texts = value.partition("=")
        if not texts or name == "train.seed":
            raise InputError(f"--sweep {value}: takes FIELD=A,B,...; seeds by --seeds N")
        others.setdefault(name.replace("-", "_"), []).extend(texts.split(","))
    # With values of the sweep: other fields may be of a kind that only they have.
    base = parse_train_arguments([*kept, *_options(others, [each[0] for each in others.values()])])
    first, scored = base.train.seed, base.evaluation
    if given.evaluate and not (scored.sources or getattr(base.data, scored.split)):
        raise InputError(f"--evaluate: data.{scored.split} names nothing to score")
    swept = {"train.seed": [str(seed) for seed in range(first, first + given.seeds)], **others}
    workdir = given.workdir or f"{base.workdir}-sweep"
    check_scheme("workdir", workdir, ())  # the log of each run grows line by line
    if Path(workdir).is_file():
        raise InputError(f"workdir={workdir}: is a file; takes a directory")
    short, runs = short_names([*others]), {}
    for values in itertools.product(*swept.values()):
        own = _options(swept, values)
        config = parse_train_arguments([*kept, *own, "--workdir", workdir])
        told = leaves(to_dict(config))
        name = ",".join(f"{short[field]}={told[field]}" for field in short)
        place = str(Path(workdir, re.sub(r"[^\w.,=+-]", "_", name)))
        runs[place] = dataclasses.replace(config, workdir=place), [*kept, *own, "--workdir", place]
    from mhe_jax.model.layers import check_attention  # loads jax, and starts no device

    for config, _ in runs.values():
        check_attention(config)
    return Sweep(Path(workdir), [*runs.values()], given.evaluate)


def _options(fields: Iterable[str], values: Iterable[str]) -> list[str]:
    return [
        part for field, value in zip(fields, values, strict=True) for part in (f"--{field}", value)
    ]


def result_of(config: Config) -> dict[str, Any] | None:
    """What train.py left of a run; None until it is finished as its config says."""
    workdir, asked = Path(config.workdir), leaves(to_dict(config))
    try:
        result, ran = read_result(workdir / RESULT), leaves(to_dict(load_json(workdir / CONFIG)))
    except InputError:
        return None
    other = (name for name, value in asked.items() if ran[name] != value)
    same = all(name in OF_DATA and not asked[name] for name in other)
    return result if same and result.get("steps") == config.train.num_steps else None


def run(sweep: Sweep, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """Runs what is not finished, by `command train` and `eval`, also after one that fails.

    If the first two are refused for one reason, it ends: the values that are swept do not matter.

    A signal that ends the sweep ends its run too, which saves. Returns `runs`, also in sweep.json,
    each with name, workdir, status, reason and result; how many are `done` and `failed`; and the
    `best`, see `best_of`.
    """
    runs: list[dict[str, Any]] = []
    for config, arguments in sweep.runs:
        workdir, reason, refused = Path(config.workdir), None, False
        place = f"[{len(runs) + 1} of {len(sweep.runs)}] {workdir.name}"
        print(f"{place}: see {workdir / LOG}", file=sys.stderr)
        if result_of(config) is None:
            reason, refused = _call(workdir, [*command, "train", *arguments])
        result = result_of(config)
        if result is None:
            reason = reason or f"left no {RESULT} that fits its config"
        if sweep.evaluate and not reason:
            scores = workdir / f"eval_{result_name(config.evaluation)}.json"
            trained = (workdir / RESULT).stat().st_mtime
            if not scores.exists() or scores.stat().st_mtime < trained:
                reason, refused = _call(workdir, [*command, "eval", str(workdir)])
        told = {"status": "failed", "reason": reason} if reason else {"status": "done"}
        runs.append({"name": workdir.name, "workdir": str(workdir), **told, "result": result})
        save_sweep(sweep.workdir, runs)
        print(": ".join(filter(None, [*told.values(), validated(result)])), file=sys.stderr)
        if len(runs) == 2 and refused and reason == runs[0].get("reason"):
            print("the first two failed alike: the others do not begin", file=sys.stderr)
            break
    failed = sum(each["status"] == "failed" for each in runs)
    about = {"workdir": str(sweep.workdir), "done": len(runs) - failed, "failed": failed}
    return {**about, "best": best_of(runs), "runs": runs}


def best_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What has the best mean over its seeds on the validation split, and its best run.

    That is the lowest loss, or the highest score where a task has one. Values with fewer finished
    seeds than others do not count. The name is "" where only seeds differ. None if no run has been
    validated.
    """
    found: dict[str, list[tuple[float, str, str]]] = {}
    for each in runs:
        if metric := metric_of(each["result"]):
            values = re.sub(r",?seed=\d+$", "", each["name"])
            kept = found.setdefault(values, [])
            kept.append((BETTER[metric] * each["result"][metric], each["workdir"], metric))
    if not found:
        return None

    def rank(values: str) -> tuple[int, float]:
        return -len(found[values]), statistics.fmean(value for value, *_ in found[values])

    name = min(found, key=rank)
    _, workdir, metric = min(found[name])
    count, value = rank(name)
    return {"name": name, "seeds": -count, metric: BETTER[metric] * value, "workdir": workdir}


def best_in_words(found: dict[str, Any]) -> str:
    """Which run of a sweep is best, and what to do next, in a line.

    That is to score it, or to compare all runs once they have been.
    """
    if not (best := found["best"]):
        return "no run has a validation loss"
    named = f"{best['name']}, " if best["name"] else ""
    seeds = f", mean of {best['seeds']} seeds, the best" if best["seeds"] > 1 else ""
    goal, command = "score it", called("eval", shlex.quote(best["workdir"]))
    if any(Path(best["workdir"]).glob("eval_*.json")):
        goal, command = "compare all", called("compare", shlex.quote(found["workdir"]))
    place = f"in {best['workdir']}; to {goal}: {command}"
    return f"best: {named}{validated(best)}{seeds} {place}"


def metric_of(result: dict[str, Any] | None) -> str | None:
    """By what a result is compared; None if it has not been validated."""
    return next((name for name in BETTER if result and result.get(name) is not None), None)


def validated(result: dict[str, Any] | None) -> str:
    """`validation loss 3.21`, or ""."""
    metric = metric_of(result)
    if result is None or metric is None:
        return ""
    return f"{metric.removeprefix('best_').replace('_', ' ')} {result[metric]:.5g}"


def show(found: dict[str, Any]) -> None:
    """The runs of a sweep for people."""
    rows = []
    for each in found["runs"]:
        result = each["result"] or {}
        numbers = {name.replace("_", " "): result.get(name) for name in BETTER}
        steps = {"steps": result.get("steps"), "minutes": None}
        if "training_seconds" in result:
            steps["minutes"] = result["training_seconds"] / 60
        rows.append({"run": each["name"], "status": each["status"], **numbers, **steps})
        rows[-1]["reason"] = each.get("reason")
    output_table(rows)


def _call(workdir: Path, command: Sequence[str]) -> tuple[str | None, bool]:
    """Runs one process, whose standard error is the log.

    Returns why it failed, or None; and whether it refused its input.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    # It imports what is imported here, wherever it is started.
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    how: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    how["env"] = {**os.environ, "PYTHONPATH": path}
    with (
        (workdir / LOG).open("ab") as log,
        # A process group of its own: Ctrl-C reaches it through us, once.
        subprocess.Popen(command, stderr=log, process_group=0, **how) as process,
    ):
        try:
            process.wait()
        except (KeyboardInterrupt, SystemExit):  # as run_entry_point raises for a signal
            process.terminate()
            process.wait()
            raise
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}", False
    last = (workdir / LOG).read_text(errors="replace").strip().rpartition("\n")[2]
    reason = last.removeprefix("error: ") if process.returncode else None
    return reason, process.returncode == 2
