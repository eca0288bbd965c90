"""MHE-Mul: head embeddings multiply the shared projections."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import numpy as np

from mhe_jax.attention.kinds.mhe import MultipleHeadEmbeddingAttention
from mhe_jax.attention.module import Call
from mhe_jax.attention.nearest.factors import parafac
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import (
    Moments,
    Parameters,
    Scores,
    balance,
    shared_values,
    shares_both,
)


class MHEMulAttention(MultipleHeadEmbeddingAttention):
    """MHE-Mul: `Q_h = X W_q ⊙ (1 + e_q[h])`, and so `K_h` and `V_h` with W_k, e_k, W_v and e_v.

    ψ(A, e) = A ⊙ (1 + e).

    Folded: `(q ⊙ (1+e_q))·(k ⊙ (1+e_k)) = (q ⊙ (1+e_q) ⊙ (1+e_k))·k`, and (1 + e_v) multiplies the
    head's output: this is multi-query attention. The paper prints only the product; the "1 +" makes
    small embeddings a small change.

    With `rotary` a score is `(q ⊙ (1+e_q))ᵀ R (k ⊙ (1+e_k))`, with R the rotation by the distance,
    and 1 + e_k commutes with R only where the two features of each pair have the same factor: the
    form is then `materialized`. (One key head would do if it were twice as wide, [R k, R Z k],
    where Z changes the sign of each pair's second feature: `R ((1+e_k) ⊙ k) = m ⊙ R k + d ⊙ R Z k`
    for half the sum m and half the difference d of the pair's factors.)
    """

    # With factors 1 + e near 1, the heads of a short run would stay nearly the same.
    head_embedding_init: Callable = nn.initializers.normal(0.5)

    kind: ClassVar[str] = "mhe_mul"
    not_rotated: ClassVar[str] = (
        "the factors 1 + e_k of two features that turn together differ, and do not commute with "
        "the rotation"
    )

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        return self.broadcast(x, 1 + embedding)

    def fold_query(self, q: jax.Array, call: Call) -> jax.Array:
        e_q, e_k = (call.embeddings[role].astype(q.dtype) for role in ("query", "key"))
        return self.broadcast(q, (1 + e_q) * (1 + e_k))

    def fold_output(self, heads: jax.Array, weight_sum: jax.Array, e_v: jax.Array) -> jax.Array:
        return heads * (1 + e_v)[None, None]

    def heads(self, params: Mapping[str, Any]) -> Heads:
        heads = super().heads(params)
        e_q, e_k, e_v = (
            1 + np.asarray(params[f"{role}_head_embedding"], np.float64)
            for role in ("query", "key", "value")
        )
        query = heads.query * (e_q * e_k)[:, None]
        return dataclasses.replace(heads, query=query, out=heads.out * e_v[:, :, None])

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """Forms `W_q diag((1 + e_q[h]) (1 + e_k[h])) W_kᵀ` by PARAFAC; W_o absorbs all of e_v."""
        (H, D, _), G = heads.out.shape, self.num_groups
        heads, scores = Scores.in_groups(
            heads, moments, self.use_bias, G, lambda scores: shares_both(scores, D)
        )
        queries, keys, factors = [], [], []
        for own in np.split(np.arange(H), G):
            found, factor, key, _ = parafac(scores.forms[own], D)
            scale = balance(found, key)
            queries.append(found * scale * D**0.5)
            keys.append(scores.key_inverse @ (key / scale))
            factors.append(factor)
        query, bias = scores.queries(np.stack(queries))
        return shared_values(scores, G, D) | {
            "query": {"kernel": query.swapaxes(0, 1), "bias": bias},
            "key": {"kernel": np.stack(keys, 1)},
            "query_head_embedding": np.concatenate(factors) - 1,
        }
