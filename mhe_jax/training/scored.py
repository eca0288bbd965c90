"""What a validation says: ratios of sums, and official scores where examples have labels."""

import math
from collections.abc import Sequence
from typing import Any

from mhe_jax.data import EvaluationBatches
from mhe_jax.training import objective


def summarize(found: Sequence[dict[str, Any]], batches: EvaluationBatches) -> dict[str, float]:
    """Numbers of the batches of a split, from what the evaluation step gave for each."""
    totals = total(found)
    numbers = objective.ratios(totals)
    if "outputs" in found[0] and math.isfinite(numbers["loss"]):
        numbers |= batches.scores([(batch["index"], batch["outputs"]) for batch in found])
    return numbers


def total(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The sums of all batches, added in float64: a long split loses no digits."""
    names = [name for name in found[0] if name not in ("index", "outputs")]
    return {name: sum(float(batch[name]) for batch in found) for name in names}


def criterion(numbers: dict[str, float]) -> float:
    """The best checkpoint has the lowest: the loss, or minus the official score; inf for NaN."""
    found = -numbers["score"] if "score" in numbers else numbers["loss"]
    return math.inf if math.isnan(found) else found
