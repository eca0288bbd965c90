"""The encoder-decoder transformer for translation (Vaswani et al. 2017)."""

import jax
import jax.numpy as jnp

from mhe_jax.attention import Mask
from mhe_jax.model.embeddings import Embeddings, padding_mask, positions_within
from mhe_jax.model.encoder import EncoderModel
from mhe_jax.model.language_model import CachedDecoder
from mhe_jax.model.stack import Decoder, Encoder


class EncoderDecoder(EncoderModel, CachedDecoder):
    """`logits[t] = decoder(y_0 .. y_t, encoder(x)) · token[v]`: what comes after each target token.

    One table serves source, target and (tied) output, and one table of learned positions both
    sides: the vocabulary is joint.

    Targets here are what the decoder reads: they begin with bos, and their padding is at the end.
    Sources are read as by every `EncoderModel`, with its `right_padded`.

    >>> from mhe_jax.config import ModelConfig
    >>> model = EncoderDecoder(ModelConfig(vocabulary_size=11, features=16, num_layers=1))
    >>> sources, targets = jnp.array([[3, 4, 5, 0]]), jnp.array([[2, 7]])
    >>> params = model.init(jax.random.key(0), sources, targets)
    >>> model.apply(params, sources, targets).shape
    (1, 2, 11)
    """

    def setup(self):
        c = self.config
        self.embeddings = Embeddings(c)
        self.encoder = Encoder(c, c.num_layers)
        self.decoder = Decoder(c, c.decoder_layers, cross=True)

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
        """
        encoded = self.encode(sources, segments=source_segments, deterministic=deterministic)
        segments = {"source_segments": source_segments, "target_segments": target_segments}
        return self.decode(encoded, sources, targets, **segments, deterministic=deterministic)

    def decode(
        self,
        encoded: jax.Array,
        sources: jax.Array,
        targets: jax.Array,
        *,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Logits [B, T, V] from `encoded` [B, S, M], its ids [B, S] and target ids [B, T].

        Raises:
          ValueError: segments of one side only.
        """
        if (source_segments is None) != (target_segments is None):
            raise ValueError("source_segments and target_segments go together")
        positions = None if target_segments is None else positions_within(target_segments)
        x = self.embeddings(targets, positions, deterministic=deterministic)
        mask, seen = None, padding_mask(sources, self.right_padded)
        if source_segments is not None and target_segments is not None:
            mask = Mask.segments(target_segments)
            seen = seen & Mask.segments(target_segments, source_segments)
        x = self.decoder(x, mask, encoded, seen, positions, deterministic=deterministic)
        return self.embeddings.attend(x)

    def start_cache(self, sources: jax.Array, length: int | None = None) -> None:
        """Encode the sources [B, S] and make the decoder's cache; call with cache mutable.

        The cache of cross-attention is filled once; that of self-attention is empty, with `length`
        (None: max_length) positions.
        """
        c = self.config
        encoded = self.encode(sources)
        x = jnp.zeros((sources.shape[0], length or c.max_length, c.features), c.dtype)
        seen = padding_mask(sources, self.right_padded)
        self.decoder(x, None, encoded, seen, cache="start")
