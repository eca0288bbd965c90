"""The data sets of labelled examples: GLUE, SuperGLUE without ReCoRD, SQuAD, and one's own.

A row of the table says what an example is in TFDS, and in the Parquet files of the same names on
the hub of `datasets`; and which metrics the authors of the data set use. ReCoRD is not here: its
answers are entities marked in a passage, a task of its own.

Sources: Wang et al. 2018 (GLUE, section 3); Wang et al. 2019 (SuperGLUE, section 3); Rajpurkar et
al. 2016, 2018 (SQuAD 1.1, 2.0).
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mhe_jax.config import Config, Dataset, InputError, TaskName
from mhe_jax.tasks.metrics import METRICS


@dataclass(frozen=True)
class DatasetRow:
    """One data set; `labels` are in the order of their numbers.

    Those of `own` examples are the config's.
    """

    task: TaskName
    # Fields of the one or two texts (of a text and its choices), and of the label.
    texts: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = ()
    # Official metrics, see `METRICS`.
    metrics: tuple[str, ...] = ("accuracy",)
    # Those whose mean is `score`, which picks the best checkpoint; () is all of them.
    scored_by: tuple[str, ...] = ()
    # The number of spans that a classifier reads in addition to the whole.
    num_spans: int = 0
    name: Dataset = "own"


_classes = functools.partial(DatasetRow, "classification", labels=("0", "1"))
SENTENCES, NLI = ("sentence1", "sentence2"), ("premise", "hypothesis")
ENTAILMENT = ("entailment", "not_entailment")
BOOLEAN = ("false", "true")
SQUAD = DatasetRow(
    "span", ("question", "context"), metrics=("exact_match", "f1"), scored_by=("f1",)
)

TABLE: dict[Dataset, DatasetRow] = {
    "cola": _classes(("sentence",), metrics=("mcc",)),
    "sst2": _classes(("sentence",)),
    "mrpc": _classes(SENTENCES, metrics=("accuracy", "f1")),
    "qqp": _classes(("question1", "question2"), metrics=("accuracy", "f1")),
    "stsb": DatasetRow("regression", SENTENCES, metrics=("pearson", "spearman")),
    "mnli": _classes(NLI, labels=("entailment", "neutral", "contradiction")),
    "qnli": _classes(("question", "sentence"), labels=ENTAILMENT),
    "rte": _classes(SENTENCES, labels=ENTAILMENT),
    "wnli": _classes(SENTENCES),
    "boolq": _classes(("question", "passage"), labels=BOOLEAN),
    "cb": _classes(
        NLI, labels=("entailment", "contradiction", "neutral"), metrics=("accuracy", "macro_f1")
    ),
    # The premise with its question, and each of the two choices.
    "copa": DatasetRow("multiple_choice", ("premise", "choice1", "choice2"), labels=("0", "1")),
    # The paragraph, and a question with one of its answers.
    "multirc": _classes(("paragraph", "question"), metrics=("f1", "exact_match")),
    "superglue_rte": _classes(NLI, labels=ENTAILMENT),
    # The word in both sentences; the noun phrase and the pronoun.
    "wic": _classes(SENTENCES, labels=BOOLEAN, num_spans=2),
    "wsc": _classes(("text",), labels=BOOLEAN, num_spans=2),
    "squad": SQUAD,
    # Where a question may have no answer in its context.
    "squad_v2": SQUAD,
}


def row_of(config: Config) -> DatasetRow:
    """The row of `data.dataset`; for `own`, made from the config.

    Raises:
      InputError: the data set is not for this task, or fields are given that it does not take.
    """
    data, task = config.data, config.task
    if data.dataset != "own":
        row = dataclasses.replace(TABLE[data.dataset], name=data.dataset)
        if task != row.task:
            raise InputError(f"data.dataset is {data.dataset!r}: takes task {row.task}, not {task}")
        for field, default in (("fields", ("text",)), ("label_field", "label")):
            if getattr(data, field) != default:
                raise InputError(f"data.{field} is set: data.dataset {data.dataset} names its own")
        return row
    if task == "span":
        raise InputError("data.dataset is 'own': task span takes squad or squad_v2")
    choices = task == "multiple_choice"
    allowed = range(3, 100) if choices else range(1, 3)
    if len(data.fields) not in allowed or len(set(data.fields)) != len(data.fields):
        needs = "a text and its choices" if choices else "one or two texts"
        raise InputError(f"data.fields is {data.fields!r}: task {task} takes {needs}")
    metrics = ("pearson", "spearman") if task == "regression" else ("accuracy", "macro_f1")
    metrics = metrics[:1] if choices else metrics
    return DatasetRow(task, data.fields, data.label_field, data.labels, metrics, metrics[:1])


def official_scores(
    dataset: DatasetRow,
    labels: Sequence[float],
    predictions: Sequence[float],
    groups: Sequence[Hashable] = (),
) -> dict[str, float]:
    """The data set's metrics in per cent, and their `score`.

    `exact_match` is of MultiRC: questions all of whose answers are right, where `groups` says which
    examples belong to one question; its f1 is over all answers.
    """
    right, found = np.asarray(labels), np.asarray(predictions)
    metrics = {}
    for name in dataset.metrics:
        if name == "exact_match":
            wrong = {group for group, r, f in zip(groups, right, found, strict=True) if r != f}
            metrics[name] = 100.0 * (1 - len(wrong) / len(set(groups)))
        else:
            metrics[name] = 100.0 * METRICS[name](right, found)
    return with_score(dataset, metrics)


def with_score(dataset: DatasetRow, metrics: dict[str, float]) -> dict[str, float]:
    names = dataset.scored_by or dataset.metrics
    return {**metrics, "score": float(np.mean([metrics[name] for name in names]))}
