"""Results that runs and sweeps leave: they may be damaged, or somebody else's."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError
from mhe_jax.config.fields import parse_json, shown
from mhe_jax.config.files import write_whole

SWEEP = "sweep.json"

# Numbers that are read by name; each may be missing or null.
NUMBERS = (
    "best_step",
    "best_validation_loss",
    "best_validation_score",
    "output_tokens_per_second",
    "tokens_per_second",
    "training_seconds",
)


def read_result(path: Path) -> dict[str, Any]:
    """Reads result.json or eval_SPLIT.json, {} where there is none.

    Raises:
      InputError: it is not what a run leaves.
    """
    try:
        found = parse_json(path)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not a result: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: not a result: takes an object")
    steps = found.get("steps")  # a list in what eval.py leaves
    rules: list[tuple[str, Any, Callable[[Any], bool], str]]
    rules = [(name, found.get(name), is_number, "a number") for name in NUMBERS]
    rules += [
        ("steps", step, is_number, "numbers")
        for step in (steps if isinstance(steps, list) else [steps])
    ]
    rules.append(("parameters", found.get("parameters"), _is_counts, "an object of numbers"))
    rules += [(name, found.get(name), _is_text, "a string") for name in ("checkpoint", "metric")]
    rules.append(("changed", found.get("changed"), _are_texts, "a list of strings"))
    for name, value, fits, takes in rules:
        if value is not None and not fits(value):
            raise InputError(f"{path}: {name} is {shown(value)}: takes {takes} or null")
    return found


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number that a table can hold; NaN and infinity are."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def sweep_table(runs: Sequence[dict[str, Any]]) -> str:
    """One line per run, as Markdown: how it ended, its best validation, how long it took."""
    lines = ["| run | | best validation | seconds |", "|---|---|---:|---:|"]
    for each in runs:
        result = each.get("result") or {}
        best = ((name, result.get(f"best_validation_{name}")) for name in ("score", "loss"))
        shown = next((f"{name} {value:.4f}" for name, value in best if value is not None), "")
        seconds = result.get("training_seconds")
        status = each["status"]
        if status == "failed":
            status = "failed: " + each["reason"].replace("|", "/")
        lines.append(
            f"| {each['name']} | {status} | {shown} | {'' if seconds is None else seconds} |"
        )
    return "\n".join(lines)


def save_sweep(workdir: Path, runs: list[dict[str, Any]]) -> None:
    """Writes sweep.json; runs of earlier sweeps in the same place stay in it."""
    path = workdir / SWEEP
    known = {each["name"]: each for each in (*read_sweep(workdir), *runs)}
    write_whole(path, json.dumps({"runs": list(known.values())}, indent=1) + "\n")


def read_sweep(workdir: Path) -> list[dict[str, Any]]:
    """The runs of sweep.json, [] where there is none.

    Raises:
      InputError: it is not what a sweep writes.
    """
    path = workdir / SWEEP
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
