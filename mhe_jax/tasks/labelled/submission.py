"""Predictions in the form that each suite takes.

    GLUE, own     TSV: index, prediction; the name of the label, or a number
    SuperGLUE     JSON lines: {"idx": 0, "label": ...}; a passage a line for MultiRC
    SQuAD         JSON: {id: text}, and for 2.0 {id: by how much no answer scores more} beside it

GLUE's STS-B takes numbers from 0 to 5. The files are named by the run, not as the suites' sites
want them (`CoLA.tsv`, `BoolQ.jsonl`, ...).
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mhe_jax.config import Config
from mhe_jax.tasks.labelled.batches import EvaluationExamples
from mhe_jax.tasks.labelled.examples import Example
from mhe_jax.tasks.labelled.windows import Answer, WindowRows
from mhe_jax.tasks.task import Outputs


def submission(config: Config, batches: EvaluationExamples, outputs: Outputs) -> dict[str, str]:
    """The files of a split, {suffix: text}."""
    rows, predictions = batches.rows, batches.predictions(outputs)
    if isinstance(rows, WindowRows):
        return _json(rows, predictions, batches.texts(predictions))
    labels = config.data.labels
    if rows.dataset.suite == "superglue":
        text = json_lines(rows.examples, predictions, labels, config.data.dataset)
        return {"predictions.jsonl": text}
    if config.data.dataset == "stsb":
        predictions = np.clip(predictions, 0, 5).tolist()
    return {"predictions.tsv": tsv(rows.examples, predictions, labels)}


def _json(rows: WindowRows, answers: Sequence[Answer], texts: Sequence[str]) -> dict[str, str]:
    names = [question.index for question in rows.questions]
    files: dict[str, Any] = {"predictions.json": dict(zip(names, texts, strict=True))}
    if rows.dataset.may_be_unanswered:
        odds = (answer.no_answer for answer in answers)
        files["no_answer.json"] = dict(zip(names, odds, strict=True))
    return {name: json.dumps(found, ensure_ascii=False) + "\n" for name, found in files.items()}


def tsv(examples: Sequence[Example], predictions: Sequence[float], labels: Sequence[str]) -> str:
    lines = ["index\tprediction"]
    for example, prediction in zip(examples, predictions, strict=True):
        shown = labels[int(prediction)] if labels else f"{prediction:.3f}"
        lines.append(f"{example.index}\t{shown}")
    return "".join(f"{line}\n" for line in lines)


def json_lines(
    examples: Sequence[Example], predictions: Sequence[float], labels: Sequence[str], dataset: str
) -> str:
    names: list[Any] = [labels[int(prediction)] for prediction in predictions]
    if dataset in ("copa", "multirc"):
        names = [int(name) for name in names]
    elif dataset == "wsc":
        names = [name.title() for name in names]  # other booleans are lower case
    if dataset == "multirc":
        objects = _passages(examples, names)
    else:
        objects = [
            {"idx": example.index, "label": name}
            for example, name in zip(examples, names, strict=True)
        ]
    return "".join(json.dumps(found) + "\n" for found in objects)


def _passages(examples: Sequence[Example], labels: Sequence[int]) -> list[dict[str, Any]]:
    passages: dict[int, dict[int, list[dict[str, int]]]] = {}
    for example, label in zip(examples, labels, strict=True):
        passage, question, answer = example.index
        answers = passages.setdefault(passage, {}).setdefault(question, [])
        answers.append({"idx": answer, "label": label})
    objects = []
    for passage, found in passages.items():
        questions = [{"idx": question, "answers": answers} for question, answers in found.items()]
        objects.append({"idx": passage, "passage": {"questions": questions}})
    return objects
