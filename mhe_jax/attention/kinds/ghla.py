"""GHLA: grouped-head latent attention, whose heads share score maps and are decoded of latents."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.module import Attention, Call


class GroupedHeadLatentAttention(Attention):
    """GHLA: `a_g = softmax(X W_q[g] (X W_k)ᵀ / √D) X W_c`, and of it the H/G heads of group g,
    `Y = (σ(X W_g) ⊙ concat_g([a_g, .., a_g] + a_g W_d[g])) W_o`.

    A group has one score map and one sum of value latents, of width d_l = `latent_features`. The
    decoder W_d makes its heads of that sum, beside e = HD / (G d_l) copies of it, and a sigmoid
    gate σ of the query's input multiplies them. With G = `num_groups` and K = `num_kv_heads`,
    whose key and latent ⌊gK/G⌋ group g reads: W_q `query` [M, G, D], W_k `key` [M, K, D], W_c
    `value` [M, K, d_l], W_d `decoder` [d_l, H, D] without a bias, heads g·H/G on being of W_d[g];
    W_g `gate` [M, H, D] and W_o [H, D, M].

    Parameters M(GD + KD + K·d_l + HD) + d_l·HD + HDM. Cached numbers per token K(D + d_l), and
    G(D + d_l) multiply-adds for each pair of query and key.

    A mask is one of maps, [..., G, T, S], and so are the weights that are sown. In the paper's code
    W_q, W_k, W_c and W_g have biases and W_o none; here `use_bias` is for all of these.

    Attributes beyond `Attention`:
      num_groups: G; None for H/4, as in the paper, where K divides that, and else K.
      num_kv_heads: K; 1, as in the paper.
      latent_features: d_l; None for 2D where H/G is even, as in the paper, and else D.

    Raises:
      ValueError: K does not divide G, G does not divide H, or e is not whole.

    Source: Sun et al. 2025, arXiv 2506.17286, where it is called GTA; `gta` here is another.
    """

    num_groups: int | None = None
    num_kv_heads: int = 1
    latent_features: int | None = None

    kind: ClassVar[str] = "ghla"
    not_linear: ClassVar[str | None] = "a gate of the query's input multiplies its heads"

    def check(self, head_features: int, features: int) -> None:
        H, K, (G, width) = self.num_heads, self.num_kv_heads, self._sizes(head_features)
        if G % K:
            raise ValueError(f"num_kv_heads={K} must divide num_groups={G}")
        super().check(head_features, features)
        if (whole := H // G * head_features) % width:
            raise ValueError(f"latent_features={width} must divide {whole}, a group's heads")

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        D = call.head_features
        return self.normalized("query_ln", self.project_heads("query", x, self._sizes(D)[0], D))

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        assert inputs_v is not None
        _, width = self._sizes(call.head_features)
        key = self.project_heads("key", inputs_k, self.kv_heads, call.head_features)
        value = self.project_heads("value", inputs_v, self.kv_heads, width)
        return {"key": self.normalized("key_ln", key), "value": value}

    def merge(self, heads: jax.Array, weight_sum: jax.Array, call: Call) -> jax.Array:
        (B, T, G, width), H, D = heads.shape, self.num_heads, call.head_features
        names = ("embed", "heads", "head_features")
        decoder = self._projection("decoder", use_bias=False).matrix((width,), (H, D), names)
        decoder = decoder.reshape(width, G, H // G * D).astype(heads.dtype)
        made = jnp.einsum("btgi,igo->btgo", heads, decoder, precision=self.precision)
        made = (made + jnp.tile(heads, made.shape[-1] // width)).reshape(B, T, H, D)
        gate = jax.nn.sigmoid(self._projection("gate")(call.inputs, (H, D), names))
        return self.project_out(gate * made, call)

    def core(self, head_features: int) -> tuple[int, int, int]:
        G, width = self._sizes(head_features)
        return G * head_features, G * width, 0

    def _sizes(self, D: int) -> tuple[int, int]:
        """G and d_l."""
        H, K = self.num_heads, self.num_kv_heads
        G = self.num_groups or (K if H % (4 * K) else H // 4)
        return G, self.latent_features or (D if H // G % 2 else 2 * D)
