"""The kinds that MHE is compared with: MHA, SHA, MQA, GQA, SKV and EL-attention."""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.module import Attention


class MultiHeadAttention(Attention):
    """MHA: `Q_h = X W_q[h]`, `K_h = X W_k[h]`, `V_h = X W_v[h]`, `O_h = softmax(Q_h K_hᵀ/√D) V_h`.

    W_q, W_k, W_v [M, H, D], W_o [H, D, M]. Takes the parameters of
    `flax.linen.MultiHeadDotProductAttention` unchanged. Parameters 4M² (M = H·D, without biases),
    cached numbers a token 2HD. Vaswani et al. 2017, section 3.2.
    """

    kind: ClassVar[str] = "mha"


class SingleHeadAttention(Attention):
    """SHA: `O = softmax(X W_q (X W_k)ᵀ/√D) X W_v`, repeated H times before W_o.

    W_q, W_k, W_v [M, D], W_o [H, D, M]. Parameters 3MD + M², cached numbers a token 2D. A mask that
    differs between heads is refused: there is one head. Xue & Aletras 2023, section 2.
    """

    kind: ClassVar[str] = "sha"

    def queries(self, x: jax.Array) -> jax.Array:
        return self.normalized("query_ln", self.project_shared("query", x)[:, :, None])

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array) -> dict[str, jax.Array]:
        key = self.project_shared("key", inputs_k)[:, :, None]
        return {
            "key": self.normalized("key_ln", key),
            "value": self.project_shared("value", inputs_v)[:, :, None],
        }

    def merge(self, heads: jax.Array, kept: jax.Array, features: int) -> jax.Array:
        repeated = jnp.broadcast_to(heads, (*heads.shape[:2], self.num_heads, self.head_features))
        return self.project_out(repeated, features)


class GroupedQueryAttention(Attention):
    """GQA: as MHA, and query head h reads key and value head ⌊hK/H⌋ of K = `num_kv_heads`.

    W_q [M, H, D], W_k, W_v [M, K, D], W_o [H, D, M]. Parameters 2M² + 2MDK, cached numbers a token
    2KD. Ainslie et al. 2023.

    Raises:
      ValueError: `num_kv_heads` is missing or does not divide `num_heads`.
    """

    num_kv_heads: int | None = None

    kind: ClassVar[str] = "gqa"

    @property
    def kv_heads(self) -> int:
        if not self.num_kv_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        return self.num_kv_heads


class MultiQueryAttention(Attention):
    """MQA: as MHA with H query heads, and one key and one value head for all of them.

    W_q [M, H, D], W_k, W_v [M, 1, D], W_o [H, D, M]. Parameters 2M² + 2MD, cached numbers a token
    2D. Shazeer 2019.
    """

    kind: ClassVar[str] = "mqa"

    @property
    def kv_heads(self) -> int:
        return 1


class SharedKeyValueAttention(Attention):
    """SKV: as MHA, and keys and values are one projection, `K_h = V_h = X W_kv[h]`.

    W_q, W_kv [M, H, D], W_o [H, D, M]. Parameters 3M², cached numbers a token HD. Where `inputs_v`
    is given, values are its projection by the same W_kv; with `decode`, whose cache has one array
    for both, it is refused. Xue & Aletras 2023, section 4.
    """

    kind: ClassVar[str] = "skv"
    one_source: ClassVar[bool] = True

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None) -> dict[str, jax.Array]:
        if inputs_v is None:
            return {"key_value": self.project_heads("key_value", inputs_k, self.num_heads)}
        if inputs_v.shape[-1] != inputs_k.shape[-1]:
            raise ValueError(
                f"skv projects keys and values by one matrix: inputs_v is {inputs_v.shape[-1]} "
                f"wide and must be as wide as inputs_k, {inputs_k.shape[-1]}"
            )
        both = jnp.concatenate([inputs_k, inputs_v], 1)
        key, value = jnp.split(self.project_heads("key_value", both, self.num_heads), 2, 1)
        return {"key_value": key, "value": value}

    def expand(self, memory: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key = memory["key_value"]
        return self.normalized("key_ln", key), memory.get("value", key)


class ELAttention(Attention):
    """EL: `K_h = V_h = X[:, hD:(h+1)D]`, the hidden states themselves, cut into H slices.

    W_q [M, H, D], W_o [H, D, M]; no key and no value projection. Parameters 2M², cached numbers a
    token HD. Keys and values must be H·D wide. Where `inputs_v` is given, its slices are the
    values; with `decode`, whose cache has one array for both, it is refused.
    Yan et al. 2021, in the form that Xue & Aletras 2023 count.

    Raises:
      ValueError: the width of `inputs_k` or `inputs_v` is not `qkv_features`.
    """

    kind: ClassVar[str] = "el"
    one_source: ClassVar[bool] = True

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None) -> dict[str, jax.Array]:
        memory = {"hidden": self._slices(inputs_k)}
        return memory if inputs_v is None else memory | {"value": self._slices(inputs_v)}

    def expand(self, memory: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden = memory["hidden"]
        return self.normalized("key_ln", hidden), memory.get("value", hidden)

    def _slices(self, x: jax.Array) -> jax.Array:
        """[B, S, H·D] to [B, S, H, D]."""
        width = self.num_heads * self.head_features
        if x.shape[-1] != width:
            raise ValueError(
                f"el cuts the hidden states into heads: their width {x.shape[-1]} must be "
                f"qkv_features={width}"
            )
        # Without this, XLA's partitioner gave wrong gradients of inputs that are cut into heads on
        # one side and projected on the other.
        x = nn.with_logical_constraint(x, ("batch", "length", None))
        x = x.reshape(*x.shape[:-1], self.num_heads, self.head_features)
        return x if self.dtype is None else x.astype(self.dtype)
