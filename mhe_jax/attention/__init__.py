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

import dataclasses

from mhe_jax.attention.conversion import Activations, convert
from mhe_jax.attention.engines import choices, recording
from mhe_jax.attention.kinds import KINDS
from mhe_jax.attention.mask import Mask
from mhe_jax.attention.module import Attention
from mhe_jax.attention.rotary import Rotary
from mhe_jax.config.fields import did_you_mean, nearest

__all__ = [
    "KINDS",
    "Activations",
    "Attention",
    "Mask",
    "Rotary",
    "choices",
    "convert",
    "make_attention",
    "recording",
]


def __getattr__(name: str) -> type[Attention]:
    """The class of a kind, such as `MultiValueAttention`."""
    for module in KINDS.values():
        if module.__name__ == name:
            return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_attention(kind: str, **fields) -> Attention:
    """The module of `kind`, with `fields` as in `flax.linen.MultiHeadDotProductAttention`.

    Raises:
      ValueError: an unknown kind, or a field that the kind does not have.
    """
    if kind not in KINDS:
        near = did_you_mean(nearest(str(kind), list(KINDS)))
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}{near}")
    allowed = {f.name for f in dataclasses.fields(KINDS[kind]) if f.init}
    for field in fields:
        if field not in allowed:
            owners = [k for k, m in KINDS.items() if field in m.__dataclass_fields__]
            whose = f"it belongs to {', '.join(owners)}" if owners else "no module has it"
            near = did_you_mean(() if owners else nearest(field, sorted(allowed)))
            raise ValueError(f"{kind} has no field {field!r}; {whose}{near}")
    return KINDS[kind](**fields)
