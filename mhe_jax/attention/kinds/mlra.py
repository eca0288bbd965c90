"""MLRA: multi-head low-rank attention, whose heads read several latents, a softmax for each."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.kinds.mla import MultiHeadLatentAttention
from mhe_jax.attention.module import Call


class MultiHeadLowRankAttention(MultiHeadLatentAttention):
    """MLRA: `O_h = 1/√b Σ_a softmax(Q_h K_{a,h}ᵀ / √(D + R)) V_{a,h}`, a = 0 .. b - 1, with
    `K_{a,h} = [c_i W_uk[a, h], ρ(X W_kr)]`, `V_{a,h} = c_i W_uv[a, h]` of latent c_i, one of G.

    Queries and latents are those of `MultiHeadLatentAttention`, but for a factor after each norm:
    `c_i = √(M G/r) norm_i((X W_dkv)_i)`, r/G wide, and `c' = √(M/d_q) norm(X W_dq)`. Branch a has
    the G/b latents from aG/b on, and head h reads the latent i = aG/b + ⌊h(G/b)/H⌋ in it. With
    b = G, MLRA-4, every head reads all latents; MLRA-2 is G = 4 and b = 2; b = 1 is GLA with these
    factors. W_uk `key` and W_uv `value` are [r/G, bH, D], branch after branch: a device of G reads
    one latent of the cache, (r/G + R) numbers per token.

    The factors undo what a latent's width does to variance where all matrices start at one standard
    deviation: hence `kernel_init`. The paper starts W_o at 0: `out_kernel_init`.

    Parameters `M·d_q + d_q·H(D+R) + M(r+R) + 2(b/G)rHD + HDM`, without biases and scales. Cached
    numbers per token r + R. A mask is one of heads; weights that are sown are [..., bH, T, S].

    Attributes beyond `MultiHeadLatentAttention`:
      kernel_init: normal(0.02), as in the paper.
      latent_groups: G; 4, as in the paper.
      latent_branches: b; None for G.

    Raises:
      ValueError: b does not divide G, or G/b the heads, or G does not divide r.

    Source: Liu et al. 2026, "Multi-Head Low-Rank Attention", arXiv 2603.02188.
    """

    kernel_init: Callable = nn.initializers.normal(0.02)
    latent_groups: int = 4
    latent_branches: int | None = None

    kind: ClassVar[str] = "mlra"

    def check(self, head_features: int, features: int) -> None:
        H, G, b = self.num_heads, self.latent_groups, self._branches
        if G % b or H % (G // b):
            quotient = f"their quotient num_heads={H}"
            raise ValueError(f"latent_branches={b} must divide latent_groups={G}, and {quotient}")
        super().check(head_features, features)

    def start(self, call: Call) -> Call:
        call = super().start(call)
        allowed = call.mask.allowed
        if allowed is None or allowed.shape[1] == 1:
            return call
        allowed = jnp.tile(allowed, (1, self._branches, 1, 1))
        return dataclasses.replace(call, mask=dataclasses.replace(call.mask, allowed=allowed))

    def project_out(self, heads: jax.Array, call: Call) -> jax.Array:
        b, (B, T, _, D) = self._branches, heads.shape
        summed = heads.reshape(B, T, b, self.num_heads, D).sum(2) * b**-0.5
        return super().project_out(summed, call)

    @property
    def _branches(self) -> int:
        return self.latent_branches or self.latent_groups

    @property
    def _readers(self) -> int:
        return self._branches * self.num_heads

    def _calibrated(self, c: jax.Array, inputs: int) -> jax.Array:
        return c * (inputs / c.shape[-1]) ** 0.5
