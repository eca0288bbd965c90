"""MHE-Mul: head embeddings multiply the shared projections."""

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax

from mhe_jax.attention.kinds.mhe import MultipleHeadEmbeddingAttention
from mhe_jax.attention.module import Call
from mhe_jax.config import FORMS_OF_KINDS


class MHEMulAttention(MultipleHeadEmbeddingAttention):
    """MHE-Mul: ψ(A, e) = A ⊙ (1 + e).

    Folded: `(q ⊙ (1+e_q))·(k ⊙ (1+e_k)) = (q ⊙ (1+e_q) ⊙ (1+e_k))·k`, and (1 + e_v) multiplies the
    head's output: multi-query attention. The paper prints the product only; the "1 +" makes small
    embeddings a small change.
    """

    # Factors 1 + e of nearly 1 would leave the heads of a short run nearly the same.
    head_embedding_init: Callable = nn.initializers.normal(0.5)

    kind: ClassVar[str] = "mhe_mul"
    forms: ClassVar[tuple[str, ...]] = FORMS_OF_KINDS["mhe_mul"]

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        return self.broadcast(x, 1 + embedding)

    def fold_query(self, q: jax.Array, call: Call) -> jax.Array:
        e_q, e_k = (call.embeddings[role].astype(q.dtype) for role in ("query", "key"))
        return self.broadcast(q, (1 + e_q) * (1 + e_k))

    def fold_output(self, heads: jax.Array, weight_sum: jax.Array, e_v: jax.Array) -> jax.Array:
        return heads * (1 + e_v)[None, None]
