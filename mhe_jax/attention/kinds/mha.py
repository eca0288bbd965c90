"""MHA: multi-head attention, where each head has its own projections."""

from typing import ClassVar

from mhe_jax.attention.module import Attention


class MultiHeadAttention(Attention):
    """MHA: `Q_h = X W_q[h]`, `K_h = X W_k[h]`, `V_h = X W_v[h]`, `O_h = softmax(Q_h K_hᵀ/√D) V_h`.

    W_q, W_k, W_v [M, H, D], W_o [H, D, M]. Takes the parameters of
    `flax.linen.MultiHeadDotProductAttention` unchanged. Parameters 4M² (M = H·D, without biases),
    cached numbers per token 2HD. Vaswani et al. 2017, section 3.2.
    """

    kind: ClassVar[str] = "mha"
