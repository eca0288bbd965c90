"""The fields and inputs of Flax's attention module: each is honoured or refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention import engines

# Endings of fields that are refused: an engine computes the softmax, `projection` the projections.
_REFUSED = ("attention_fn", "dot_general", "_cls")
# Endings of fields that are numbers of something: 1 or more.
_COUNTS = ("_heads", "_features", "_groups", "_branches", "_rank")


class FlaxFields(nn.Module):
    """The fields of `flax.linen.MultiHeadDotProductAttention`, with its defaults."""

    num_heads: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool | str = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Any = None
    kernel_init: Callable = nn.linear.default_kernel_init
    out_kernel_init: Callable | None = None
    bias_init: Callable = nn.initializers.zeros_init()
    out_bias_init: Callable | None = None
    use_bias: bool = True
    attention_fn: Any = None
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    qkv_dot_general: Any = None
    out_dot_general: Any = None
    qkv_dot_general_cls: Any = None
    out_dot_general_cls: Any = None
    qk_attn_weights_einsum_cls: Any = None
    attn_weights_value_einsum_cls: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name.endswith(_REFUSED) and value is not None:
                why = "`engine` names what computes the softmax, and `projection` what projects"
                raise ValueError(f"{type(self).__name__}: {name} is refused: {why}")
            if name.endswith(_COUNTS) and not (value is None and field.default is None):
                number: Any = 0 if isinstance(value, bool) else value
                if not hasattr(number, "__index__") or number < 1:
                    raise ValueError(f"{name}={value!r} must be a whole number of 1 or more")
        if (given := self.broadcast_dropout) not in (True, False, "batch"):
            raise ValueError(f"broadcast_dropout={given!r} is not one of True, False, 'batch'")
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"dropout_rate={self.dropout_rate} is not in [0, 1)")
        super().__post_init__()

    def width(self, features: int, fill: bool) -> int:
        """H·D of a call whose queries (to `fill` the cache, keys) are made from so wide inputs."""
        width = self.qkv_features or features
        if fill and not self.qkv_features and "out" in self.variables.get("params", {}):
            # There are no queries: `out` [H, D, M] tells their width.
            kernel = self.variables["params"]["out"]["kernel"]
            width = self.num_heads * nn.meta.unbox(kernel).shape[-2]
        if width % self.num_heads:
            whose = "" if self.qkv_features else ", the width of the inputs,"
            wanted = f"must be a multiple of num_heads={self.num_heads}"
            raise ValueError(f"qkv_features={width}{whose} {wanted}")
        return width

    def options(self, dropout, sow: bool, batch) -> engines.Options:
        """What they ask of an engine, for inputs of these batch axes."""
        (deterministic, dropout_rng), rate = dropout, self.dropout_rate
        if rate > 0 and nn.merge_param("deterministic", self.deterministic, deterministic):
            rate = 0.0
        if rate > 0 and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        if rate > 0 and not jnp.issubdtype(dropout_rng.dtype, jax.dtypes.prng_key):
            # An old key is an array of numbers, of which engines could not tell what a mesh splits.
            dropout_rng = jax.random.wrap_key_data(dropout_rng)

        def sow_weights(weights):
            weights = weights.reshape(*batch, *weights.shape[1:])
            self.sow("intermediates", "attention_weights", weights)

        shared = self.broadcast_dropout
        return engines.Options(
            dropout_rate=rate,
            dropout_rng=dropout_rng,
            # 0 and NumPy's False equal False, but are not identical to it.
            broadcast_dropout="batch" if shared == "batch" else bool(shared),
            precision=self.precision,
            float32_softmax=self.force_fp32_for_softmax,
            sow=sow_weights if sow else None,
        )


def check_shapes(query, key, value) -> None:
    """Raises ValueError where inputs do not fit one another."""
    shapes = [np.shape(x) for x in (query, key, value) if x is not None]
    alike = all(len(shape) > 1 and shape[:-2] == shapes[0][:-2] for shape in shapes)
    if not alike or (value is not None and value.shape[-2] != key.shape[-2]):
        raise ValueError(
            f"inputs_q, inputs_k, inputs_v have shapes {', '.join(map(str, shapes))}: must be "
            "[..., T, M], [..., S, M'] and [..., S, M''] with the same leading axes; a mask is "
            "passed as mask=..."
        )
