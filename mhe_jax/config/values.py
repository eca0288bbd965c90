"""Types of the fields: numbers with their ranges, and choices.

And the error that says which value is wrong.
"""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt


class InputError(ValueError):
    """The user gave something wrong; the message is one line: what, and what is allowed."""


def not_installed(what: str, extra: str) -> InputError:
    """The error: `what` is missing, and which extra of the package has it."""
    how = f"in the clone, pip install -e '.[{extra}]' -c constraints.txt"
    return InputError(f"{what}: {how}; or the wheel of mhe_jax with [{extra}]")


# The largest float32, and the largest int32, which counts steps and numbers the places of an array.
LARGEST, MOST = (2 - 2**-23) * 2.0**127, 2**31 - 1
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
