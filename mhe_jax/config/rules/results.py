"""Rules for what train.py and eval.py leave: it may be damaged, or somebody else's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mhe_jax.config import InputError
from mhe_jax.config.fields import parse_json, shown

# Numbers that are read by name; each may be missing or null.
NUMBERS = (
    "best_step",
    "best_validation_loss",
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
    steps = found.get("steps")  # of what eval.py leaves a list
    rules: list[tuple[str, Any, Callable[[Any], bool], str]]
    rules = [(name, found.get(name), is_number, "a number") for name in NUMBERS]
    rules += [
        ("steps", step, is_number, "numbers")
        for step in (steps if isinstance(steps, list) else [steps])
    ]
    rules.append(("parameters", found.get("parameters"), _is_counts, "an object of numbers"))
    rules += [(name, found.get(name), _is_text, "a text") for name in ("checkpoint", "metric")]
    for name, value, fits, takes in rules:
        if value is not None and not fits(value):
            raise InputError(f"{path}: {name} is {shown(value)}: takes {takes} or null")
    return found


def is_number(value: Any) -> bool:
    """Whether JSON has a number that a table can hold; NaN and infinity are some."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))
