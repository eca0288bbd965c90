"""SKV: keys and values are one projection."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.module import Attention, Call
from mhe_jax.attention.nearest.factors import common_factor
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import Moments, Parameters, Scores, last, norm


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

    def heads(self, params: Mapping[str, Any]) -> Heads:
        return Heads.of(params, key="key_value", value="key_value")

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """For each head, the best common columns of keys and values, both counted alike."""
        D = heads.out.shape[1]
        moments = dataclasses.replace(moments, key=moments.value)
        scores = Scores(heads, moments, self.use_bias)
        U = np.stack(
            [
                common_factor(np.concatenate([form / norm(form), added.T / norm(added)]), D)
                for form, added in zip(scores.forms, scores.maps, strict=True)
            ]
        )
        query, bias = scores.queries(scores.forms @ U * D**0.5)
        return {
            "query": {"kernel": last(query), "bias": bias},
            "key_value": {"kernel": last(scores.key_inverse @ U)},
            "out": {"kernel": U.swapaxes(1, 2) @ scores.maps},
        }
