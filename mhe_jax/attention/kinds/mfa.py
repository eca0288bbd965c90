"""MFA: many wide query heads from one low-rank product, over one key and one value head."""

from typing import ClassVar

import flax.linen as nn
import jax

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.module import Attention, Call
from mhe_jax.attention.projection import named


class MultiMatrixFactorizationAttention(Attention):
    """MFA: `Q_h = norm(X W_dq) W_uq[h]`, `K = X W_k`, `V = X W_v`, one key and one value head.

    W_dq [M, r], `query_latent`, r = `query_rank`; norm is RMSNorm with a scale [r],
    `query_latent_norm`; W_uq [r, H, C], `query`; W_k, W_v [M, 1, C]; W_o [H, C, M]. C is the width
    of a head, `qkv_features` / H: heads are meant to be many and wide, H·C above M. `use_bias`
    applies to W_dq, W_k, W_v and W_o; W_uq, which makes heads, has no bias.

    MFA-KR, with `reuse_keys`: `V = K + α ⊙ (K N)`, N [C, C], `key_to_value`, α [C], `value_scale`.
    Only keys are cached: α and N are applied to the output of each head. N starts at 0, where
    values are the keys, and α at 1. Where `inputs_v` is given, values are its projection by W_k;
    with `decode`, whose cache has one array for both, `inputs_v` is refused. With `normalize_qk`
    and `rotary` keys get both as they are read from the cache, and values neither.

    Parameters M(r + 2C) + rHC + HCM, for MFA-KR M(r + C) + C² + C + rHC + HCM, without biases and
    scales. Cached numbers per token 2C, for MFA-KR C.

    Source: Hu et al. 2024, "Multi-matrix Factorization Attention", arXiv 2412.19255.

    Attributes beyond `Attention`:
      query_rank: r; None for C.
      reuse_keys: MFA-KR.

    Raises:
      ValueError: `query_rank` is below 1.
    """

    query_rank: int | None = None
    reuse_keys: bool = False

    kind: ClassVar[str] = "mfa"
    not_linear: ClassVar[str | None] = "a norm lies between its inputs and its queries"

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def one_source(self) -> bool:
        return self.reuse_keys

    @property
    def turned(self) -> str | None:
        return None if self.reuse_keys else "key"

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        rank = self.query_rank or call.head_features
        latent = self._projection("query_latent")(x, (rank,), ("embed", None))
        latent = self.rms_norm("query_latent_norm")(latent)
        names = ("embed", "heads", "head_features")
        up = self._projection("query", use_bias=False)
        return self.normalized("query_ln", up(latent, (self.num_heads, call.head_features), names))

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        if not self.reuse_keys:
            return super().memory(inputs_k, inputs_v, call)
        return self.project_both("key", inputs_k, inputs_v, 1, call)

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        if not self.reuse_keys:
            return super().expand(memory, call)
        key = memory["key"]
        return self.normalized("key_ln", key), memory.get("value", key)

    def merge(self, heads: jax.Array, weight_sum: jax.Array, call: Call) -> jax.Array:
        if self.reuse_keys:
            zeros, width = nn.initializers.zeros_init(), (call.head_features,)
            to_value = self._projection("key_to_value", kernel_init=zeros, use_bias=False)
            rest = to_value(heads, width, (None, "head_features"))
            init = named(nn.initializers.ones_init(), ("head_features",))
            alpha = self.param("value_scale", init, width, self.param_dtype)
            heads = heads + rest * alpha.astype(rest.dtype)[None, None, None]
        return self.project_out(heads, call)

    def core(self, head_features: int) -> tuple[int, int, int]:
        scored, weighted, _ = super().core(head_features)
        # N multiplies the output of each head.
        return scored, weighted, (self.num_heads - 1) * head_features**2 * self.reuse_keys
