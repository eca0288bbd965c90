"""Runs grouped by what differs between them.

Runs that learn the same from the same text make a `Section`; in it, runs of one experiment, such as
those of several seeds, make a `Group`.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhe_jax.attention import KINDS
from mhe_jax.config import FIELDS_OF_KINDS, Config, InputError, TaskName
from mhe_jax.config.fields import did_you_mean, nearest, short_names
from mhe_jax.report.runs import VALIDATION, RunRecord, score_names
from mhe_jax.report.tables import mean_and_deviation
from mhe_jax.tasks import TASKS
from mhe_jax.tasks.cache import cached_numbers
from mhe_jax.tasks.metrics import lower_is_better

# Fields in which the runs of one experiment may differ: the seed, directories, devices, when and
# what is logged and kept, and how the same numbers are computed. `train.skip_nonfinite` is not one
# of them: it says which updates are left out.
SAME = ("workdir", "train.seed", "data.directory", "data.cache_directory", "data.tokenizer")
SAME_BELOW = (
    "mesh.",
    "evaluation.",
    "train.log",
    "train.eval",
    "train.checkpoint",
    "train.keep",
    "train.profile_steps",
    "train.tensorboard",
    "train.wandb",
    "model.remat",
    "model.kronecker.apply",
)
SAME_OF_ATTENTION = (".form", ".engine")  # of every role
# Fields of a kind whose default does nothing: set, they make another attention, such as GLA of
# `mla`.
VARIANTS = {
    field.name
    for name, kinds in FIELDS_OF_KINDS.items()
    for kind in kinds
    for field in dataclasses.fields(KINDS[kind])
    if field.name == name and field.default in (1, False)
}


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, and in fields that do not change what is learned."""

    name: str
    kind: str
    fields: dict[str, Any]  # those that differ between the groups of the section
    runs: list[RunRecord]  # done ones, by seed

    @property
    def config(self) -> Config:
        config = self.runs[0].config
        assert config is not None
        return config

    @property
    def trained(self) -> bool:
        """Whether its runs were trained here; others were converted, and only scored."""
        return bool(self.runs[0].result)

    def values(self, name: str) -> list[float]:
        """The value of this metric of each seed that has it: the mean, if several runs have it."""
        found: dict[int | None, list[float]] = {}
        for run in self.runs:
            if (value := run.value(name)) is not None:
                found.setdefault(run.seed, []).append(value)
        return [statistics.fmean(values) for values in found.values()]

    def mean(self, name: str) -> float | None:
        found = self.values(name)
        return mean_and_deviation(found)[0] if found else None

    def spread(self, name: str) -> float | None:
        """The sample's standard deviation over the seeds; None with fewer than two."""
        found = self.values(name)
        return mean_and_deviation(found)[1] if found else None

    def against(self, other: "Group", name: str) -> str | None:
        """`better` or `worse` than another by more than two standard errors of the difference.

        Less is `within chance`; with one seed there is no standard error. None without values.
        """
        both = self.values(name), other.values(name)
        if min(map(len, both)) < 2:
            return "one seed" if all(both) else None
        error = math.sqrt(sum(statistics.variance(values) / len(values) for values in both))
        difference = statistics.fmean(both[0]) - statistics.fmean(both[1])
        if abs(difference) <= 2 * error:
            return "within chance"
        return "worse" if (difference > 0) == lower_is_better(name) else "better"

    def parameters(self, which: str) -> int | None:
        return self.runs[0].parameters().get(which)

    def cached_numbers(self) -> int | None:
        """`tasks.cache.cached_numbers` of its config; None without a decoder."""
        return cached_numbers(self.config) or None


@dataclasses.dataclass(frozen=True)
class Section:
    """Runs that learn the same from the same text."""

    title: str
    task: TaskName
    groups: list[Group]
    runs: list[RunRecord]
    metric: str
    chosen: tuple[str, ...]  # fields for which each group has the value that is best for it

    def base(self, group: Group, kind: str) -> Group | None:
        """The base of `group`: the group of `kind` that differs from it in its attention alone.

        One that was trained comes before one that was not. If there are several, it is the one that
        also has the same number of heads, and the same value of every other field that all kinds
        have; None if that is not one group.
        """

        def rest(one: Group, attention: bool) -> dict[str, Any]:
            return {
                # Each kind starts from an encoder of its own.
                name: value is not None if name == "train.init_from" else value
                for name, value in one.fields.items()
                if name not in self.chosen
                and (not name.startswith("model.attention") or attention)
                and name.rpartition(".")[2] not in ("kind", *FIELDS_OF_KINDS)
            }

        same = [g for g in self.groups if g.kind == kind and rest(g, False) == rest(group, False)]
        same = [other for other in same if other.trained] or same
        close = [other for other in same if rest(other, True) == rest(group, True)] or same
        return close[0] if len(close) == 1 else None


