"""Multiple-head-embedding attention: one projection a role for all heads, one embedding a head."""

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.forms import AttentionInForms, Call
from mhe_jax.attention.projection import named


class MultipleHeadEmbeddingAttention(AttentionInForms):
    """MHE: `Q_h = ψ(X W_q, e_q[h])`, `K_h = ψ(X W_k, e_k[h])`, `V_h = ψ(X W_v, e_v[h])`.

    W_q, W_k, W_v [M, D] for all heads, e_q, e_k, e_v [H, D], W_o [H, D, M]. Parameters
    3MD + M² + 3HD, cached numbers a token 2D: the embeddings are laid over what is read from the
    cache. Xue & Aletras 2023, section 3. With `num_groups` G > 1, which is ours and not the
    paper's, W_q, W_k, W_v are [M, G, D] and head h reads those of group ⌊hG/H⌋: 3GMD instead of
    3MD parameters, and 2GD cached numbers.

    Attributes beyond `AttentionInForms`:
      form: 'materialized' computes the equations as they stand, H key and value heads in memory;
        'folded' moves the embeddings of keys and values to queries and outputs, so that one key and
        one value head serve all heads of a group; 'shared', of MHE-Add, computes one score matrix
        for all heads of a group (see `mhe_jax.attention.engines.shared.xla`).
      head_embedding_init: initializer of the head embeddings, normal(0.02) for MHE-Add and
        normal(0.5) for MHE-Mul; the paper does not give one.

    Raises:
      ValueError: 'folded' or 'shared' with `normalize_qk`, whose LayerNorm over ψ(K, e_k) differs
        from head to head.
    """

    head_embedding_init: Callable = nn.initializers.normal(0.02)

    forms: ClassVar[tuple[str, ...]] = ("folded", "materialized")

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """ψ: [B, T, G, D] and [H, D] to [B, T, H, D]."""
        raise TypeError("ψ is defined by MHEAddAttention and MHEMulAttention")

    def fold_query(self, q: jax.Array, e_q: jax.Array, e_k: jax.Array) -> jax.Array:
        """Queries [B, T, H, D] whose products with the shared key are the scores of the form."""
        raise TypeError("the folding is defined by MHEAddAttention and MHEMulAttention")

    def fold_output(self, heads: jax.Array, kept: jax.Array, e_v: jax.Array) -> jax.Array:
        """What e_v does to the sums over the shared value, [B, T, H, D]."""
        raise TypeError("the folding is defined by MHEAddAttention and MHEMulAttention")

    def refusal_of(self, form: str, call: Call) -> str | None:
        if form != "materialized" and self.normalize_qk:
            return (
                "normalize_qk is not possible, for the norm of a key with its head embedding "
                "differs from head to head; use 'materialized' or 'auto'"
            )
        return super().refusal_of(form, call)

    def start(self, *call) -> None:
        super().start(*call)
        # All at once, so that the draws of an initializer do not depend on the form.
        init = named(self.head_embedding_init, ("heads", "head_features"))
        shape = (self.num_heads, self.head_features)
        embeddings = {
            role: self.param(f"{role}_head_embedding", init, shape, self.param_dtype)
            for role in ("query", "key", "value")
        }
        object.__setattr__(self, "_embeddings", embeddings)

    def queries(self, x: jax.Array) -> jax.Array:
        q = self.project_groups("query", x)
        if self.resolved_form == "materialized":
            return self.normalized("query_ln", self.psi(q, self._embedding("query", q.dtype)))
        e_q, e_k = self._embedding("query", q.dtype), self._embedding("key", q.dtype)
        return self.fold_query(q, e_q, e_k)

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array) -> dict[str, jax.Array]:
        return {
            "key": self.project_groups("key", inputs_k),
            "value": self.project_groups("value", inputs_v),
        }

    def expand(self, memory: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, value = memory["key"], memory["value"]
        if self.resolved_form != "materialized":
            return key, value
        key = self.psi(key, self._embedding("key", key.dtype))
        value = self.psi(value, self._embedding("value", value.dtype))
        return self.normalized("key_ln", key), value

    def merge(self, heads: jax.Array, kept: jax.Array, features: int) -> jax.Array:
        if self.resolved_form != "materialized":
            heads = self.fold_output(heads, kept, self._embedding("value", heads.dtype))
        return self.project_out(heads, features)

    def broadcast(self, x: jax.Array, factors: jax.Array) -> jax.Array:
        """[B, T, G, D] laid over the heads of each group, times [H, D]: [B, T, H, D]."""
        B, T, G, D = x.shape
        factors = factors.reshape(G, -1, D)
        heads = jnp.einsum("btgd,grd->btgrd", x, factors, precision=self.precision)
        return heads.reshape(B, T, self.num_heads, D)

    def _embedding(self, role: str, dtype) -> jax.Array:
        """[H, D] of the role."""
        return self._embeddings[role].astype(dtype)


class MHEAddAttention(MultipleHeadEmbeddingAttention):
    """MHE-Add: ψ(A, e) = A + e.

    Folded: `q·(k_j + e_k)` adds to all keys j of a query the same number, which softmax cancels, so
    e_k drops out and its gradient is 0; the weights sum to one, so e_v is added to the head's
    output (times the sum of the kept weights under dropout, 0 for a query without keys).

    Shared: what is left of a head's own scores is a bias on the keys, `e_q[h]·k_j / √D`, so that
    softmax factors and one score matrix serves all heads.

    Attributes beyond `MultipleHeadEmbeddingAttention`:
      score_groups: C > 1 gives H/C heads each a score matrix, told apart by
        `query_group_embedding` u [C, D]: `Q_h = X W_q ⊙ (1 + u[c]) + e_q[h]`, c = ⌊hC/H⌋. Ours and
        not the paper's: CD parameters more, the same cache, C exponentials instead of one.

    Raises:
      ValueError: `score_groups` does not divide `num_heads`, or comes with `num_groups`.
    """

    score_groups: int = 1

    kind: ClassVar[str] = "mhe_add"
    forms: ClassVar[tuple[str, ...]] = ("shared", "folded", "materialized")
    shared_queries: ClassVar[int] = 32

    def start(self, *call) -> None:
        if self.score_groups < 1 or self.num_heads % self.score_groups:
            raise ValueError(
                f"score_groups={self.score_groups} must divide num_heads={self.num_heads}"
            )
        if self.score_groups > 1 and self.num_groups > 1:
            raise ValueError(
                f"score_groups={self.score_groups} does not go with num_groups={self.num_groups}"
            )
        super().start(*call)

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        return self.broadcast(x, jnp.ones_like(embedding)) + embedding[None, None]

    def fold_query(self, q: jax.Array, e_q: jax.Array, e_k: jax.Array) -> jax.Array:
        return q if self.resolved_form == "shared" else self.psi(q, e_q)

    def fold_output(self, heads: jax.Array, kept: jax.Array, e_v: jax.Array) -> jax.Array:
        return heads + kept * e_v[None, None]

    def project_groups(self, name: str, x: jax.Array, width: int | None = None) -> jax.Array:
        projected = super().project_groups(name, x, width)
        if name != "query" or self.score_groups == 1:
            return projected
        init = named(nn.initializers.normal(0.5), (None, "head_features"))
        shape = (self.score_groups, self.head_features)
        factors = self.param("query_group_embedding", init, shape, self.param_dtype)
        return projected * (1 + factors.astype(projected.dtype))[None, None]

    def expand(self, memory: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, value = super().expand(memory)
        if self.resolved_form == "shared" and self.score_groups > 1:
            shape = (*key.shape[:2], self.score_groups, key.shape[3])
            key, value = jnp.broadcast_to(key, shape), jnp.broadcast_to(value, shape)
        return key, value

    def key_bias(self, memory: dict[str, jax.Array], key: jax.Array) -> jax.Array | None:
        if self.resolved_form != "shared":
            return None
        B, S, G, D = key.shape
        e_q = self._embedding("query", key.dtype).reshape(G, -1, D)
        bias = jnp.einsum(
            "bsgd,grd->bsgr",
            key,
            e_q,
            precision=self.precision,
            preferred_element_type=jnp.promote_types(key.dtype, jnp.float32),
        )
        return bias.reshape(B, S, self.num_heads) * D**-0.5


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
        return self.broadcast(x, 1 + embedding)

    def fold_query(self, q: jax.Array, e_q: jax.Array, e_k: jax.Array) -> jax.Array:
        return self.broadcast(q, (1 + e_q) * (1 + e_k))

    def fold_output(self, heads: jax.Array, kept: jax.Array, e_v: jax.Array) -> jax.Array:
        return heads * (1 + e_v)[None, None]
