"""Labelled examples, from files as they are distributed to the official score.

table.py      which data sets there are: columns, labels, official numbers
records.py    files and TFDS to records        examples.py    records to texts and labels
labelled.py   texts to rows of a batch         windows.py     questions and contexts to rows
batches.py    rows to batches                  scores.py      predictions to official numbers
answers.py    SQuAD's numbers                  submission.py  the files that the suites take
"""

import dataclasses
from typing import Any

from mhe_jax.config import LABELLED, Config, InputError
from mhe_jax.data.sources import Items, Source
from mhe_jax.data.tasks import scores
from mhe_jax.data.tasks.examples import Example, label_names, read_examples, read_questions
from mhe_jax.data.tasks.table import row_of


def resolve(config: Config) -> Config:
    """The config with what follows from its data set: labels, and the shape of the head.

    Only the labels of `own` examples are read, from `data.train`; other tasks keep their config.

    Raises:
      InputError: what is given does not agree with the data set.
    """
    if config.task not in LABELLED:
        return config
    row, labels = row_of(config), label_names(config)
    classes = len(labels) if config.task == "classification" else None
    found = {
        "data.labels": (config.data.labels or None, labels or None),
        "model.num_classes": (config.model.num_classes, classes),
        "model.num_spans": (config.model.num_spans, row.num_spans),
    }
    for name, (given, right) in found.items():
        if given not in (None, right):
            raise InputError(
                f"{name} is {given!r}: data.dataset {config.data.dataset} has {right!r}"
            )
    model = dataclasses.replace(config.model, num_classes=classes, num_spans=row.num_spans)
    return dataclasses.replace(
        config, model=model, data=dataclasses.replace(config.data, labels=labels)
    )


def read(config: Config, split: str) -> list[Any]:
    """The examples or questions of a split."""
    return (read_questions if config.task == "span" else read_examples)(config, split)


def check_split(config: Config, split: str) -> None:
    """Raises InputError where something is wrong with a split, or it could not be scored."""
    scores.require(row_of(config))
    examples = read(config, split)
    scored = config.task == "span" and split == "validation"
    if scored and not any(question.answers for question in examples):
        raise InputError("data.validation: no question has an answer")


def text_of(config: Config) -> Source:
    """All texts of the training split, for a tokenizer."""
    texts: dict[str, None] = {}
    for example in read(config, "train"):
        parts = (
            example.texts if isinstance(example, Example) else (example.question, example.context)
        )
        texts.update(dict.fromkeys(parts))
    name = ", ".join(config.data.train)
    return Items(name, list(texts), "text", key=name)
