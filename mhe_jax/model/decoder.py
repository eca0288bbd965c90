"""Models with a decoder: the language model, and the encoder-decoder for translation."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention import Mask
from mhe_jax.config import ModelConfig
from mhe_jax.model.embeddings import Embeddings, padding_mask, positions_within
from mhe_jax.model.encoder import EncoderModel
from mhe_jax.model.stack import Stack


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

    def _start(self, rows: int, length: int | None, **seen: Any) -> None:
        c = self.config
        x = jnp.zeros((rows, length or c.max_length, c.features), c.dtype)
        self.decoder(x, cache="start", **seen)


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
        self.decoder = Stack(c, c.num_layers, "decoder")

    def __call__(
        self, tokens: jax.Array, *, segments: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """Ids [B, T] to float32 logits [B, T, V] of the token after each.

        `segments` [B, T] keep several texts in a row apart, and each counts its positions from 0.
        """
        mask = positions = None
        if segments is not None:
            mask, positions = Mask.segments(segments), positions_within(segments)
        x = self.embeddings(tokens, positions, deterministic=deterministic)
        x = self.decoder(x, mask=mask, positions=positions, deterministic=deterministic)
        return self.embeddings.attend(x)

    def start_cache(self, batch_size: int, length: int | None = None) -> None:
        """Make an empty cache of `length` positions (None: max_length); call with cache mutable."""
        self._start(batch_size, length)


class EncoderDecoder(EncoderModel, CachedDecoder):
    """`logits[t] = decoder(y_0 .. y_t, encoder(x)) · token[v]`: what comes after each target token.

    The transformer of Vaswani et al. 2017.

    One table serves source, target and (tied) output, and one table of learned positions both
    sides: the vocabulary is joint.

    Targets here are what the decoder reads: they begin with bos, and their padding is at the end.
    Sources are read as by every `EncoderModel`, with its `right_padded`.

    >>> model = EncoderDecoder(ModelConfig(vocabulary_size=11, features=16, num_layers=1))
    >>> sources, targets = jnp.array([[3, 4, 5, 0]]), jnp.array([[2, 7]])
    >>> params = model.init(jax.random.key(0), sources, targets)
    >>> model.apply(params, sources, targets).shape
    (1, 2, 11)
    """

    def setup(self):
        c = self.config
        self.embeddings = Embeddings(c)
        self.encoder = Stack(c, c.num_layers)
        self.decoder = Stack(c, c.decoder_layers, "decoder", cross=True)

    def __call__(
        self,
        sources: jax.Array,
        targets: jax.Array,
        *,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Source ids [B, S], 0 for padding, and target ids [B, T] to float32 logits [B, T, V].

        Where a row holds several pairs, `source_segments` [B, S] and `target_segments` [B, T] give
        both sides of a pair the same number: each pair counts its positions from 0 and sees only
        itself.

        Raises:
          ValueError: segments of one side only.
        """
        if (source_segments is None) != (target_segments is None):
            raise ValueError("source_segments and target_segments go together")
        encoded = self.encode(sources, segments=source_segments, deterministic=deterministic)
        mask = positions = None
        seen = padding_mask(sources, self.right_padded)
        if source_segments is not None and target_segments is not None:
            mask, positions = Mask.segments(target_segments), positions_within(target_segments)
            seen = seen & Mask.segments(target_segments, source_segments)
        x = self.embeddings(targets, positions, deterministic=deterministic)
        x = self.decoder(
            x,
            mask=mask,
            encoded=encoded,
            encoded_mask=seen,
            positions=positions,
            deterministic=deterministic,
        )
        return self.embeddings.attend(x)

    def start_cache(self, sources: jax.Array, length: int | None = None) -> None:
        """Encode the sources [B, S] and make the decoder's cache; call with cache mutable.

        The cache of cross-attention is filled once; that of self-attention is empty, with `length`
        (None: max_length) positions.
        """
        seen = padding_mask(sources, self.right_padded)
        self._start(sources.shape[0], length, encoded=self.encode(sources), encoded_mask=seen)