def sections(
    runs: Sequence[RunRecord], metric: str | None, choose: Sequence[str] = ()
) -> list[Section]:
    """Runs by task and text, each with its groups.

    Args:
      runs: the records from `read_runs`.
      metric: the score; None is that of the task.
      choose: fields for which each group keeps the value with the lowest mean validation loss, over
        the seeds that all of its values have.

    Raises:
      InputError: no run has the metric, or a field of `choose` is unknown or makes no groups.
    """
    by_text: dict[tuple, list[RunRecord]] = {}
    for run in runs:
        if run.config is not None:
            by_text.setdefault(_text(run), []).append(run)
    known = {name for run in runs for name in run.fields}
    for field in choose:
        if known and field not in known:
            near = did_you_mean(nearest(field, sorted(known)))
            reason = near or "; fields are dotted, such as optimizer.learning_rate"
            raise InputError(f"--choose {field}: no such field{reason}")
        if not _makes_groups(field) or any(_is_text(field, run.fields.get(field)) for run in runs):
            raise InputError(
                f"--choose {field}: makes no groups; takes a field of what is learned, such as "
                "optimizer.learning_rate"
            )
    found = []
    for text, members in by_text.items():
        task = text[0]
        groups = _groups(members, choose)
        title = f"{task}: {' and '.join(text[1]) or 'no text'}"
        found.append(
            Section(title, task, groups, members, _metric(members, task, metric), tuple(choose))
        )
    if metric and not any(s.metric == metric for s in found):
        names = sorted({name for run in runs for name in score_names([run])})
        reason = f"; takes one of {', '.join(names)}" if names else ""
        raise InputError(f"--metric {metric}: no run has it{reason}")
    return found


def _text(run: RunRecord) -> tuple:
    """The task, and its data by name (where they lie does not matter)."""
    assert run.config is not None
    data = {name: value for name, value in run.fields.items() if _is_text(name, value)}
    place = Path(run.config.data.directory).name
    train = tuple(f"{place}/{name}" if place else name for name in run.config.data.train)
    return run.config.task, train, json.dumps(data, sort_keys=True)


def _is_text(name: str, value: Any) -> bool:
    """Whether a field is one of those by which runs learn from other text."""
    return (
        name.startswith("data.")
        and name not in (*SAME, "data.length_buckets")
        and isinstance(value, (str, list))
    )


def _makes_groups(name: str) -> bool:
    return (
        name not in SAME
        and not name.startswith(SAME_BELOW)
        and not name.endswith(SAME_OF_ATTENTION)
    )


def _metric(runs: Sequence[RunRecord], task: TaskName, wanted: str | None) -> str:
    named = [run.scores["metric"] for run in runs if isinstance(run.scores.get("metric"), str)]
    for name in (wanted, *named, *TASKS[task].metrics):
        if name and any(run.value(name) is not None for run in runs):
            return name
    return VALIDATION


def kind_of(config: Config) -> str:
    """The attention of a model: one kind, or that of each role where they differ."""
    if len({*config.kinds.values()}) == 1:
        return next(iter(config.kinds.values()))
    return " ".join(f"{role}:{kind}" for role, kind in config.kinds.items())


def _groups(runs: Sequence[RunRecord], choose: Sequence[str]) -> list[Group]:
    differing = [
        name
        for name in runs[0].fields
        if _makes_groups(name) and len({json.dumps(run.fields.get(name)) for run in runs}) > 1
    ]
    by_fields: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.status == "done":
            # What was converted and not trained is no seed of what was trained.
            key = json.dumps([bool(run.result), *map(run.fields.get, differing)])
            by_fields.setdefault(key, []).append(run)
    # A field that goes with the kind is named only if it makes a variant of the kind, or one kind
    # has it with several values.
    silent = {
        name
        for name in differing
        if name.endswith(".kind")
        or (name.rpartition(".")[2] in FIELDS_OF_KINDS or name == "train.init_from")
        and name.rpartition(".")[2] not in VARIANTS
        and not _varies_within_a_kind(name, [members[0] for members in by_fields.values()])
    }
    short = short_names(differing)
    trained = any(members[0].result for members in by_fields.values())

    def name_of(first: RunRecord, silent: set[str]) -> str:
        assert first.config is not None
        told = [
            f"{short[name]}={value}"
            for name in differing
            if (value := first.fields.get(name)) is not None and name not in silent
        ]
        if trained and not first.result:
            told.append("not trained here")
        return ", ".join([kind_of(first.config), *told])

    names = [name_of(members[0], silent) for members in by_fields.values()]
    groups = []
    for name, members in zip(names, by_fields.values(), strict=True):
        members.sort(key=lambda run: run.seed or 0)
        first = members[0]
        assert first.config is not None
        fields = {field: first.fields.get(field) for field in differing}
        # What is silent tells apart those that nothing else does.
        name = name if names.count(name) == 1 else name_of(first, set())
        groups.append(Group(name, kind_of(first.config), fields, members))
    return _chosen(groups, choose)


def _varies_within_a_kind(name: str, runs: Sequence[RunRecord]) -> bool:
    values: dict[str, set[str]] = {}
    for run in runs:
        if run.config is not None:
            values.setdefault(kind_of(run.config), set()).add(json.dumps(run.fields.get(name)))
    return any(len(found) > 1 for found in values.values())


def _chosen(groups: list[Group], choose: Sequence[str]) -> list[Group]:
    """Of groups that differ only in the chosen fields, the one with the best validation loss."""
    alike: dict[str, list[Group]] = {}
    for group in groups:
        rest = {name: value for name, value in group.fields.items() if name not in choose}
        alike.setdefault(json.dumps([group.trained, rest]), []).append(group)
    best = []
    for members in alike.values():
        common = set.intersection(*({run.seed for run in group.runs} for group in members))

        def loss(group: Group, common=common) -> float:
            found = [
                run.validation_loss
                for run in group.runs
                if run.validation_loss is not None and (not common or run.seed in common)
            ]
            return statistics.fmean(found) if found else math.inf

        best.append(min(members, key=loss))
    return best
