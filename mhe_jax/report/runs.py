"""Runs as one DataFrame, config, results, scores and curves, grouped by what differs between them.

A run is a directory with `config.json`; a directory without one, such as that of a sweep, stands
for the runs below it, and for those that its `sweep.json` says have failed. Runs that learn the
same from the same text make a `Section`; in it, runs that differ in nothing but their seed, and in
what does not change what is learned, make a group.
"""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import pandas as pd

from mhe_jax.config import FIELDS_OF_KINDS, Config, EvaluationConfig, InputError, TaskName
from mhe_jax.config.fields import leaves, load_json, short_names, to_dict
from mhe_jax.config.files import CONFIG, METRICS, RESULT
from mhe_jax.config.places import path_of
from mhe_jax.report import read_result, read_sweep
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.cost import cached_numbers
from mhe_jax.tasks.metrics import lower_is_better
from mhe_jax.training import tracking

VALIDATION, STEP = "best_validation_loss", "step_seconds"
NUMBERS = (VALIDATION, STEP, "training_seconds", "tokens_per_second", "output_tokens_per_second")
NUMBERS += ("best_step", "parameters.total", "parameters.attention")
TOLD = ("config", "seed", "status", "reason", "device", "trained", "scores", "curve")
FIELDS = (*leaves(to_dict(Config())), "changed")
# How a run was evaluated, in what eval.py leaves.
SETTINGS = {field.name for field in dataclasses.fields(EvaluationConfig)}
SETTINGS = sorted(SETTINGS - {"split", "sources", "batch_size"})
NO_SCORES = ("seconds", "nats", "per_second")  # parts of the names of other numbers
# The text that runs learn from; its directory counts by its last name.
TEXT = ("train", "train_weights", "validation", "test", "fields", "dataset", "label_field")
TEXT = (*(f"data.{name}" for name in TEXT), "data.labels")
# Fields in which the runs of one experiment may differ: the seed, directories, devices, when and
# what is logged and kept, and how the same numbers are computed. `train.skip_nonfinite` is not one
# of them: it says which updates are left out.
SAME = (*TEXT, "workdir", "train.seed", "data.directory", "data.cache_directory", "data.tokenizer")
SAME_BELOW = ("mesh.", "evaluation.", "model.remat", "model.kronecker.apply", "train.log")
SAME_BELOW += ("train.eval", "train.checkpoint", "train.keep", "train.profile_steps")
SAME_BELOW += ("train.tensorboard", "train.wandb")
SAME_OF_ATTENTION = (".form", ".engine")  # of every role
# What times depend on beside the model.
TIMES = ("mesh.", "model.remat", "model.max_length", "data.batch_size", "data.length_buckets")
TIMES += ("data.tokens_per_batch", "data.sequence_length")
TIMES = ("device", *(name for name in FIELDS if name.startswith(TIMES)))


def read_runs(paths: Iterable[str | Path], split: str) -> Any:
    """All runs at and below `paths` as a DataFrame, a row each; the index is their paths.

    Its columns: `TOLD` (a run without a config has only status and reason; `trained` is False for
    what was converted and only scored; scores are the names of all, curve is
    {split: [(step, loss)]}), FIELDS as JSON, eval.SETTING, and all numbers found.

    Raises InputError for a path with no runs, or a file that is not what a run leaves.
    """
    found: dict[Path, dict[str, Any]] = {}
    for path in map(path_of, paths):
        here = {run["path"].resolve(): run for run in _below(path, split)}
        if not here:
            raise InputError(f"no runs at or below {path}")
        found |= here
    named = [run | {"path": str(run["path"])} for run in found.values()]
    frame: Any = pd.DataFrame(named).set_index("path")
    settings = (f"eval.{name}" for name in SETTINGS)
    columns = dict.fromkeys([*TOLD, *FIELDS, *NUMBERS, *settings, *frame.columns])
    return frame.reindex(columns=list(columns)).astype(dict.fromkeys(NUMBERS, float))


