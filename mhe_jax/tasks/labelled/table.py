"""The data sets of labelled examples: GLUE, SuperGLUE without ReCoRD, SQuAD, and one's own.

A row of the table says what a file holds as it is distributed, which labels there are, and which
metrics the authors of the data set use. ReCoRD is not here: its answers are entities marked in a
passage, a task of its own.

Sources: Wang et al. 2018 (GLUE, section 3); Wang et al. 2019 (SuperGLUE, section 3); Rajpurkar et
al. 2016, 2018 (SQuAD 1.1, 2.0).
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

from mhe_jax.config import Config, Dataset, InputError, TaskName

Suite = Literal["own", "glue", "superglue", "squad"]


@dataclass(frozen=True)
class DatasetRow:
    """One data set; the names of labels are those in its files, in the order of TFDS's numbers."""

    task: TaskName
    suite: Suite
    # Columns (or fields) of the one or two texts, and of the label.
    texts: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = ()
    # Official metrics, see `scores.py`.
    metrics: tuple[str, ...] = ("accuracy",)
    # Those whose mean is `score`, which picks the best checkpoint; () is all of them.
    scored_by: tuple[str, ...] = ()
    # Columns of a file that comes without a header.
    headerless: tuple[str, ...] = ()
    # Column that numbers the examples of a test file.
    index: str = "index"
    # Names of the texts in TFDS, where they differ; the label is `label` there.
    tfds_texts: tuple[str, ...] = ()
    # The number of spans that a classifier reads in addition to the whole.
    num_spans: int = 0
    # Lines with too few columns are left out and counted: line breaks inside a text cause them.
    skips_broken_lines: bool = False
    # A question may have no answer in its context.
    may_be_unanswered: bool = False


def _row(
    suite: Suite,
    texts: tuple[str, ...],
    labels: tuple[str, ...] = ("0", "1"),
    *metrics: str,
    task: TaskName = "classification",
    **fields: Any,
) -> DatasetRow:
    metrics = metrics or ("accuracy",)
    return DatasetRow(task, suite, texts, labels=labels, metrics=metrics, **fields)


_glue = functools.partial(_row, "glue")
_superglue = functools.partial(_row, "superglue", index="idx")
SENTENCES = ("sentence1", "sentence2")
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
    "cola": _glue(
        ("sentence",),
        ("0", "1"),
        "mcc",
        headerless=("source", "label", "mark", "sentence"),
    ),
    "sst2": _glue(("sentence",)),
    "mrpc": _glue(
        ("#1 String", "#2 String"),
        ("0", "1"),
        "accuracy",
        "f1",
        label="Quality",
        tfds_texts=SENTENCES,
    ),
    "qqp": _glue(
        ("question1", "question2"),
        ("0", "1"),
        "accuracy",
        "f1",
        label="is_duplicate",
        index="id",
        skips_broken_lines=True,
    ),
    "stsb": _glue(
        SENTENCES,
        (),
        "pearson",
        "spearman",
        task="regression",
        label="score",
        headerless=("sentence1", "sentence2", "score"),
    ),
    "mnli": _glue(
        SENTENCES,
        ("entailment", "neutral", "contradiction"),
        label="gold_label",
        tfds_texts=("premise", "hypothesis"),
    ),
    "qnli": _glue(("question", "sentence"), ENTAILMENT),
    "rte": _glue(SENTENCES, ENTAILMENT),
    "wnli": _glue(SENTENCES),
    "boolq": _superglue(("question", "passage"), BOOLEAN),
    "cb": _superglue(
        ("premise", "hypothesis"),
        ("entailment", "contradiction", "neutral"),
        "accuracy",
        "macro_f1",
    ),
    # The premise with its question, and each of the two choices.
    "copa": _superglue(
        ("premise", "choice1", "choice2"),
        ("0", "1"),
        task="multiple_choice",
    ),
    # The paragraph, and a question with one of its answers.
    "multirc": _superglue(("paragraph", "question"), ("0", "1"), "f1", "exact_match"),
    "superglue_rte": _superglue(("premise", "hypothesis"), ENTAILMENT),
    # The word in both sentences; the noun phrase and the pronoun.
    "wic": _superglue(SENTENCES, BOOLEAN, num_spans=2),
    "wsc": _superglue(("text",), BOOLEAN, num_spans=2),
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
        row = TABLE[data.dataset]
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
    )
