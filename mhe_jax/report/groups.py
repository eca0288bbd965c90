"""Runs grouped by what differs between them.

Runs that learn the same from the same text make a `Section`; in it, runs that differ in nothing but
their seed, and in what does not change what is learned, make a group.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mhe_jax.config import FIELDS_OF_KINDS, Config, InputError, TaskName
from mhe_jax.config.fields import short_names
from mhe_jax.report.runs import FIELDS, VALIDATION
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.metrics import lower_is_better

# Fields in which the runs of one experiment may differ: the seed, directories, devices, when and
# what is logged and kept, and how the same numbers are computed. `train.skip_nonfinite` is not one
# of them: it says which updates are left out.
SAME = ("workdir", "train.seed", "data.directory", "data.cache_directory", "data.tokenizer")
SAME_BELOW = ("mesh.", "evaluation.", "model.remat", "model.kronecker.apply", "train.log")
SAME_BELOW += ("train.eval", "train.checkpoint", "train.keep", "train.profile_steps")
SAME_BELOW += ("train.tensorboard", "train.wandb")
SAME_OF_ATTENTION = (".form", ".engine")  # of every role


@dataclasses.dataclass(frozen=True)
class Section:
    """Runs that learn the same from the same text, as DataFrames."""

    title: str
    task: TaskName
    metric: str
    chosen: tuple[str, ...]  # fields for which each group has the value that is best for it
    runs: Any  # of `read_runs`, with the name of the `group`, None without one
    groups: Any  # kind, trained, config and the fields that differ
    mean: Any  # a column for each number; several runs of one seed count as their mean
    std: Any  # of a sample
    seeds: Any

    def base(self, group: str, kind: str) -> str | None:
        """The group of `kind` that differs from `group` in its attention alone, None if not one.

        Of several, one that was trained, and one that agrees in all fields that every kind has.
        """
        groups = self.groups.drop(columns=list(self.chosen), errors="ignore")
        if "train.init_from" in groups:  # each kind starts from an encoder of its own
            groups["train.init_from"] = groups["train.init_from"] != "null"
        of_kinds = ("kind", *FIELDS_OF_KINDS)
        fields = [f for f in groups if f in FIELDS and f.rpartition(".")[2] not in of_kinds]
        same = groups[fields] == groups.loc[group, fields]
        others = [field for field in fields if not field.startswith("model.attention")]
        found = groups[(groups.kind == kind) & same[others].all(axis="columns")]
        for better in (groups.trained, same.all(axis="columns")):
            better = better[found.index]
            found = found[better] if better.any() else found
        return str(found.index[0]) if len(found) == 1 else None

    def against(self, group: str, other: str | None) -> str | None:
        """`better` or `worse` than another by more than two standard errors of the difference.

        Less is `within chance`; with one seed there is no standard error. None without values.
        """
        if other in (None, group):
            return None
        of_both = [group, other], self.metric
        seeds, mean = self.seeds.loc[of_both], self.mean.loc[of_both]
        if seeds.min() < 2:
            return "one seed" if seeds.all() else None
        error = math.sqrt((self.std.loc[of_both] ** 2 / seeds).sum())
        difference = mean[group] - mean[other]
        if abs(difference) <= 2 * error:
            return "within chance"
        return "worse" if (difference > 0) == lower_is_better(self.metric) else "better"


def sections(runs: Any, metric: str | None, choose: Sequence[str] = ()) -> list[Section]:
    """Runs by task and text, with their groups: of those that differ in `choose` alone, the best.

    That is the one with the lowest mean validation loss over the seeds that all of them have.
    A metric of None is that of the task.

    Raises:
      InputError: no run has the metric, or a field of `choose` makes no groups.
    """
    runs = runs[runs.config.notna()].astype({"seed": int, "trained": bool})
    for field in choose:
        groups = field in FIELDS and _makes_groups(field)
        if not groups or any(_is_text(field, value) for value in runs[field]):
            reason = "takes a field of what is learned, such as optimizer.learning_rate"
            raise InputError(f"--choose {field}: {reason}")
    by_text = runs.groupby([_text(run) for _, run in runs.iterrows()], sort=False)
    found = [_section(members.copy(), metric, choose) for _, members in by_text]
    if metric and not any(s.metric == metric for s in found):
        names = ", ".join(sorted({name for names in runs.scores for name in names}))
        raise InputError(f"--metric {metric}: no run has it{names and f'; takes one of {names}'}")
    return found


def _section(runs: Any, wanted: str | None, choose: Sequence[str]) -> Section:
    groups = _chosen(_groups(runs), runs, choose)
    owners = {path: name for name, paths in groups.paths.items() for path in paths}
    runs["group"] = [owners.get(path) for path in runs.index]
    numbers = [*runs.select_dtypes("float")]
    by_seed = runs.groupby(["group", "seed"], sort=False)[numbers].mean()
    by_group = by_seed.groupby("group", sort=False)
    told = (of.reindex(groups.index) for of in (by_group.mean(), by_group.std(), by_group.count()))
    config = runs.config.iloc[0]
    names = (wanted, *runs.metric.dropna(), *TASKS[config.task].metrics)
    scored = (name for name in names if name in numbers and runs[name].notna().any())
    title = f"{config.task}: {' and '.join(_places(config)) or 'no text'}"
    metric = str(next(scored, VALIDATION))
    return Section(title, config.task, metric, tuple(choose), runs, groups, *told)


def _places(config: Config) -> list[str]:
    place = Path(config.data.directory).name
    return [f"{place}/{name}" if place else name for name in config.data.train]


def _text(run: Any) -> str:
    """The task, and its data by name (where they lie does not matter)."""
    data = [(name, run[name]) for name in FIELDS if _is_text(name, run[name])]
    return json.dumps([run.config.task, _places(run.config), data])


def _is_text(name: str, value: str) -> bool:
    """Whether a field, with this JSON, is one by which runs learn from other text."""
    ours = name.startswith("data.") and name not in (*SAME, "data.length_buckets")
    return ours and value[0] in '"['


def _makes_groups(name: str) -> bool:
    return not (name in SAME or name.startswith(SAME_BELOW) or name.endswith(SAME_OF_ATTENTION))


def _kind_of(config: Config) -> str:
    """The attention of a model: one kind, or that of each role where they differ."""
    kinds = config.kinds
    one = len({*kinds.values()}) == 1
    return [*kinds.values()][0] if one else " ".join(":".join(pair) for pair in kinds.items())


def _groups(runs: Any) -> Any:
    """The groups of the runs that are done, by kind and fields that differ; `paths` are theirs."""
    differing = [name for name in FIELDS if _makes_groups(name) and runs[name].nunique() > 1]
    # What was converted and not trained is no seed of what was trained.
    by_fields = runs[runs.status == "done"].groupby(["trained", *differing], sort=False)
    groups = by_fields[["config"]].first().reset_index()
    groups["paths"] = [list(members.index) for _, members in by_fields]
    groups["kind"] = groups.config.map(_kind_of)
    short, shown = short_names(differing), [f for f in differing if f != "model.attention.kind"]
    names = []
    for _, group in groups.iterrows():
        told = [f"{short[f]}={json.loads(group[f])}" for f in shown if group[f] != "null"]
        if groups.trained.any() and not group.trained:
            told.append("not trained here")
        names.append(", ".join([group.kind, *told]))
    groups.index = pd.Index(names, name="attention", dtype=object)
    return groups


def _chosen(groups: Any, runs: Any, choose: Sequence[str]) -> Any:
    """Of groups that differ only in the chosen fields, the one with the best validation loss."""
    rest = [name for name in groups if name in FIELDS and name not in choose]
    best = []
    for _, alike in groups.groupby(["trained", *rest], sort=False):
        members = [runs.loc[paths] for paths in alike.paths]
        common = set.intersection(*({*of.seed} for of in members))
        asked = [of[of.seed.isin(common) | (not common)][VALIDATION].mean() for of in members]
        best.append(alike.index[pd.Series(asked).fillna(math.inf).argmin()])
    return groups.loc[best]
