"""What runs were measured under: times compare only where it is the same."""

import json
from collections.abc import Iterable
from typing import Any

from mhe_jax.report.groups import SAME_OF_ATTENTION, Section

# Fields that change the time of a step, and nothing of the attention.
CONDITIONS = (
    "data.batch_size",
    "data.tokens_per_batch",
    "data.sequence_length",
    "data.length_buckets",
    "model.max_length",
    "model.remat",
)
CONDITIONS_BELOW = "mesh."
# Those of how an attention is computed: each group may have its own, but not each of its runs.
WITHIN_A_GROUP = (*SAME_OF_ATTENTION, "kronecker.apply")


def unlike_times(section: Section, *times: str) -> str:
    """The differences between runs, beside the model, on which their times depend; "" for none.

    Args:
      times: names of values; a run that has none of them does not count.
    """
    runs = {
        group.name: [
            run for run in group.runs if any(run.value(time) is not None for time in times)
        ]
        for group in section.groups
    }
    every = [(name, run) for name, members in runs.items() for run in members]
    fields = list(every[0][1].fields) if every else []
    found = [unlike("device", [(name, run.device) for name, run in every])]
    for field in fields:
        if field in CONDITIONS or field.startswith(CONDITIONS_BELOW):
            found.append(unlike(field, [(name, run.fields.get(field)) for name, run in every]))
        elif field.endswith(WITHIN_A_GROUP):
            for members in runs.values():
                values = [(str(run.path), run.fields.get(field)) for run in members]
                found.append(unlike(field, values))
    return ", ".join(filter(None, found))


def unlike(name: str, values: Iterable[tuple[str, Any]]) -> str:
    """`name is A (as one group), B (as another)` of (group, value); "" where all are the same.

    >>> unlike("beam_size", [("mha", 5), ("sha", 1)]), unlike("beam_size", [("mha", 5), ("sha", 5)])
    ('beam_size is 5 (as mha), 1 (as sha)', '')
    """
    found = {json.dumps(value): group for group, value in values}
    told = ", ".join(f"{value} (as {group})" for value, group in found.items())
    return f"{name} is {told}" if len(found) > 1 else ""
