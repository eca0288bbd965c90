"""Attention kinds as Flax modules with the fields and the call of Flax's own.

>>> import jax, jax.numpy as jnp
>>> from mhe_jax.attention import make_attention
>>> attention = make_attention("mhe_mul", num_heads=4, use_bias=False)
>>> x = jnp.ones((2, 5, 32))
>>> variables = attention.init(jax.random.key(0), x)
>>> attention.apply(variables, x).shape
(2, 5, 32)
>>> variables["params"]["query"]["kernel"].shape
(32, 8)
"""

from typing import TYPE_CHECKING, Any

from mhe_jax.attention.conversion import Activations, convert
from mhe_jax.attention.engines import choices, recording
from mhe_jax.attention.kinds import KINDS, make_attention
from mhe_jax.attention.mask import Mask
from mhe_jax.attention.module import Attention
from mhe_jax.attention.rotary import Rotary

if TYPE_CHECKING:
    from mhe_jax.attention.models import convert_model

__all__ = [
    "KINDS",
    "Activations",
    "Attention",
    "Mask",
    "Rotary",
    "choices",
    "convert",
    "convert_model",
    "make_attention",
    "recording",
]


def __getattr__(name: str) -> Any:
    """`convert_model`, which needs NNX; or the class of a kind, such as `MultiValueAttention`."""
    if name == "convert_model":
        from mhe_jax.attention.models import convert_model

        return convert_model
    for module in KINDS.values():
        if module.__name__ == name:
            return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
