"""How the runs of a sweep ended."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError
from mhe_jax.config.fields import parse_json
from mhe_jax.config.files import write_whole

FILE = "sweep.json"


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One line a run, as Markdown: how it ended, its best validation loss, how long it took."""
    lines = ["| run | | best validation loss | seconds |", "|---|---|---:|---:|"]
    for each in runs:
        result = each.get("result") or {}
        loss, seconds = result.get("best_validation_loss"), result.get("training_seconds")
        status = each["status"]
        if status == "failed":
            status = "failed: " + each["reason"].replace("|", "/")
        shown = "" if loss is None else f"{loss:.4f}"
        lines.append(
            f"| {each['name']} | {status} | {shown} | {'' if seconds is None else seconds} |"
        )
    return "\n".join(lines)


def save(workdir: Path, runs: list[dict[str, Any]]) -> None:
    """Writes sweep.json; runs of earlier sweeps in the same place stay in it."""
    path = workdir / FILE
    known = {each["name"]: each for each in read(workdir)} | {each["name"]: each for each in runs}
    write_whole(path, json.dumps({"runs": list(known.values())}, indent=1) + "\n")


def read(workdir: Path) -> list[dict[str, Any]]:
    """The runs of sweep.json, [] where there is none.

    Raises:
      InputError: it is not what a sweep writes.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    try:
        runs = parse_json(path)["runs"]
        texts = ([each["name"], each["status"], each.get("reason", "")] for each in runs)
        if all(isinstance(text, str) for three in texts for text in three):
            return runs
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise InputError(f"{path}: is not what a sweep writes")
