"""The data sets of labelled examples: GLUE, SuperGLUE without ReCoRD, SQuAD, and one's own.

A row of the table says what an example is in TFDS, and in the Parquet files of the same names on
the hub of `datasets`; and which metrics the authors of the data set use. ReCoRD is not here: its
answers are entities marked in a passage, a task of its own. Predictions take the form of the suite:

    GLUE, own     TSV: index, prediction; the name of the label, or a number (STS-B: from 0 to 5)
    SuperGLUE     JSON lines: {"idx": 0, "label": ...}; a passage a line for MultiRC
    SQuAD         see `windows.py`

The files are named by the run, not as the suites' sites want them (`CoLA.tsv`, `BoolQ.jsonl`, ...).

Sources: Wang et al. 2018 (GLUE, section 3); Wang et al. 2019 (SuperGLUE, section 3); Rajpurkar et
al. 2016, 2018 (SQuAD 1.1, 2.0).
"""

import dataclasses
import functools
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mhe_jax.config import Config, Dataset, InputError, TaskName
from mhe_jax.tasks.metrics import METRICS

Suite = Literal["own", "glue", "superglue", "squad"]


@dataclass(frozen=True)
class DatasetRow:
    """One data set; `labels` are in the order of their numbers.

    Those of `own` examples are the config's.
    """

    task: TaskName
    suite: Suite
    # Fields of the one or two texts, and of the label.
    texts: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = ()
    # Official metrics, see `METRICS`.
    metrics: tuple[str, ...] = ("accuracy",)
    # Those whose mean is `score`, which picks the best checkpoint; () is all of them.
    scored_by: tuple[str, ...] = ()
    # Field of the number of an example.
    index: str = "idx"
    # The number of spans that a classifier reads in addition to the whole.
    num_spans: int = 0
    # A question may have no answer in its context.
    may_be_unanswered: bool = False
    name: Dataset = "own"


_glue = functools.partial(DatasetRow, task="classification", suite="glue", labels=("0", "1"))
_superglue = functools.partial(_glue, suite="superglue")
SENTENCES, NLI = ("sentence1", "sentence2"), ("premise", "hypothesis")
ENTAILMENT = ("entailment", "not_entailment")
BOOLEAN = ("false", "true")
SQUAD = DatasetRow(
    "span",
    "squad",
    ("question", "context"),
    metrics=("exact_match", "f1"),
    scored_by=("f1",),
)

TABLE: dict[Dataset, DatasetRow] = {
    "cola": _glue(texts=("sentence",), metrics=("mcc",)),
    "sst2": _glue(texts=("sentence",)),
    "mrpc": _glue(texts=SENTENCES, metrics=("accuracy", "f1")),
    "qqp": _glue(texts=("question1", "question2"), metrics=("accuracy", "f1")),
    "stsb": _glue(task="regression", texts=SENTENCES, labels=(), metrics=("pearson", "spearman")),
    "mnli": _glue(texts=NLI, labels=("entailment", "neutral", "contradiction")),
    "qnli": _glue(texts=("question", "sentence"), labels=ENTAILMENT),
    "rte": _glue(texts=SENTENCES, labels=ENTAILMENT),
    "wnli": _glue(texts=SENTENCES),
    "boolq": _superglue(texts=("question", "passage"), labels=BOOLEAN),
    "cb": _superglue(
        texts=NLI,
        labels=("entailment", "contradiction", "neutral"),
        metrics=("accuracy", "macro_f1"),
    ),
    # The premise with its question, and each of the two choices.
    "copa": _superglue(task="multiple_choice", texts=("premise", "choice1", "choice2")),
    # The paragraph, and a question with one of its answers.
    "multirc": _superglue(texts=("paragraph", "question"), metrics=("f1", "exact_match")),
    "superglue_rte": _superglue(texts=NLI, labels=ENTAILMENT),
    # The word in both sentences; the noun phrase and the pronoun.
    "wic": _superglue(texts=SENTENCES, labels=BOOLEAN, num_spans=2),
    "wsc": _superglue(texts=("text",), labels=BOOLEAN, num_spans=2),
    "squad": SQUAD,
    "squad_v2": dataclasses.replace(SQUAD, may_be_unanswered=True),
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
    metrics = {
        "classification": ("accuracy", "macro_f1"),
        "regression": ("pearson", "spearman"),
        "multiple_choice": ("accuracy",),
    }
    if task not in metrics:
        raise InputError(f"data.dataset is 'own': task {task} takes squad or squad_v2")
    allowed = {"multiple_choice": range(3, 100)}.get(task, range(1, 3))
    if len(data.fields) not in allowed or len(set(data.fields)) != len(data.fields):
        needs = "a text and its choices" if task == "multiple_choice" else "one or two texts"
        raise InputError(f"data.fields is {data.fields!r}: task {task} takes {needs}")
    return DatasetRow(
        task,
        "own",
        data.fields,
        data.label_field,
        data.labels,
        metrics[task],
        scored_by=metrics[task][:1],
        index="index",
    )


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


def submission(
    dataset: DatasetRow, indices: Sequence[Any], predictions: Sequence[float]
) -> dict[str, str]:
    """The file of a split, {suffix: text}."""
    labels = dataset.labels
    names: list[Any] = [labels[int(found)] for found in predictions] if labels else []
    if dataset.suite != "superglue":
        if dataset.name == "stsb":
            predictions = np.clip(predictions, 0, 5).tolist()
        shown = names or [f"{number:.3f}" for number in predictions]
        lines = (f"{index}\t{name}\n" for index, name in zip(indices, shown, strict=True))
        return {"predictions.tsv": "".join(["index\tprediction\n", *lines])}
    if dataset.name in ("copa", "multirc"):
        names = [int(name) for name in names]
    elif dataset.name == "wsc":
        names = [name.title() for name in names]  # other booleans are lower case
    pairs = zip(indices, names, strict=True)
    objects = [{"idx": index, "label": name} for index, name in pairs]
    if dataset.name == "multirc":
        objects = _passages(indices, names)
    return {"predictions.jsonl": "".join(json.dumps(found) + "\n" for found in objects)}


def _passages(indices: Sequence[Any], labels: Sequence[int]) -> list[dict[str, Any]]:
    passages: dict[int, dict[int, list[dict[str, int]]]] = {}
    for (passage, question, answer), label in zip(indices, labels, strict=True):
        answers = passages.setdefault(passage, {}).setdefault(question, [])
        answers.append({"idx": answer, "label": label})
    objects = []
    for passage, found in passages.items():
        questions = [{"idx": question, "answers": answers} for question, answers in found.items()]
        objects.append({"idx": passage, "passage": {"questions": questions}})
    return objects
