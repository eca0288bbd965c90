"""GTA: grouped-tied attention, whose keys are half a value and half a rotary part."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.module import Attention, Call
from mhe_jax.attention.nearest import Heads, projected


class GroupedTiedAttention(Attention):
    """GTA: `V_g = X W[g]`, `K_g = [first half of V_g ; rope(X W_r)]`, g = ⌊hG/H⌋ for query head h.

    W_q [M, H, D]; W [M, G, D], `key_value`, for G = `num_kv_heads` groups; W_r [M, D/2], `key`, one
    for all of them; W_o [H, D, M]. With `rotary` the last half of queries and keys is rotated, that
    of keys before it is cached; the tied halves are not. With `normalize_qk` each half of a key has
    its own norm, `tied_ln` and `rotary_ln`.

    Parameters 2·M·HD + M·GD + MD/2, cached numbers per token GD + D/2. Where `inputs_v` is given,
    values are its projection by the same W; with `decode`, whose cache has one array for them and
    the tied halves, `inputs_v` is refused.

    Source: Zadouri, Strauss and Dao 2025, "Hardware-Efficient Attention for Fast Decoding", arXiv
    2505.21487.

    Raises:
      ValueError: D is odd, or `num_kv_heads` is missing or does not divide `num_heads`.
    """

    num_kv_heads: int | None = None

    kind: ClassVar[str] = "gta"
    one_source: ClassVar[bool] = True
    not_rotated: ClassVar[str | None] = "half of a key does not turn"

    def check(self, head_features: int, features: int) -> None:
        if head_features % 2:
            tied = "gta ties half of a key to its value, and a head is"
            odd = f"{head_features} wide, which is odd"
            raise ValueError(f"num_heads={self.num_heads}: {tied} {odd}")
        super().check(head_features, features)

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        half = call.head_features // 2
        tied = self.project_both("key_value", inputs_k, inputs_v, self.kv_heads, call)
        key = self._projection("key")(inputs_k, (half,), ("embed", "head_features"))
        return {**tied, "key": self.normalized("rotary_ln", key[:, :, None])}

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        state, key = memory["key_value"], memory["key"]
        tied = self.normalized("tied_ln", state[..., : key.shape[-1]])
        key = jnp.concatenate([tied, jnp.broadcast_to(key, tied.shape)], -1)
        return key, memory.get("value", state)

    def turned_features(self, head_features: int) -> int:
        return head_features // 2

    def heads(self, params: Mapping[str, Any]) -> Heads:
        heads = Heads.of(params, key="key_value", value="key_value")
        shared = np.repeat(projected(params["key"]), len(heads.key), 0)
        key = np.concatenate([heads.key[..., : shared.shape[-1]], shared], -1)
        return dataclasses.replace(heads, key=key)
