"""Tensor product attention: queries, keys and values are sums of a few products for each token."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.forms import AttentionOverCache
from mhe_jax.attention.module import Call


class TensorProductAttention(AttentionOverCache):
    """TPA: `Q_h = 1/R_q Σ_i a_i[h] b_i` with `a_i[h] = X A_q[h, i]` a number and `b_i = X B_q[i]` D
    wide for each token, and likewise `K_h` of R_k and `V_h` of R_v products.

    With R the `query_rank`, `key_rank` or `value_rank`: A [M, H, R] are `query`, `key` and `value`,
    and B [M, R, D] `query_basis`, `key_basis` and `value_basis`; W_o [H, D, M]. Parameters
    `M(R_q + R_k + R_v)(H + D) + HDM`. Cached numbers per token (R_k + R_v)(H + D): a and b of its
    keys and values. With `rotary` the b of keys are rotated before they are cached, which is the
    same as rotating the keys; with `normalize_qk`, which normalizes the keys of heads, keys are
    rotated once they are made.

    Factored: `q·K_h = 1/R_k Σ_i a_i[h] (q·b_i)` and `Σ_j w_j V_h,j = 1/R_v Σ_i Σ_j (w_j a_ij[h])
    b_ij`, exact, with fewer operations for one query over a cache.

    Attributes beyond `AttentionOverCache`:
      form: 'materialized' makes the keys and values of heads, for any engine; 'factored' is above.
      query_rank, key_rank, value_rank: R_q, R_k and R_v.

    Raises:
      ValueError: a rank below 1; 'factored' with `normalize_qk`, whose LayerNorm is over whole
        keys.

    Source: Zhang et al. 2025, "Tensor Product Attention Is All You Need", arXiv 2501.06425.
    """

    query_rank: int = 6
    key_rank: int = 2
    value_rank: int = 2

    kind: ClassVar[str] = "tpa"
    not_linear: ClassVar[str | None] = (
        "its queries, keys and values are products of two maps of its inputs"
    )

    @property
    def turned(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.normalize_qk else "key_basis"

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        return self.normalized("query_ln", self._mixed(*self._factors("query", x, call)))

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array, call: Call) -> KeyValues:
        key, key_basis = self._factors("key", inputs_k, call)
        value, value_basis = self._factors("value", inputs_v, call)
        return {"key": key, "key_basis": key_basis, "value": value, "value_basis": value_basis}

    def expand(self, memory: KeyValues, call: Call) -> tuple[Any, Any]:
        key, value = ((memory[role], memory[f"{role}_basis"]) for role in ("key", "value"))
        if call.form == "factored":
            return key, value
        return self.normalized("key_ln", self._mixed(*key)), self._mixed(*value)

    def merge(self, heads: jax.Array, weight_sum: jax.Array, call: Call) -> jax.Array:
        if call.form == "factored":
            heads = heads / self.value_rank
        return self.project_out(heads, call)

    def scale(self, call: Call) -> float:
        factor = self.key_rank if call.form == "factored" else 1
        return call.head_features**-0.5 / factor

    def core(self, head_features: int) -> tuple[int, int, int]:
        scored, weighted, made = self.core_of(self.form_of_one, head_features)
        # Queries, keys and values of heads are mixed of what the kernels make.
        return scored, weighted, self.query_rank * self.num_heads * head_features + made

    def core_of(self, form: str, head_features: int) -> tuple[int, int, int]:
        H, D, K, V = self.num_heads, head_features, self.key_rank, self.value_rank
        if form == "factored":
            return H * K * (D + 1), H * V * (D + 1), 0
        return H * D, H * D, H * (K + V) * D

    def _factors(self, role: str, x: jax.Array, call: Call) -> tuple[jax.Array, jax.Array]:
        """a [B, T, H, R] and b [B, T, R, D]."""
        rank = getattr(self, f"{role}_rank")
        a = self._projection(role)(x, (self.num_heads, rank), ("embed", "heads", "head_features"))
        names = ("embed", None, "head_features")
        return a, self._projection(f"{role}_basis")(x, (rank, call.head_features), names)

    def _mixed(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """`1/R Σ_i a_i[h] b_i`, [B, T, H, D]."""
        return jnp.einsum("bthr,btrd->bthd", a, b, precision=self.precision) / b.shape[2]
