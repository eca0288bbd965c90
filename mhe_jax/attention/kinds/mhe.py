"""Multiple-head-embedding attention: one projection per role for all heads, embeddings per head."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.forms import AttentionInGroups
from mhe_jax.attention.module import Call
from mhe_jax.attention.projection import named


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
        matrix for all heads of a group (see `mhe_jax.attention.engines.shared.xla`).
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
        raise TypeError("ψ is defined by MHEAddAttention and MHEMulAttention")

    def fold_query(self, q: jax.Array, call: Call) -> jax.Array:
        """Queries [B, T, H, D] whose products with the shared key are the scores of the form.

        `shared` has one for each score group instead of each head.
        """
        raise TypeError("the folding is defined by MHEAddAttention and MHEMulAttention")

    def fold_output(self, heads: jax.Array, weight_sum: jax.Array, e_v: jax.Array) -> jax.Array:
        """Applies e_v to the sums over the shared value, [B, T, H, D]."""
        raise TypeError("the folding is defined by MHEAddAttention and MHEMulAttention")

    @property
    def folds(self) -> bool:
        """Whether there are forms other than 'materialized'."""
        return self.rotary is None and not self.normalize_qk

    def refusal_of(self, form: str, call: Call) -> str | None:
        if form != "materialized" and not self.folds:
            reason = (
                "normalize_qk is not possible, for the norm of a key with its head embedding "
                "differs from head to head"
                if self.normalize_qk
                else f"rotary is not possible, for {self.not_rotated}"
            )
            return f"{reason}; use 'materialized' or 'auto'"
        return super().refusal_of(form, call)

    def start(self, call: Call) -> Call:
        call = super().start(call)
        # All at once, so that the draws of an initializer do not depend on the form.
        init = named(self.head_embedding_init, ("heads", "head_features"))
        shape = (self.num_heads, call.head_features)
        embeddings = {
            role: self.param(f"{role}_head_embedding", init, shape, self.param_dtype)
            for role in ("query", "key", "value")
        }
        return dataclasses.replace(call, embeddings=embeddings)

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        q = self.project_groups("query", x, call.head_features)
        if call.form == "materialized":
            e_q = call.embeddings["query"].astype(q.dtype)
            return self.normalized("query_ln", self.psi(q, e_q))
        return self.fold_query(q, call)

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