def _below(path: Path, split: str) -> Iterator[dict[str, Any]]:
    if (path / CONFIG).is_file():
        yield _read(path, split)
        return
    if not path.is_dir():
        return
    told = [run for run in read_sweep(path) if run["status"] == "failed"]
    failed = {run["name"]: {"status": "failed", "reason": run["reason"]} for run in told}
    for child in sorted(path.iterdir()):
        is_run, why = (child / CONFIG).is_file(), failed.get(child.name, {})
        if why and not is_run:
            yield {"path": child, **why}
        # A link to a run is one more name of it; other links could lead anywhere, and in circles.
        elif is_run or child.is_dir() and not (os.path.islink(child) or child.name[0] == "."):
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
    curve, times = {}, []
    for line in tracking.read(path / METRICS):
        if isinstance(loss := line.get("loss"), float):
            curve.setdefault(line["split"], []).append((line["step"], loss))
        if _is_number(seconds := line.get("step_seconds_p50")):
            times.append(seconds)
    if result.get("steps") != config.train.num_steps and (result or not scores):
        done = max((step for points in curve.values() for step, _ in points), default=0)
        status, reason = "not finished", f"logged {done} of {config.train.num_steps} steps"
    numbers: dict[str, Any] = result | scores
    losses = [numbers.get(VALIDATION), *(loss for _, loss in curve.get("validation", []))]
    counts = numbers.get("parameters") or {}
    numbers |= {f"parameters.{name}": count for name, count in counts.items()}
    numbers |= {
        "tokens_per_second": result.get("tokens_per_second"),  # of training: eval.py has its own
        VALIDATION: min(filter(_is_number, losses), default=None),
        STEP: statistics.median(times) if times else None,
    }
    name, count = result.get("device"), result.get("num_devices", 1)
    fields = leaves(to_dict(config)) | {"changed": "; ".join(result.get("changed") or []) or None}
    measured = [n for n, x in scores.items() if isinstance(x, float) and n not in SETTINGS]
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
        "scores": [n for n in measured if not any(part in n for part in NO_SCORES)],
        "curve": curve,
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


class Section(NamedTuple):
    """Runs that learn the same from the same text, as DataFrames."""

    title: str
    task: TaskName
    metric: str
    runs: Any  # of `read_runs`, with the name of the `group`, None without one
    groups: Any  # by name: kind, trained, config, the fields that differ, cached numbers a token
    mean: Any  # a column for each number; several runs of one seed count as their mean
    std: Any  # of a sample
    seeds: Any

    def base(self, group: str, kind: str) -> str | None:
        """The group of `kind` that differs from `group` in its attention alone, None if not one.

        Of several, one that was trained, and one that agrees in all fields that every kind has.
        """
        groups, of_kinds = self.groups.copy(), ("kind", *FIELDS_OF_KINDS)
        if "train.init_from" in groups:  # each kind starts from an encoder of its own
            groups["train.init_from"] = groups["train.init_from"] != "null"
        fields = [f for f in groups if f in FIELDS and f.rpartition(".")[2] not in of_kinds]
        same = groups[fields] == groups.loc[group, fields]
        others = [field for field in fields if not field.startswith("model.attention")]
        alike = same[others].all(axis="columns") & (groups.kind == kind)
        rank = (2 * groups.trained + same.all(axis="columns"))[alike]
        best = rank.index[rank == rank.max()]
        return str(best[0]) if len(best) == 1 else None

    def against(self, group: str, other: str | None) -> tuple[float, float, str | None]:
        """The difference from another's mean score, two standard errors of it, and a verdict.

        The verdict is `better` or `worse` by more than these errors, else `within chance`. It takes
        three seeds of each: two have an error that says little, and one has none. NaN and None
        stand for what is not known.
        """
        if other in (None, group):
            return math.nan, math.nan, None
        of_both = [group, other], self.metric
        seeds, mean = self.seeds.loc[of_both], self.mean.loc[of_both]
        difference = float(mean[group] - mean[other])
        errors = 2 * math.sqrt((self.std.loc[of_both] ** 2 / seeds).sum(skipna=False))
        if seeds.min() < 3:
            return difference, errors, (None, "one seed", "two seeds")[int(seeds.min())]
        better = "worse" if (difference > 0) == lower_is_better(self.metric) else "better"
        return difference, errors, "within chance" if abs(difference) <= errors else better

    def unlike(self, names: Sequence[str], *numbers: str) -> str:
        """The columns in which runs differ, `NAME is A (as one), B (as another)`; "" for none.

        A run that has none of `numbers` does not count.
        """
        runs = self.runs[self.runs[list(numbers)].notna().any(axis="columns")]
        told = []
        for name in names:
            found = runs.dropna(subset=["group", name]).drop_duplicates(name)
            if len(found) > 1:
                each = zip(found[name], found.group, strict=True)
                told.append(f"{name} is {', '.join(f'{value} (as {g})' for value, g in each)}")
        return ", ".join(told)


