"""Multi-value attention: one score matrix for all heads, and values of their own for each."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from mhe_jax.attention.forms import AttentionInForms


class MultiValueAttention(AttentionInForms):
    """MVA: `O_h = softmax(X W_q (X W_k)ᵀ / √D_s + 1·(X U)[:, h]ᵀ) X W_v[h]`. Ours, not the paper's.

    W_q, W_k [M, D_s] for all heads, with D_s = `score_features`; W_v [M, H, D]; U [M, H] a bias of
    each key for each head, `key_bias/kernel`, without which all heads had the same weights; W_o
    [H, D, M]. The mirror of multi-query attention: there values are shared, here queries and keys
    are, so that one score matrix and one exponential serve all heads. With `num_groups` G, W_q and
    W_k are [M, G, D_s] and head h reads those of group ⌊hG/H⌋.

    Parameters 2·G·M·D_s + 2·M² + MH. Cached numbers a token G·D_s + H·D + H: half of MHA's, and
    far more than MHE's 2D.

    Attributes beyond `AttentionInForms`:
      form: 'shared' (see `mhe_jax.attention.engines.shared.xla`), or 'materialized': H query and
        key heads one wider than D_s, whose last number is the bias.
      score_features: D_s; None for D.

    Raises:
      ValueError: 'shared' for a call that it cannot do, such as a mask that differs between heads.
    """

    score_features: int | None = None

    kind: ClassVar[str] = "mva"
    forms: ClassVar[tuple[str, ...]] = ("shared", "materialized")

    def queries(self, x: jax.Array) -> jax.Array:
        q = self.project_groups("query", x, self.score_features)
        q = self.normalized("query_ln", q)
        if self.resolved_form == "shared":
            return q
        # The engine divides by √(D_s + 1).
        width = q.shape[-1]
        q = self._over_heads(q) * jnp.asarray(((width + 1) / width) ** 0.5, q.dtype)
        return jnp.concatenate([q, jnp.full_like(q[..., :1], (width + 1) ** 0.5)], -1)

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array) -> dict[str, jax.Array]:
        key = self.project_groups("key", inputs_k, self.score_features)
        # No bias of the bias: it moves all scores of a head alike.
        bias = self._projection("key_bias", use_bias=False)
        return {
            "key": self.normalized("key_ln", key),
            "value": self.project_heads("value", inputs_v, self.num_heads),
            "key_bias": bias(inputs_k, (self.num_heads,), ("embed", "heads")),
        }

    def expand(self, memory: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key = memory["key"]
        if self.resolved_form == "materialized":
            bias = memory["key_bias"][..., None].astype(key.dtype)
            key = jnp.concatenate([self._over_heads(key), bias], -1)
        return key, memory["value"]

    def key_bias(self, memory: dict[str, jax.Array], key: jax.Array) -> jax.Array | None:
        return memory["key_bias"] if self.resolved_form == "shared" else None

    def _over_heads(self, x: jax.Array) -> jax.Array:
        """[B, T, G, D_s] to [B, T, H, D_s]."""
        return jnp.repeat(x, self.num_heads // self.num_groups, 2)
