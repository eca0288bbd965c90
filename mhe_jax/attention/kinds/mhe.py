"""Multiple-head-embedding attention: one projection per role for all heads, embeddings per head."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.forms import AttentionInGroups
from mhe_jax.attention.module import Call
from mhe_jax.attention.nearest import Heads, Moments, Parameters, balance, in_groups, shared_values
from mhe_jax.attention.nearest.factors import common_factor, parafac
from mhe_jax.attention.projection import named

ROLES = "query", "key", "value"


class MultipleHeadEmbeddingAttention(AttentionInGroups):
    """MHE: `Q_h = ψ(X W_q, e_q[h])`, `K_h = ψ(X W_k, e_k[h])`, `V_h = ψ(X W_v, e_v[h])`.

    W_q, W_k, W_v [M, D] for all heads, e_q, e_k, e_v [H, D], W_o [H, D, M]. Parameters
    3MD + M² + 3HD, cached numbers per token 2D: the embeddings are applied to what is read from the
    cache. Xue & Aletras 2023, section 3. With `num_groups` G > 1, an extension that the paper does
    not have, W_q, W_k, W_v are [M, G, D] and head h reads those of group ⌊hG/H⌋: 3GMD instead of
    3MD parameters, and 2GD cached numbers.

    Attributes beyond `AttentionInGroups`:
      form: 'materialized' computes the equations as written, with H key and value heads in memory;
        'folded' moves the embeddings of keys and values to queries and outputs, so that one key and
        one value head serve all heads of a group; 'shared', only in MHE-Add, computes one score
        matrix for all heads of a group (see `mhe_jax.attention.engines.shared`).
      head_embedding_init: initializer of the head embeddings, normal(0.02) for MHE-Add and
        normal(0.5) for MHE-Mul; the paper does not give one.

    Raises:
      ValueError: 'folded' or 'shared' with `normalize_qk`, whose LayerNorm over ψ(K, e_k) differs
        from head to head, or with `rotary` (see `MHEAddAttention` and `MHEMulAttention`).
    """

    head_embedding_init: Callable = nn.initializers.normal(0.02)

    # Head embeddings are applied to what is read from the cache, and rotation comes after them.
    turned: ClassVar[str | None] = None

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """ψ: [B, T, G, D] and [H, D] to [B, T, H, D]."""
        raise NotImplementedError

    def fold_query(self, q: jax.Array, call: Call) -> jax.Array:
        """Queries of heads, in 'shared' of score groups, whose products with the key are scores."""
        raise NotImplementedError

    def fold_output(self, heads: jax.Array, weight_sum: jax.Array, e_v: jax.Array) -> jax.Array:
        """Applies e_v to the sums over the shared value, [B, T, H, D]."""
        raise NotImplementedError

    @property
    def folds(self) -> bool:
        """Whether there are forms other than 'materialized'."""
        return self.rotary is None and not self.normalize_qk

    def refusal_of(self, form: str, call: Call) -> str | None:
        if form != "materialized" and self.rotary is not None:
            return f"rotary is not possible, for {self.not_rotated}; use 'materialized' or 'auto'"
        return super().refusal_of(form, call)

    def start(self, call: Call) -> Call:
        call = super().start(call)
        # All at once, so that the draws of an initializer do not depend on the form.
        init = named(self.head_embedding_init, ("heads", "head_features"))
        shape = (self.num_heads, call.head_features)
        names = [(role, f"{role}_head_embedding") for role in ROLES]
        tables = {role: self.param(name, init, shape, self.param_dtype) for role, name in names}
        return dataclasses.replace(call, embeddings=tables)

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        q = self.project_groups("query", x, call.head_features)
        if call.form != "materialized":
            return self.fold_query(q, call)
        return self.normalized("query_ln", self.psi(q, call.embeddings["query"].astype(q.dtype)))

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array, call: Call) -> KeyValues:
        return {
            "key": self.project_groups("key", inputs_k, call.head_features),
            "value": self.project_groups("value", inputs_v, call.head_features),
        }

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        key, value = memory["key"], memory["value"]
        if call.form != "materialized":
            return key, value
        key = self.psi(key, call.embeddings["key"].astype(key.dtype))
        value = self.psi(value, call.embeddings["value"].astype(value.dtype))
        return self.normalized("key_ln", key), value

    def merge(self, heads: jax.Array, weight_sum: jax.Array, call: Call) -> jax.Array:
        if call.form != "materialized":
            e_v = call.embeddings["value"].astype(heads.dtype)
            heads = self.fold_output(heads, weight_sum, e_v)
        return self.project_out(heads, call)

    def broadcast(self, x: jax.Array, factors: jax.Array) -> jax.Array:
        """[B, T, G, D] repeated over the heads of each group, times [H, D]: [B, T, H, D]."""
        B, T, G, D = x.shape
        factors = factors.reshape(G, -1, D)
        heads = jnp.einsum("btgd,grd->btgrd", x, factors, precision=self.precision)
        return heads.reshape(B, T, self.num_heads, D)


def _tables(params: Mapping[str, Any]) -> list[np.ndarray]:
    """e_q, e_k and e_v [H, D]."""
    return [np.asarray(params[f"{role}_head_embedding"], np.float64) for role in ROLES]


class MHEAddAttention(MultipleHeadEmbeddingAttention):
    """MHE-Add: `Q_h = X W_q + e_q[h]`, `K_h = X W_k + e_k[h]`, `V_h = X W_v + e_v[h]`.

    ψ(A, e) = A + e.

    Folded: in `q·(k_j + e_k)`, e_k adds the same number for all keys j of a query, which softmax
    cancels, so e_k drops out and its gradient is 0; the weights sum to one, so e_v is added to the
    head's output (times the weight sum under dropout, 0 for a query without keys). A bias of
    keys drops out likewise (Namazifar et al. 2023, arXiv 2302.08626).

    Shared: what remains of a head's own scores is a bias on the keys, `e_q[h]·k_j / √D`, so softmax
    factors and one score matrix serves all heads. Transformer-XL (Dai et al. 2019, arXiv
    1901.02860) has such a bias, with queries and keys for each head.

    With `rotary` neither holds: with R the rotation by the distance, `(q + e_q)ᵀ R e_k` differs
    from key to key, and `e_qᵀ R k_j` from query to query. The form is `materialized`, and e_k is
    trained.

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
    not_rotated: ClassVar[str] = "what a key embedding adds then depends on the distance"

    def check(self, head_features: int, features: int) -> None:
        super().check(head_features, features)
        C, G = self.score_groups, self.num_groups
        if C > 1 and G > 1:
            raise ValueError(f"score_groups={C} does not go with num_groups={G}")

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
        wide = np.promote_types(key.dtype, jnp.float32)
        how = {"precision": self.precision, "preferred_element_type": wide}
        bias = jnp.einsum("bsgd,grd->bsgr", key, e_q, **how)
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
        e_q, _, e_v = _tables(params)
        query = heads.query
        if "query_group_embedding" in params:
            u = np.asarray(params["query_group_embedding"], np.float64)
            query = query * (1 + np.repeat(u, len(query) // len(u), 0))[:, None]
        query = np.concatenate([query[:, :-1], query[:, -1:] + e_q[:, None]], 1)
        bias = heads.bias + np.einsum("hd,hdp->p", e_v, heads.out)
        return dataclasses.replace(heads, query=query, bias=bias)

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """One form for the heads of a group, and a bias of keys, e_q[h] W_kᵀ, for each."""
        (H, D, _), G = heads.out.shape, self.num_groups
        heads, scores = in_groups(heads, moments, self.use_bias, G, D, mean=True)
        n = H // G
        kernels, keys, tables = [], [], []
        for rest, mean in zip(np.split(scores.rest, G), np.split(scores.mean, G), strict=True):
            form = rest.mean(0) * n**0.5
            key = common_factor(np.concatenate([form, mean]), D)
            found = form @ key / n**0.5
            scale = balance(found, key)
            kernel = scores.query_inverse @ (found * scale)
            tables.append(mean @ key * scale - scores.mu @ kernel)
            kernels.append(kernel)
            keys.append(scores.key_inverse @ (key / scale))
        params = shared_values(scores, G, D) | {
            "query": {"kernel": np.stack(kernels, 1) * D**0.5},
            "key": {"kernel": np.stack(keys, 1)},
            "query_head_embedding": np.concatenate(tables) * D**0.5,
        }
        if not self.use_bias:
            out = params["out"]["kernel"]
            flat = np.linalg.lstsq(out.reshape(H * D, -1).T, heads.constant, rcond=None)[0]
            params["value_head_embedding"] = flat.reshape(H, D)
        return params


class MHEMulAttention(MultipleHeadEmbeddingAttention):
    """MHE-Mul: `Q_h = X W_q ⊙ (1 + e_q[h])`, and so `K_h` and `V_h` with W_k, e_k, W_v and e_v.

    ψ(A, e) = A ⊙ (1 + e).

    Folded: `(q ⊙ (1+e_q))·(k ⊙ (1+e_k)) = (q ⊙ (1+e_q) ⊙ (1+e_k))·k`, and (1 + e_v) multiplies the
    head's output: this is multi-query attention. The paper prints only the product.

    With `rotary` a score is `(q ⊙ (1+e_q))ᵀ R (k ⊙ (1+e_k))`, with R the rotation by the distance,
    and 1 + e_k commutes with R only where the two features of each pair have the same factor: the
    form is then `materialized`.
    """

    # With factors 1 + e near 1, the heads of a short run would stay nearly the same.
    head_embedding_init: Callable = nn.initializers.normal(0.5)

    kind: ClassVar[str] = "mhe_mul"
    not_rotated: ClassVar[str] = "the factors 1 + e_k of two features that turn together differ"

    def psi(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        return self.broadcast(x, 1 + embedding)

    def fold_query(self, q: jax.Array, call: Call) -> jax.Array:
        e_q, e_k = (call.embeddings[role].astype(q.dtype) for role in ("query", "key"))
        return self.broadcast(q, (1 + e_q) * (1 + e_k))

    def fold_output(self, heads: jax.Array, weight_sum: jax.Array, e_v: jax.Array) -> jax.Array:
        return heads * (1 + e_v)[None, None]

    def heads(self, params: Mapping[str, Any]) -> Heads:
        heads = super().heads(params)
        e_q, e_k, e_v = _tables(params)
        query = heads.query * ((1 + e_q) * (1 + e_k))[:, None]
        return dataclasses.replace(heads, query=query, out=heads.out * (1 + e_v)[:, :, None])

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """Forms `W_q diag((1 + e_q[h]) (1 + e_k[h])) W_kᵀ` by PARAFAC; W_o absorbs all of e_v."""
        (H, D, _), G = heads.out.shape, self.num_groups
        heads, scores = in_groups(heads, moments, self.use_bias, G, D)
        queries, keys, factors = [], [], []
        for own in np.split(np.arange(H), G):
            found, factor, key = parafac(scores.forms[own], D)
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
