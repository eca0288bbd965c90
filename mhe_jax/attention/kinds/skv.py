"""Kinds whose keys and values are one array: a projection in SKV, the hidden states in EL."""

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.module import Attention, Call
from mhe_jax.attention.nearest import Heads


class OneArrayAttention(Attention):
    """Attention whose keys and values are one array of the cache, `array`."""

    one_source: ClassVar[bool] = True
    turned: ClassVar[str | None] = None
    array: ClassVar[str]

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        key = memory[self.array]
        return self.normalized("key_ln", key), memory.get("value", key)


class SharedKeyValueAttention(OneArrayAttention):
    """SKV: MHA in which keys and values are one projection, `K_h = V_h = X W_kv[h]`.

    W_q, W_kv [M, H, D], W_o [H, D, M]. Parameters 3M², cached numbers per token HD. Where
    `inputs_v` is given, values are its projection by the same W_kv; with `decode`, whose cache has
    one array for both, `inputs_v` is refused. With `rotary` keys are rotated as they are read from
    the cache, and values are not. Xue & Aletras 2023, section 4; with up to 1.2 billion parameters,
    Kayyam et al. 2026, arXiv 2606.04032.
    """

    kind: ClassVar[str] = "skv"
    array: ClassVar[str] = "key_value"

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        return self.project_both("key_value", inputs_k, inputs_v, self.num_heads, call)

    def heads(self, params: Mapping[str, Any]) -> Heads:
        return Heads.of(params, key="key_value", value="key_value")


class ELAttention(OneArrayAttention):
    """EL: `K_h = V_h = X[:, hD:(h+1)D]`, the hidden states themselves, cut into H slices.

    W_q [M, H, D], W_o [H, D, M]; no key and no value projection. Parameters 2M², cached numbers per
    token HD. Keys and values must be H·D wide. Where `inputs_v` is given, its slices are the
    values; with `decode`, whose cache has one array for both, `inputs_v` is refused. With `rotary`
    keys are rotated as they are read from the cache, and values are not. Yan et al. 2021, in the
    form that Xue & Aletras 2023 count.

    Raises:
      ValueError: the width of `inputs_k` or `inputs_v` is not `qkv_features`.
    """

    kind: ClassVar[str] = "el"
    array: ClassVar[str] = "hidden"

    def check(self, head_features: int, features: int) -> None:
        super().check(head_features, features)
        if features != (width := self.num_heads * head_features):
            raise ValueError(f"qkv_features={width} must be {features}, as hidden states are wide")

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        memory = {"hidden": self._slices(inputs_k, call)}
        return memory if inputs_v is None else memory | {"value": self._slices(inputs_v, call)}

    def heads(self, params: Mapping[str, Any]) -> Heads:
        H, D, _ = params["out"]["kernel"].shape
        slices = {"kernel": np.eye(H * D).reshape(H * D, H, D)}
        return Heads.of({**params, "hidden": slices}, key="hidden", value="hidden")

    def _slices(self, x: jax.Array, call: Call) -> jax.Array:
        """[B, S, H·D] to [B, S, H, D]."""
        # Without this, XLA's partitioner gave wrong gradients of inputs that are cut into heads on
        # one side and projected on the other.
        x = nn.with_logical_constraint(x, ("batch", "length", None))
        x = x.reshape(*x.shape[:-1], self.num_heads, call.head_features)
        return x if self.dtype is None else x.astype(self.dtype)
