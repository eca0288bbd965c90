"""A decoder over its cache, and the language model that is a decoder only."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention import Mask
from mhe_jax.config import ModelConfig
from mhe_jax.model.embeddings import Embeddings, positions_within
from mhe_jax.model.stack import Decoder


class CachedDecoder(nn.Module):
    """Has `embeddings` and a `decoder`, which goes on over the cache of `start_cache`."""

    config: ModelConfig

    @property
    def cache_batch_axis(self) -> int:
        """The axis of the rows in every leaf of the cache."""
        return int(self.config.scan_layers)

    def decode_step(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Append T ≥ 1 tokens [B, T] at `positions` [B, T]; float32 logits [B, T, V] after each.

        Needs the cache of `start_cache`, mutable. `positions` are for the embeddings only; the
        cache itself counts where it writes, and the rotary positions.
        """
        x = self.embeddings(tokens, positions)
        return self.embeddings.attend(self.decoder(x, cache="step"))


class LanguageModel(CachedDecoder):
    """`logits[t] = decoder(x_0 .. x_t) · token[v]`: what comes after each token.

    Padding is at the end of a row: no real token sees it, so it needs no mask.

    >>> model = LanguageModel(ModelConfig(vocabulary_size=11, features=16, num_layers=1))
    >>> tokens = jnp.array([[3, 4, 5]])
    >>> params = model.init(jax.random.key(0), tokens)
    >>> model.apply(params, tokens).shape
    (1, 3, 11)
    >>> _, cache = model.apply(params, 1, method="start_cache", mutable=["cache"])
    >>> step = {"method": "decode_step", "mutable": ["cache"]}
    >>> logits, cache = model.apply(params | cache, tokens, jnp.array([[0, 1, 2]]), **step)
    >>> logits.shape
    (1, 3, 11)
    """

    def setup(self):
        c = self.config
        self.embeddings = Embeddings(c)
        self.decoder = Decoder(c, c.num_layers)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Ids [B, T] to float32 logits [B, T, V] of the token after each.

        `segments` [B, T] keep several texts in a row apart; `positions` [B, T] count each text from
        0 by default.
        """
        mask = None
        if segments is not None:
            mask = Mask.segments(segments)
            positions = positions_within(segments) if positions is None else positions
        x = self.embeddings(tokens, positions, deterministic=deterministic)
        x = self.decoder(x, mask, positions=positions, deterministic=deterministic)
        return self.embeddings.attend(x)

    def start_cache(self, batch_size: int, length: int | None = None) -> None:
        """Make an empty cache of `length` positions (None: max_length); call with cache mutable."""
        c = self.config
        x = jnp.zeros((batch_size, length or c.max_length, c.features), c.dtype)
        self.decoder(x, cache="start")
