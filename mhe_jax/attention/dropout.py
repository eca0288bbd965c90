"""Dropout of activations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines.blocks import KEPT

# Probabilities are multiples of 1 / CHANCES.
CHANCES = 2**16


class Dropout(nn.Module):
    """`x k / keep`, k = 0 with probability `rate` and 1 with keep = 1 - rate: [..., N] to the same.

    Like `flax.linen.Dropout`, with half as many random bits, 16 per number: `rate` is rounded to a
    multiple of 2^-16. k is a byte, which a scanned layer keeps for its backward pass. The random
    key is that of the stream `dropout`.

    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from
    overfitting".
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        keep = CHANCES - round(CHANCES * self.rate)
        if deterministic or keep == CHANCES:
            return x
        *rows, N = x.shape
        words = jax.random.bits(self.make_rng("dropout"), (*rows, -(-N // 2)), jnp.uint32)
        halves = jnp.concatenate([words % CHANCES, words // CHANCES], axis=-1)[..., :N]
        kept = checkpoint_name(halves < keep, KEPT)
        return jnp.where(kept, x * jnp.asarray(CHANCES / max(keep, 1), x.dtype), 0)
