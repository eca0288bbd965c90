"""GQA: grouped-query attention, fewer key and value heads than query heads."""

from typing import ClassVar

from mhe_jax.attention.module import Attention


class GroupedQueryAttention(Attention):
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