def sections(runs: Any, metric: str | None, choose: Sequence[str] = ()) -> list[Section]:
    """Runs by task and text, with their groups: of those that differ in `choose` alone, the best.

    That is the one with the lowest mean validation loss over the seeds that all of them have.
    """
    for field in choose:
        if field not in FIELDS or not _makes_groups(field):
            reason = "takes a field of what is learned, such as optimizer.learning_rate"
            raise InputError(f"--choose {field}: {reason}")
    # A copy: pandas warns of columns added to one that is cast column by column.
    runs = runs[runs.config.notna()].astype({"seed": int, "trained": bool}).copy()
    runs["title"] = runs.config.map(_title)
    by_text = runs.groupby(["title", *TEXT], sort=False)
    found = [_section(members.copy(), metric, choose) for _, members in by_text]
    if metric and not any(s.metric == metric for s in found):
        names = ", ".join(sorted({name for names in runs.scores for name in names}))
        raise InputError(f"--metric {metric}: no run has it{names and f'; takes one of {names}'}")
    return found


def _section(runs: Any, wanted: str | None, choose: Sequence[str]) -> Section:
    differing = [name for name in FIELDS if _makes_groups(name) and runs[name].nunique() > 1]
    runs["kind"] = runs.config.map(_kind_of)
    runs["group"] = _names(runs, differing).where(runs.status == "done", None)
    groups = runs.groupby("group", sort=False)[["kind", "trained", "config", *differing]].first()
    if choose:
        rest = [name for name in differing if name not in choose]
        alike = groups.groupby(["trained", *rest], sort=False)
        best = [_best(runs[runs.group.isin(members.index)]) for _, members in alike]
        groups = groups.loc[best].drop(columns=list(choose), errors="ignore")
        runs["group"] = runs.group.where(runs.group.isin(best), None)
    groups["cached"] = groups.config.map(cached_numbers).replace(0, math.nan)
    groups.index = groups.index.rename("attention")
    numbers = [*runs.select_dtypes("float")]
    by_group = runs.groupby(["group", "seed"])[numbers].mean().groupby("group")
    told = (of.reindex(groups.index) for of in (by_group.mean(), by_group.std(), by_group.count()))
    task = runs.config.iloc[0].task
    names = (wanted, *TASKS[task].metrics, VALIDATION)
    known = [name for name in names if name in numbers and runs[name].notna().any()]
    metric = str(known[0]) if known else VALIDATION
    return Section(runs.title.iloc[0], task, metric, runs, groups, *told)


def _names(runs: Any, differing: list[str]) -> Any:
    """The name of each run's group: the kind, and what differs."""
    short, names = short_names(differing), runs.kind.copy()
    for field in differing:
        told = runs[field].map(lambda text, field=field: f", {short[field]}={json.loads(text)}")
        shown = (runs[field] != "null") & (field != "model.attention.kind")
        names += told.where(shown, "")
    # What was converted and not trained is no seed of what was trained.
    mixed = runs.trained[runs.status == "done"].any()
    return names + runs.trained.map({True: "", False: ", not trained here" if mixed else ""})


def _best(runs: Any) -> str:
    """The group with the best validation loss, over the seeds that all groups have, if any."""
    losses = runs.groupby(["seed", "group"])[VALIDATION].mean().unstack()
    common = losses.dropna()
    return str((common if len(common) else losses).mean().fillna(math.inf).idxmin())


def _title(config: Config) -> str:
    place = Path(config.data.directory).name
    names = [f"{place}/{name}" if place else name for name in config.data.train]
    return f"{config.task}: {' and '.join(names) or 'no text'}"


def _makes_groups(name: str) -> bool:
    return not (name in SAME or name.startswith(SAME_BELOW) or name.endswith(SAME_OF_ATTENTION))


def _kind_of(config: Config) -> str:
    """The attention of a model: one kind, or that of each role where they differ."""
    kinds = config.kinds
    one = len({*kinds.values()}) == 1
    return [*kinds.values()][0] if one else " ".join(":".join(pair) for pair in kinds.items())
