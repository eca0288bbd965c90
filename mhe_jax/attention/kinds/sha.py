"""SHA: single-head attention, the control for every kind whose heads share projections."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.module import Attention, Call
from mhe_jax.attention.nearest import Heads, Moments, Parameters, Scores, pair, shared_values


class SingleHeadAttention(Attention):
    """SHA: `O = softmax(X W_q (X W_k)ᵀ/√D) X W_v`, repeated H times before W_o.

    W_q, W_k, W_v [M, D], W_o [H, D, M]. Parameters 3MD + M², cached numbers per token 2D. A mask
    that differs between heads is refused: there is one head. Xue & Aletras 2023, section 2.
    """

    kind: ClassVar[str] = "sha"

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        return self.normalized("query_ln", self._project("query", x, call))

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array, call: Call) -> KeyValues:
        return {
            "key": self.normalized("key_ln", self._project("key", inputs_k, call)),
            "value": self._project("value", inputs_v, call),
        }

    def merge(self, heads: jax.Array, weight_sum: jax.Array, call: Call) -> jax.Array:
        repeated = jnp.broadcast_to(heads, (*heads.shape[:2], self.num_heads, call.head_features))
        return self.project_out(repeated, call)

    def core(self, head_features: int) -> tuple[int, int, int]:
        return head_features, head_features, 0

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """The mean of all scores, and the sum of what heads add, at width D."""
        (H, D, _), scores = heads.out.shape, Scores(heads, moments, self.use_bias)
        query, bias, key = pair(scores.forms.mean(0)[None], D, scores)
        scores.maps = scores.maps.sum(0)[None]
        found = shared_values(scores, 1, D)
        return found | {
            "query": {"kernel": query, "bias": bias},
            "key": {"kernel": key},
            "out": {"kernel": np.repeat(found["out"]["kernel"] / H, H, 0)},
        }

    def _project(self, name: str, x: jax.Array, call: Call) -> jax.Array:
        """`x W` with a kernel [M, D]: [B, T, 1, D]."""
        names = ("embed", "head_features")
        return self._projection(name)(x, (call.head_features,), names)[:, :, None]
