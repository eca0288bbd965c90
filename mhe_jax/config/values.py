"""Types of fields, tasks with what goes with each, and the error that names a wrong value."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen


class InputError(ValueError):
    """The user gave something wrong; the message is one line: what, and what is allowed."""


def not_installed(what: str, extra: str) -> InputError:
    """The error: `what` is missing, and which extra of the package has it."""
    how = f"in the clone, pip install -e '.[{extra}]' -c constraints.txt"
    return InputError(f"{what}: {how}; or the wheel of mhe_jax with [{extra}]")


# The largest float32, and the largest int32, which counts steps and numbers the places of an array.
LARGEST, MOST = (2 - 2**-23) * 2.0**127, 2**31 - 1
Name = Annotated[str, MinLen(1)]
Count = Annotated[int, Ge(1), Le(MOST)]
Natural = Annotated[int, Ge(0), Le(MOST)]
AxisSize = Annotated[int, Ge(-1), Le(MOST)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Finite = Annotated[float, Ge(-LARGEST), Le(LARGEST)]
Positive = Annotated[float, Gt(0), Le(LARGEST)]
NotNegative = Annotated[float, Ge(0), Le(LARGEST)]
# A share is less than all, a rate is also more than nothing, a part may be nothing and all.
Share = Annotated[float, Ge(0), Lt(1)]
Rate = Annotated[float, Gt(0), Lt(1)]
Part = Annotated[float, Ge(0), Le(1)]

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Engine = Literal["auto", "xla", "blocked", "cudnn", "splash", "pallas", "mosaic"]
# A hash of whole words and what embeds it, see `mhe_jax.hashformers`.
Hashing = Literal[
    "md_emb", "md_pool", "md_add", "md_proj", "lsh_emb", "lsh_pool", "lsh_add", "lsh_proj"
]
LabelledTask = Literal["classification", "regression", "multiple_choice", "span"]
TaskName = Literal["mlm", "lm", "translation", "shuffle_random", LabelledTask]
Role = Literal["encoder", "decoder", "cross"]


@dataclass(frozen=True)
class TaskFacts:
    """Which fields of a config go with a task; what it computes is in `mhe_jax/tasks`."""

    roles: tuple[Role, ...]  # of attention, that its model has
    # Items that it reads: a text, a pair of texts, or labelled examples with an official score.
    content: Literal["text", "pair", "labelled"] = "text"
    vocabulary: bool = False  # its outputs are rows of the vocabulary
    packing: bool = False  # several examples may share a row (data.packing)
    label_smoothing: bool = True  # its loss takes optimizer.label_smoothing
    stride: bool = False  # it can be scored in sliding windows (evaluation.stride)
    questions: bool = False  # its examples are questions about a context that is read in windows

    @property
    def labelled(self) -> bool:
        return self.content == "labelled"

    @property
    def is_encoder(self) -> bool:
        return self.roles == ("encoder",)

    @property
    def rows(self) -> Literal["batch_size", "row_multiple"]:
        """The field of `data` that devices and accumulated parts must divide."""
        return "row_multiple" if self.content == "pair" else "batch_size"


FACTS: dict[TaskName, TaskFacts] = {
    "mlm": TaskFacts(("encoder",), vocabulary=True, packing=True),
    "lm": TaskFacts(("decoder",), vocabulary=True, packing=True, stride=True),
    "translation": TaskFacts(
        ("encoder", "decoder", "cross"), "pair", vocabulary=True, packing=True
    ),
    "shuffle_random": TaskFacts(("encoder",)),
    "classification": TaskFacts(("encoder",), "labelled"),
    "regression": TaskFacts(("encoder",), "labelled", label_smoothing=False),
    "multiple_choice": TaskFacts(("encoder",), "labelled"),
    "span": TaskFacts(("encoder",), "labelled", label_smoothing=False, questions=True),
}
