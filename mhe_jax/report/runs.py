"""Runs as one DataFrame: config, results, scores and curves.

A run is a directory with `config.json`; a directory without one, such as that of a sweep, stands
for the runs below it, and for those that its `sweep.json` says have failed.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from mhe_jax.config import Config, EvaluationConfig, InputError
from mhe_jax.config.fields import leaves, load_json, to_dict
from mhe_jax.config.files import CONFIG, METRICS, RESULT
from mhe_jax.config.places import path_of
from mhe_jax.report import read_result, read_sweep
from mhe_jax.training import tracking

VALIDATION, STEP = "best_validation_loss", "step_seconds"
NUMBERS = (VALIDATION, STEP, "training_seconds", "tokens_per_second", "output_tokens_per_second")
NUMBERS += ("best_step", "parameters.total", "parameters.attention")
TOLD = ("config", "seed", "status", "reason", "device", "trained", "metric", "scores", "curve")
FIELDS = (*leaves(to_dict(Config())), "changed")
# How a run was evaluated, in what eval.py leaves.
SETTINGS = tuple(
    field.name
    for field in dataclasses.fields(EvaluationConfig)
    if field.name not in ("split", "sources", "batch_size")
)
# Parts of the names of metrics that are not scores.
NO_SCORES = ("seconds", "nats", "per_second")


def read_runs(paths: Iterable[str | Path], split: str) -> Any:
    """All runs at and below `paths` as a DataFrame, a row each; the index is their paths.

    Its columns: status (done, not finished, failed) and reason, all that a run has which failed
    before it wrote a config; config, seed, device, `trained` (False: converted and only scored);
    FIELDS, those of the config as JSON, and those `changed` in the middle of training;
    eval.SETTING, how it was evaluated; every number that train.py and eval.py left (`step_seconds`
    is the median of the log); metric, the score that decides; scores, the names of all;
    curve, {split: [(step, loss)]}.

    Raises:
      InputError: a path with no runs, or a file that is not what a run leaves.
    """
    found: dict[Path, dict[str, Any]] = {}
    for path in map(path_of, paths):
        here = {run["path"].resolve(): run for run in _below(path, split)}
        if not here:
            raise InputError(f"no runs at or below {path}")
        found |= here
    frame: Any = pd.DataFrame([run | {"path": str(run["path"])} for run in found.values()])
    settings = (f"eval.{name}" for name in SETTINGS)
    columns = dict.fromkeys(["path", *TOLD, *FIELDS, *NUMBERS, *settings, *frame.columns])
    frame = frame.reindex(columns=list(columns)).set_index("path")
    return frame.astype(dict.fromkeys(NUMBERS, float))


def _below(path: Path, split: str) -> Iterator[dict[str, Any]]:
    if (path / CONFIG).is_file():
        yield _read(path, split)
        return
    if not path.is_dir():
        return
    failed = {
        run["name"]: {"status": "failed", "reason": run.get("reason", "")}
        for run in read_sweep(path)
        if run["status"] == "failed"
    }
    for child in sorted(path.iterdir()):
        is_run, why = (child / CONFIG).is_file(), failed.get(child.name, {})
        if why and not is_run:
            yield {"path": child, **why}
        # A link to a run is one more name of it; other links could lead anywhere, and in circles.
        elif is_run or child.is_dir() and not (child.is_symlink() or child.name[0] == "."):
            for run in _below(child, split):
                yield run if run["status"] == "done" else run | why


def _read(path: Path, split: str) -> dict[str, Any]:
    config = load_json(path / CONFIG)
    result, scores = read_result(path / RESULT), read_result(path / f"eval_{split}.json")
    status, reason = "done", ""
    step = result.get({"best": "best_step", "last": "steps"}.get(scores.get("checkpoint", ""), ""))
    scored = scores.get("steps") or [None]
    if step and scored[-1] not in (None, step):  # it was trained on after it was evaluated
        old = f"eval_{split}.json is left out, it is of step {scored[-1]}, not {step}"
        scores, reason = {}, f"{old}: run `python eval.py {path}`"
    curve: dict[str, list[tuple[int, float]]] = {}
    times = []
    for line in tracking.read(path / METRICS):
        if isinstance(loss := line.get("loss"), float):
            curve.setdefault(line["split"], []).append((line["step"], loss))
        if _is_number(seconds := line.get("step_seconds_p50")):
            times.append(seconds)
    if result.get("steps") != config.train.num_steps and (result or not scores):
        done = max((step for points in curve.values() for step, _ in points), default=0)
        status, reason = "not finished", f"logged {done} of {config.train.num_steps} steps"
    # The speed is that of training: eval.py has its own.
    numbers: dict[str, Any] = (
        result | scores | {"tokens_per_second": result.get("tokens_per_second")}
    )
    counts = result.get("parameters") or scores.get("parameters") or {}
    losses = [numbers.get(VALIDATION), *(loss for _, loss in curve.get("validation", []))]
    numbers |= {f"parameters.{name}": count for name, count in counts.items()}
    numbers |= {VALIDATION: min(filter(_is_number, losses), default=None)}
    numbers |= {STEP: statistics.median(times) if times else None}
    name, count = result.get("device"), result.get("num_devices", 1)
    fields = leaves(to_dict(config)) | {"changed": "; ".join(result.get("changed") or []) or None}
    return {
        "path": path,
        **{field: json.dumps(value) for field, value in fields.items()},
        **{name: float(value) for name, value in numbers.items() if _is_number(value)},
        **{f"eval.{name}": json.dumps(scores[name]) for name in SETTINGS if name in scores},
        "config": config,
        "seed": config.train.seed,
        "status": status,
        "reason": reason,
        "device": name if count == 1 else f"{count} x {name}",
        "trained": bool(result),
        "metric": scores.get("metric"),
        "scores": [name for name, value in scores.items() if _is_score(name, value)],
        "curve": curve,
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def _is_score(name: str, value: Any) -> bool:
    no_scores = name in SETTINGS or any(part in name for part in NO_SCORES)
    return isinstance(value, float) and not no_scores
