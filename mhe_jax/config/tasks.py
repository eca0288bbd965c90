"""The tasks by name, and the facts of each that the rules of a config need. Imports no jax.

What a task computes is in `mhe_jax/tasks`.
"""

from dataclasses import dataclass
from typing import Literal

TaskName = Literal[
    "mlm",
    "lm",
    "translation",
    "shuffle_random",
    "classification",
    "regression",
    "multiple_choice",
    "span",
]
Role = Literal["encoder", "decoder", "cross"]


@dataclass(frozen=True)
class TaskFacts:
    """Which fields of a config go with a task."""

    # Roles of attention that its model has.
    roles: tuple[Role, ...]
    # Items that it reads: a text, a pair of texts, or labelled examples with an official score.
    content: Literal["text", "pair", "labelled"] = "text"
    # Its outputs are rows of the vocabulary.
    vocabulary: bool = False
    # Several examples may share a row (data.packing).
    packing: bool = False
    # Its loss takes optimizer.label_smoothing.
    label_smoothing: bool = True
    # It can be scored in sliding windows (evaluation.stride).
    stride: bool = False
    # Its examples are questions about a context that is read in windows.
    questions: bool = False

    @property
    def labelled(self) -> bool:
        """Whether its examples carry labels: what a pre-trained encoder is tuned on."""
        return self.content == "labelled"

    @property
    def is_encoder(self) -> bool:
        """Whether its model is one encoder, which another run may start from."""
        return self.roles == ("encoder",)

    @property
    def rows(self) -> Literal["batch_size", "row_multiple"]:
        """The field of `data` that devices and accumulated parts must divide."""
        return "row_multiple" if self.content == "pair" else "batch_size"


FACTS: dict[TaskName, TaskFacts] = {
    "mlm": TaskFacts(("encoder",), vocabulary=True, packing=True),
    "lm": TaskFacts(("decoder",), vocabulary=True, packing=True, stride=True),
    "translation": TaskFacts(
        ("encoder", "decoder", "cross"), content="pair", vocabulary=True, packing=True
    ),
    "shuffle_random": TaskFacts(("encoder",)),
    "classification": TaskFacts(("encoder",), content="labelled"),
    "regression": TaskFacts(("encoder",), content="labelled", label_smoothing=False),
    "multiple_choice": TaskFacts(("encoder",), content="labelled"),
    "span": TaskFacts(("encoder",), content="labelled", label_smoothing=False, questions=True),
}
