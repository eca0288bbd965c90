"""MHE-Add: head embeddings are added to the shared projections."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.kinds.mhe import MultipleHeadEmbeddingAttention
from mhe_jax.attention.module import Call
from mhe_jax.attention.nearest.factors import common_factor, parafac, sharing, sharing_mean
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import Moments, Parameters, Scores, balance, shared_values
from mhe_jax.attention.projection import named


class MHEAddAttention(MultipleHeadEmbeddingAttention):
    """MHE-Add: `Q_h = X W_q + e_q[h]`, `K_h = X W_k + e_k[h]`, `V_h = X W_v + e_v[h]`.

    ψ(A, e) = A + e.

    Folded: in `q·(k_j + e_k)`, e_k adds the same number for all keys j of a query, which softmax
    cancels, so e_k drops out and its gradient is 0; the weights sum to one, so e_v is added to the
    head's output (times the weight sum under dropout, 0 for a query without keys).

    Shared: what remains of a head's own scores is a bias on the keys, `e_q[h]·k_j / √D`, so softmax
    factors and one score matrix serves all heads.

    With `rotary` neither holds for scores: with R the rotation by the distance, what e_k adds to a
    score, `(q + e_q)ᵀ R e_k`, differs from key to key, and `e_qᵀ R k_j` from query to query. The
    form is then `materialized`, and e_k matters and is trained.

    Attributes beyond `MultipleHeadEmbeddingAttention`:
      score_groups: C > 1 gives every H/C heads a score matrix, distinguished by
        `query_group_embedding` u [C, D]: `Q_h = X W_q ⊙ (1 + u[c]) + e_q[h]`, c = ⌊hC/H⌋. An
        extension that the paper does not have: CD more parameters, the same cache, C exponentials
        instead of one.

    Raises:
      ValueError: `score_groups` does not divide `num_heads`, or is combined with `num_groups`.
    """

    score_groups: int = 1

    kind: ClassVar[str] = "mhe_add"
    keeps_bias: ClassVar[tuple[str, ...]] = ("query", "out")
    shared_queries: ClassVar[int] = 32
    not_rotated: ClassVar[str | None] = (
        "what a key embedding adds to a score then depends on the distance, and does not cancel"
    )

    def check(self, head_features: int, features: int) -> None:
        super().check(head_features, features)
        if self.score_groups > 1 and self.num_groups > 1:
            raise ValueError(
                f"score_groups={self.score_groups} does not go with num_groups={self.num_groups}"
            )

    def untrained(self) -> tuple[str, ...]:
        """The key embedding, which softmax cancels; a norm or rotation after it makes it matter."""
        return ("key_head_embedding",) if self.folds else ()

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        return self.broadcast(x, jnp.ones_like(embedding)) + embedding[None, None]

    def fold_query(self, q: jax.Array, call: Call) -> jax.Array:
        e_q = call.embeddings["query"].astype(q.dtype)
        return q if call.form == "shared" else self.psi(q, e_q)

    def fold_output(self, heads: jax.Array, weight_sum: jax.Array, e_v: jax.Array) -> jax.Array:
        return heads + weight_sum * e_v[None, None]

    def project_groups(self, name: str, x: jax.Array, width: int) -> jax.Array:
        projected = super().project_groups(name, x, width)
        if name != "query" or self.score_groups == 1:
            return projected
        init = named(nn.initializers.normal(0.5), (None, "head_features"))
        shape = (self.score_groups, width)
        factors = self.param("query_group_embedding", init, shape, self.param_dtype)
        return projected * (1 + factors.astype(projected.dtype))[None, None]

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        key, value = super().expand(memory, call)
        if call.form == "shared" and self.score_groups > 1:
            shape = (*key.shape[:2], self.score_groups, key.shape[3])
            key, value = jnp.broadcast_to(key, shape), jnp.broadcast_to(value, shape)
        return key, value

    def score_bias(self, memory: KeyValues, key: jax.Array, call: Call) -> jax.Array | None:
        if call.form != "shared":
            return None
        B, S, G, D = key.shape
        e_q = call.embeddings["query"].astype(key.dtype).reshape(G, -1, D)
        bias = jnp.einsum(
            "bsgd,grd->bsgr",
            key,
            e_q,
            precision=self.precision,
            preferred_element_type=np.promote_types(key.dtype, jnp.float32),
        )
        return bias.reshape(B, S, self.num_heads) * D**-0.5

    def core(self, head_features: int) -> tuple[int, int, int]:
        if not self.folds:
            return super().core(head_features)
        # One score matrix per group, and H sums and H denominators.
        groups = max(self.num_groups, self.score_groups)
        return groups * head_features, self.num_heads * (head_features + 1), 0

    def heads(self, params: Mapping[str, Any]) -> Heads:
        """The key embedding is left out, since softmax cancels it."""
        heads = super().heads(params)
        e_q, e_v = (
            np.asarray(params[f"{role}_head_embedding"], np.float64) for role in ("query", "value")
        )
        query = heads.query
        if "query_group_embedding" in params:
            u = np.asarray(params["query_group_embedding"], np.float64)
            query = query * (1 + np.repeat(u, len(query) // len(u), 0))[:, None]
        query = np.concatenate([query[:, :-1], query[:, -1:] + e_q[:, None]], 1)
        bias = heads.bias + np.einsum("hd,hdp->p", e_v, heads.out)
        return dataclasses.replace(heads, query=query, bias=bias)

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """One form for the heads of a group, and a bias of keys for each: what its mean query adds.

        That bias is e_q[h] W_kᵀ. With `score_groups` the forms `W_q diag(1 + u[c]) W_kᵀ` are found
        by PARAFAC, with the biases. W_o can absorb all of e_v.
        """
        (H, D, _), G = heads.out.shape, self.num_groups
        C = max(G, self.score_groups)
        n = H // C

        def costs(scores: Scores) -> list:
            shared = [sharing_mean(scores.rest, D, float(np.sum(scores.forms**2)))]
            # Values are not shared by groups of scores.
            return shared + [sharing(scores.maps.swapaxes(1, 2), D)] * (C == G)

        heads, scores = Scores.in_groups(heads, moments, self.use_bias, C, costs)
        means = scores.rest.reshape(C, n, *scores.rest.shape[1:]).mean(1) * n**0.5
        kernels, keys, tables, factors = [], [], [], np.ones((1, D))
        for g, mean in enumerate(np.split(scores.mean, G)):
            if C == G:
                key = common_factor(np.concatenate([means[g], mean]), D)
                found, rows = means[g] @ key, mean @ key
            else:
                found, factors, key, rows = parafac(means, D, (), mean)
            scale = balance(found / n**0.5, key)
            kernel = scores.queries_about_mean(found * scale / n**0.5)
            of_heads = np.repeat(factors, len(rows) // len(factors), 0)
            tables.append(rows * scale - (scores.mu @ kernel) * of_heads)
            kernels.append(kernel)
            keys.append(scores.key_inverse @ (key / scale))
        params = shared_values(scores, G, D) | {
            "query": {"kernel": np.stack(kernels, 1) * D**0.5},
            "key": {"kernel": np.stack(keys, 1)},
            "query_head_embedding": np.concatenate(tables) * D**0.5,
            "query_group_embedding": factors - 1,
        }
        if not self.use_bias:
            out = params["out"]["kernel"]
            flat = np.linalg.lstsq(out.reshape(H * D, -1).T, heads.constant, rcond=None)[0]
            params["value_head_embedding"] = flat.reshape(H, D)
        return params
