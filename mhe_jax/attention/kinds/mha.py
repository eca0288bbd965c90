"""Heads with their own projections: MHA, and MQA and GQA, with fewer key and value heads."""

from typing import ClassVar

from mhe_jax.attention.module import Attention
from mhe_jax.attention.nearest import Heads, Moments, Parameters, shared_heads


class MultiHeadAttention(Attention):
    """MHA: `Q_h = X W_q[h]`, `K_h = X W_k[h]`, `V_h = X W_v[h]`, `O_h = softmax(Q_h K_hᵀ/√D) V_h`.

    W_q, W_k, W_v [M, H, D], W_o [H, D, M]. Takes the parameters of
    `flax.linen.MultiHeadDotProductAttention` unchanged. Parameters 4M² (M = H·D, without biases),
    cached numbers per token 2HD. Vaswani et al. 2017, section 3.2.
    """

    kind: ClassVar[str] = "mha"

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        return shared_heads(heads, moments, self.kv_heads, self.use_bias)


class MultiQueryAttention(MultiHeadAttention):
    """MQA: MHA with H query heads, and one key and one value head for all of them.

    W_q [M, H, D], W_k, W_v [M, 1, D], W_o [H, D, M]. Parameters 2M² + 2MD, cached numbers per token
    2D. Shazeer 2019.
    """

    kind: ClassVar[str] = "mqa"

    @property
    def kv_heads(self) -> int:
        return 1


class GroupedQueryAttention(MultiHeadAttention):
    """GQA: MHA in which query head h reads key and value head ⌊hK/H⌋ of K = `num_kv_heads`.

    W_q [M, H, D], W_k, W_v [M, K, D], W_o [H, D, M]. Parameters 2M² + 2MDK, cached numbers per
    token 2KD. Ainslie et al. 2023.

    Raises:
      ValueError: `num_kv_heads` is missing or does not divide `num_heads`.
    """

    num_kv_heads: int | None = None

    kind: ClassVar[str] = "gqa"

    def check(self, head_features: int, features: int) -> None:
        if self.num_kv_heads is None:
            raise ValueError(f"num_kv_heads=None must divide num_heads={self.num_heads}")
        super().check(head_features, features)

    @property
    def kv_heads(self) -> int:
        assert self.num_kv_heads is not None  # by `check`
        return self.num_kv_heads
