"""MQA: multi-query attention, one key and one value head."""

from typing import ClassVar

from mhe_jax.attention.module import Attention


class MultiQueryAttention(Attention):
    """MQA: MHA with H query heads, and one key and one value head for all of them.

    W_q [M, H, D], W_k, W_v [M, 1, D], W_o [H, D, M]. Parameters 2M² + 2MD, cached numbers per token
    2D. Shazeer 2019.
    """

    kind: ClassVar[str] = "mqa"

    @property
    def kv_heads(self) -> int:
        return 1
