"""SKV: keys and values are one projection."""

from typing import ClassVar

import jax

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.cost import Widths
from mhe_jax.attention.module import Attention, Call


class SharedKeyValueAttention(Attention):
    """SKV: MHA in which keys and values are one projection, `K_h = V_h = X W_kv[h]`.

    W_q, W_kv [M, H, D], W_o [H, D, M]. Parameters 3M², cached numbers per token HD. Where
    `inputs_v` is given, values are its projection by the same W_kv; with `decode`, whose cache has
    one array for both, `inputs_v` is refused. With `rotary` keys are rotated as they are read from
    the cache, and values are not. Xue & Aletras 2023, section 4.
    """

    kind: ClassVar[str] = "skv"
    one_source: ClassVar[bool] = True
    turned: ClassVar[str | None] = None

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        return self.project_both("key_value", inputs_k, inputs_v, self.num_heads, call)

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        key = memory["key_value"]
        return self.normalized("key_ln", key), memory.get("value", key)

    def widths(self, head_features: int) -> Widths:
        HD = self.num_heads * head_features
        return Widths(query=HD, key=HD, value=0, cached=HD, scored=HD, weighted=HD)
