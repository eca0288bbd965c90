"""Finished runs, read from their directories.

A run is a directory with `config.json`; a directory without one, such as that of a sweep, stands
for the runs below it, and for those that its `sweep.json` says have failed.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import AttentionByRole, Config, EvaluationConfig, InputError
from mhe_jax.config.fields import did_you_mean, leaves, load_json, nearest, to_dict
from mhe_jax.config.files import CONFIG, METRICS, RESULT
from mhe_jax.config.places import path_of
from mhe_jax.config.rules.model import check_attention
from mhe_jax.config.rules.ranges import check_ranges
from mhe_jax.report.results import is_number, read_result, read_sweep
from mhe_jax.training import tracking

VALIDATION = "best_validation_loss"
STEP = "step_seconds"
# How a run was evaluated, in what eval.py leaves.
SETTINGS = tuple(
    field.name
    for field in dataclasses.fields(EvaluationConfig)
    if field.name not in ("split", "sources", "batch_size")
)
# Parts of the names of metrics that are not scores.
NO_SCORES = ("seconds", "nats", "per_second")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The files of one run. `config` is None if the run failed before it wrote any."""

    path: Path
    config: Config | None
    status: str  # done, not finished, failed
    reason: str  # why it is not done, or has no scores
    result: dict[str, Any]  # of train.py
    scores: dict[str, Any]  # of eval.py on the split
    curve: dict[str, list[tuple[int, float]]]  # split -> (step, loss)
    step_seconds: float | None = None  # in training, the median of the log

    @functools.cached_property  # read thousands of times where there are many runs
    def fields(self) -> dict[str, Any]:
        """Those of the config, and what was changed in the middle of training."""
        told = {"changed": "; ".join(self.result.get("changed") or []) or None}
        return {} if self.config is None else leaves(to_dict(self.config)) | told

    @property
    def seed(self) -> int | None:
        return None if self.config is None else self.config.train.seed

    @property
    def device(self) -> str | None:
        """The device of the training, and how many if there are several."""
        name, count = self.result.get("device"), self.result.get("num_devices", 1)
        return None if name is None else str(name) if count == 1 else f"{count} x {name}"

    @property
    def validation_loss(self) -> float | None:
        """The lowest validation loss, also where a score decides what is best."""
        found = [self.result.get(VALIDATION), *(x for _, x in self.curve.get("validation", []))]
        return min((x for x in found if x is not None and math.isfinite(x)), default=None)

    def value(self, name: str) -> float | None:
        """The value of a metric, None where there is none."""
        if name == VALIDATION:
            return self.validation_loss
        if name == STEP:
            return self.step_seconds
        value = self.result.get(name)
        if name != "tokens_per_second":  # of training: eval.py has its own
            value = self.scores.get(name, value)
        if value is None or not is_number(value):
            return None
        return float(value) if math.isfinite(value) else None

    def parameters(self) -> dict[str, int]:
        return self.result.get("parameters") or self.scores.get("parameters") or {}


def read_runs(paths: Iterable[str | Path], split: str) -> list[RunRecord]:
    """All runs at and below `paths`, each once, with their scores on `split`.

    Raises:
      InputError: a path with no runs, or a file that is not what a run leaves.
    """
    found: dict[Path, RunRecord] = {}
    for path in map(path_of, paths):
        here = {run.path.resolve(): run for run in _below(path, split)}
        if not here:
            near = did_you_mean(nearest(str(path), sorted(map(str, path.parent.glob("*")))))
            what = "no runs below" if path.is_dir() else "there is no"
            raise InputError(f"{what} {path}{'' if path.is_dir() else near}")
        found |= here
    return list(found.values())


def _below(path: Path, split: str) -> Iterator[RunRecord]:
    if (path / CONFIG).is_file():
        yield _read(path, split)
        return
    if not path.is_dir():
        return
    failed = {
        each["name"]: each.get("reason", "")
        for each in read_sweep(path)
        if each["status"] == "failed"
    }
    for child in sorted(path.iterdir()):
        reason = failed.get(child.name)
        if reason is not None and not (child / CONFIG).is_file():
            yield RunRecord(child, None, "failed", reason, {}, {}, {})
        # A link to a run is one more name of it; other links could lead anywhere, and in circles.
        elif (
            child.is_dir()
            and not child.name.startswith(".")
            and (not child.is_symlink() or (child / CONFIG).is_file())
        ):
            for run in _below(child, split):
                if reason is not None and run.status != "done":
                    run = dataclasses.replace(run, status="failed", reason=reason)
                yield run


def _read(path: Path, split: str) -> RunRecord:
    config = load_json(path / CONFIG)
    try:
        check_ranges(config)
        check_attention(config)
    except InputError as error:
        raise InputError(f"{path / CONFIG}: {error}") from None
    config = _of_one_attention(config)
    result, scores = read_result(path / RESULT), read_result(path / f"eval_{split}.json")
    if stale := _stale(scores, result):
        scores, stale = {}, f"eval_{split}.json is left out, {stale}: run `python eval.py {path}`"
    curve: dict[str, list[tuple[int, float]]] = {}
    times = []
    metrics = path / METRICS
    for line in tracking.read(metrics) if metrics.is_file() else ():
        step = line["step"]
        loss = line.get("loss")
        if isinstance(loss, float) and is_number(step) and isinstance(step, int):
            curve.setdefault(str(line["split"]), []).append((step, loss))
        seconds = line.get("step_seconds_p50")
        if isinstance(seconds, float) and math.isfinite(seconds):
            times.append(seconds)
    rest = (result, scores, curve, statistics.median(times) if times else None)
    if result.get("steps") == config.train.num_steps or (scores and not result):
        return RunRecord(path, config, "done", stale, *rest)
    done = max((step for points in curve.values() for step, _ in points), default=0)
    reason = f"logged {done} of {config.train.num_steps} steps"
    return RunRecord(path, config, "not finished", reason, *rest)


def _of_one_attention(config: Config) -> Config:
    """The same config, with no overrides where all roles have one attention."""
    attention, *others = {config.model.attention_for(role) for role in config.facts.roles}
    if others:
        return config
    alone = {"attention": attention, "attention_by_role": AttentionByRole()}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **alone))


def _stale(scores: dict[str, Any], result: dict[str, Any]) -> str:
    """A sign that a run was trained on after it was evaluated; "" if there is none."""
    which = {"best": "best_step", "last": "steps"}.get(scores.get("checkpoint", ""), "")
    now, then = result.get(which), scores.get("steps")
    last = then[-1] if isinstance(then, list) and then else then
    return "" if now in (None, last) else f"it is of step {last}, not {now}"


def score_names(runs: Sequence[RunRecord]) -> list[str]:
    """Names of all scores that eval.py found, in order."""
    names = [
        name
        for run in runs
        for name, value in run.scores.items()
        if isinstance(value, float)
        and name not in SETTINGS
        and not any(part in name for part in NO_SCORES)
    ]
    return list(dict.fromkeys(names))
