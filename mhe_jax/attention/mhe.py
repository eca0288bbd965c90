"""Multiple-head-embedding attention: one projection a role for all heads, one embedding a head."""

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.base import Attention
from mhe_jax.attention.projection import named

FORMS = ("auto", "materialized", "folded")


class MultipleHeadEmbeddingAttention(Attention):
    """MHE: `Q_h = ψ(X W_q, e_q[h])`, `K_h = ψ(X W_k, e_k[h])`, `V_h = ψ(X W_v, e_v[h])`.

    W_q, W_k, W_v [M, D] for all heads, e_q, e_k, e_v [H, D], W_o [H, D, M]. Parameters
    3MD + M² + 3HD, cached numbers a token 2D: the embeddings are laid over what is read from the
    cache. Xue & Aletras 2023, section 3.

    Attributes beyond `Attention`:
      form: 'materialized' computes the equations as they stand, H key and value heads in memory;
        'folded' moves the embeddings of keys and values to queries and outputs, so that one key and
        one value head serve all heads; 'auto' takes 'folded' unless `normalize_qk` forbids it.
        Both compute the same function of the same parameters.
      head_embedding_init: initializer of the head embeddings, normal(0.02) for MHE-Add and
        normal(0.5) for MHE-Mul; the paper does not give one.

    Raises:
      ValueError: `form='folded'` with `normalize_qk`, whose LayerNorm over ψ(K, e_k) differs from
        head to head.
    """

    form: str = "auto"
    head_embedding_init: Callable = nn.initializers.normal(0.02)

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """ψ: [B, T, D] and [H, D] to [B, T, H, D]."""
        raise TypeError("ψ is defined by MHEAddAttention and MHEMulAttention")

    def fold_query(self, q: jax.Array, e_q: jax.Array, e_k: jax.Array) -> jax.Array:
        """Queries [B, T, H, D] whose products with the shared key are the scores of the form."""
        raise TypeError("the folding is defined by MHEAddAttention and MHEMulAttention")

    def fold_output(self, heads: jax.Array, kept: jax.Array, e_v: jax.Array) -> jax.Array:
        """What e_v does to the sums over the shared value, [B, T, H, D]."""
        raise TypeError("the folding is defined by MHEAddAttention and MHEMulAttention")

    @property
    def resolved_form(self) -> str:
        """'materialized' or 'folded': what this module runs as."""
        if self.form not in FORMS:
            raise ValueError(f"form={self.form!r} is not one of {', '.join(FORMS)}")
        if self.form == "folded" and self.normalize_qk:
            raise ValueError(
                "form='folded' does not allow normalize_qk: the norm of a key with its head "
                "embedding differs from head to head; use 'materialized' or 'auto'"
            )
        if self.form == "auto":
            return "materialized" if self.normalize_qk else "folded"
        return self.form

    def describe(self, engine: str) -> str:
        return f"{self.resolved_form} on {engine}"

    def queries(self, x: jax.Array) -> jax.Array:
        q = self.project_shared("query", x)
        if self.resolved_form == "materialized":
            return self.normalized("query_ln", self.psi(q, self._embedding("query", q.dtype)))
        e_q, e_k = self._embedding("query", q.dtype), self._embedding("key", q.dtype)
        return self.fold_query(q, e_q, e_k)

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array) -> dict[str, jax.Array]:
        return {
            "key": self.project_shared("key", inputs_k)[:, :, None],
            "value": self.project_shared("value", inputs_v)[:, :, None],
        }

    def expand(self, memory: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, value = memory["key"], memory["value"]
        if self.resolved_form == "folded":
            return key, value
        key = self.psi(key[:, :, 0], self._embedding("key", key.dtype))
        value = self.psi(value[:, :, 0], self._embedding("value", value.dtype))
        return self.normalized("key_ln", key), value

    def merge(self, heads: jax.Array, kept: jax.Array, features: int) -> jax.Array:
        if self.resolved_form == "folded":
            heads = self.fold_output(heads, kept, self._embedding("value", heads.dtype))
        return self.project_out(heads, features)

    def _broadcast(self, x: jax.Array, factors: jax.Array) -> jax.Array:
        """[B, T, D] laid over all heads, times [H, D]: [B, T, H, D]."""
        return jnp.einsum("btd,hd->bthd", x, factors, precision=self.precision)

    def _embedding(self, role: str, dtype) -> jax.Array:
        init = named(self.head_embedding_init, ("heads", "head_features"))
        shape = (self.num_heads, self.head_features)
        embedding = self.param(f"{role}_head_embedding", init, shape, self.param_dtype)
        return embedding.astype(dtype)


class MHEAddAttention(MultipleHeadEmbeddingAttention):
    """MHE-Add: ψ(A, e) = A + e.

    Folded: `q·(k_j + e_k)` adds to all keys j of a query the same number, which softmax cancels, so
    e_k drops out and its gradient is 0; the weights sum to one, so e_v is added to the head's
    output (times the sum of the kept weights under dropout, 0 for a query without keys).
    """

    kind: ClassVar[str] = "mhe_add"

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        return self._broadcast(x, jnp.ones_like(embedding)) + embedding[None, None]

    def fold_query(self, q: jax.Array, e_q: jax.Array, e_k: jax.Array) -> jax.Array:
        return self.psi(q, e_q)

    def fold_output(self, heads: jax.Array, kept: jax.Array, e_v: jax.Array) -> jax.Array:
        return heads + kept * e_v[None, None]


class MHEMulAttention(MultipleHeadEmbeddingAttention):
    """MHE-Mul: ψ(A, e) = A ⊙ (1 + e).

    Folded: `(q ⊙ (1+e_q))·(k ⊙ (1+e_k)) = (q ⊙ (1+e_q) ⊙ (1+e_k))·k`, and (1 + e_v) multiplies the
    head's output: multi-query attention. The paper prints the product only; the "1 +" makes small
    embeddings a small change.
    """

    # Factors 1 + e of nearly 1 would leave the heads of a short run nearly the same.
    head_embedding_init: Callable = nn.initializers.normal(0.5)

    kind: ClassVar[str] = "mhe_mul"

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        return self._broadcast(x, 1 + embedding)

    def fold_query(self, q: jax.Array, e_q: jax.Array, e_k: jax.Array) -> jax.Array:
        return self._broadcast(q, (1 + e_q) * (1 + e_k))

    def fold_output(self, heads: jax.Array, kept: jax.Array, e_v: jax.Array) -> jax.Array:
        return heads * (1 + e_v)[None, None]
