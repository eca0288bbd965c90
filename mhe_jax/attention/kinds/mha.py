"""Heads with their own projections: MHA, and MQA and GQA, with fewer key and value heads."""

from typing import ClassVar

from mhe_jax.attention.module import Attention
from mhe_jax.attention.nearest import Heads, Moments, Parameters, shared_heads


class MultiHeadAttention(Attention):
    """MHA: `Q_h = X W_q[h]`, `K_h = X W_k[h]`, `V_h = X W_v[h]`, `O_h = softmax(Q_h K_hᵀ/√D) V_h`.

    W_q, W_k, W_v [M, H, D], W_o [H, D, M]. Takes the parameters of
    `flax.linen.MultiHeadDotProductAttention` unchanged. Parameters 4M² (M = H·D, without biases),
    cached numbers per token 2HD. Vaswani et al. 2017, section 3.2.

    With `score_features` HS, W_q and W_k are [M, H, S], and scores are over √S: parameters
    2M·HS + 2M², cached numbers per token HS + HD.

    Attributes beyond `Attention`:
      score_features: HS, the width of the queries of all heads together; None for HD.

    Raises:
      ValueError: `score_features` is not a multiple of `num_heads`.
    """

    score_features: int | None = None

    kind: ClassVar[str] = "mha"
    turned_by: ClassVar[str] = "score_features"

    def check(self, head_features: int, features: int) -> None:
        if (width := self.score_features) and width % self.num_heads:
            wanted = f"must be a multiple of num_heads={self.num_heads}"
            raise ValueError(f"score_features={width} {wanted}")
        super().check(head_features, features)

    @property
    def not_rotated(self) -> str | None:
        return "queries and keys have a width of their own" if self.score_features else None

    def scored_features(self, head_features: int) -> int:
        return (self.score_features or 0) // self.num_heads or head_features

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        width = self.scored_features(heads.out.shape[1])
        return shared_heads(heads, moments, self.kv_heads, width, self.use_bias)


class MultiQueryAttention(MultiHeadAttention):
    """MQA: MHA with H query heads, and one key and one value head for all of them.

    W_q [M, H, D], W_k, W_v [M, 1, D], W_o [H, D, M]. Parameters 2M² + 2MD, cached numbers per token
    2D. `score_features` HS is as in MHA: W_q [M, H, S], W_k [M, 1, S]. Shazeer 2019.
    """

    kind: ClassVar[str] = "mqa"

    @property
    def kv_heads(self) -> int:
        return 1


class GroupedQueryAttention(MultiHeadAttention):
    """GQA: MHA in which query head h reads key and value head ⌊hK/H⌋ of K = `num_kv_heads`.

    W_q [M, H, D], W_k, W_v [M, K, D], W_o [H, D, M]. Parameters 2M² + 2MDK, cached numbers per
    token 2KD. `score_features` HS is as in MHA: W_q [M, H, S], W_k [M, K, S]. Ainslie et al. 2023.

    Raises:
      ValueError: `num_kv_heads` is missing or does not divide `num_heads`.
    """

    num_kv_heads: int | None = None

    kind: ClassVar[str] = "gqa"
