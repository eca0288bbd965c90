"""SKV: keys and values are one projection."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.cost import Widths
from mhe_jax.attention.module import Attention, Call


class SharedKeyValueAttention(Attention):
    """SKV: as MHA, and keys and values are one projection, `K_h = V_h = X W_kv[h]`.

    W_q, W_kv [M, H, D], W_o [H, D, M]. Parameters 3M², cached numbers a token HD. Where `inputs_v`
    is given, values are its projection by the same W_kv; with `decode`, whose cache has one array
    for both, it is refused. With `rotary` keys are turned as they are read from the cache, and
    values stay as they are. Xue & Aletras 2023, section 4.
    """

    kind: ClassVar[str] = "skv"
    one_source: ClassVar[bool] = True
    turned: ClassVar[str | None] = None

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        if inputs_v is None:
            return {"key_value": self.project_heads("key_value", inputs_k, self.num_heads, call)}
        if inputs_v.shape[-1] != inputs_k.shape[-1]:
            raise ValueError(
                f"skv projects keys and values by one matrix: inputs_v is {inputs_v.shape[-1]} "
                f"wide and must be as wide as inputs_k, {inputs_k.shape[-1]}"
            )
        both = jnp.concatenate([inputs_k, inputs_v], 1)
        both = self.project_heads("key_value", both, self.num_heads, call)
        key, value = jnp.split(both, 2, 1)
        return {"key_value": key, "value": value}

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        key = memory["key_value"]
        return self.normalized("key_ln", key), memory.get("value", key)

    def widths(self, head_features: int) -> Widths:
        HD = self.num_heads * head_features
        return Widths(query=HD, key=HD, value=0, cached=HD, scored=HD, weighted=HD)
