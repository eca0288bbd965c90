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
from mhe_jax.attention.kinds.collaborative import CollaborativeAttention
from mhe_jax.attention.kinds.el import ELAttention
from mhe_jax.attention.kinds.gqa import GroupedQueryAttention
from mhe_jax.attention.kinds.gta import GroupedTiedAttention
from mhe_jax.attention.kinds.mfa import MultiMatrixFactorizationAttention
from mhe_jax.attention.kinds.mha import MultiHeadAttention
from mhe_jax.attention.kinds.mhe import MultipleHeadEmbeddingAttention
from mhe_jax.attention.kinds.mhe_add import MHEAddAttention
from mhe_jax.attention.kinds.mhe_mul import MHEMulAttention
from mhe_jax.attention.kinds.mla import MultiHeadLatentAttention
from mhe_jax.attention.kinds.mqa import MultiQueryAttention
from mhe_jax.attention.kinds.mva import MultiValueAttention
from mhe_jax.attention.kinds.sha import SingleHeadAttention
from mhe_jax.attention.kinds.skv import SharedKeyValueAttention
from mhe_jax.attention.kinds.tpa import TensorProductAttention
from mhe_jax.attention.mask import Mask
from mhe_jax.attention.module import Attention
from mhe_jax.attention.rotary import Rotary
from mhe_jax.config.fields import did_you_mean, nearest

__all__ = [
    "KINDS",
    "Activations",
    "Attention",
    "CollaborativeAttention",
    "ELAttention",
    "GroupedQueryAttention",
    "GroupedTiedAttention",
    "MHEAddAttention",
    "MHEMulAttention",
    "Mask",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiMatrixFactorizationAttention",
    "MultiQueryAttention",
    "MultiValueAttention",
    "MultipleHeadEmbeddingAttention",
    "Rotary",
    "SharedKeyValueAttention",
    "SingleHeadAttention",
    "TensorProductAttention",
    "choices",
    "convert",
    "make_attention",
    "recording",
]


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
