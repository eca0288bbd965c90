"""A BERT-shaped encoder, and the models that train it on text without labels."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention import Mask
from mhe_jax.attention.projection import named
from mhe_jax.config import ModelConfig
from mhe_jax.model.embeddings import (
    Embeddings,
    padding_mask,
    poison_inner_padding,
    positions_within,
)
from mhe_jax.model.layers import ACTIVATIONS, dense, normalization
from mhe_jax.model.stack import Encoder


class EncoderModel(nn.Module):
    """Embeddings and encoder of a model that reads a text from both sides.

    With `right_padded` the padding of each row must be at its end, as in the batches of all tasks,
    and engines may skip it; a row with other padding gives NaN. Otherwise padding may be anywhere.
    """

    config: ModelConfig
    right_padded: bool = False

    def setup(self):
        c = self.config
        self.embeddings = Embeddings(c, normalize=c.norm_position == "post")
        self.encoder = Encoder(c, c.num_layers)

    def encode(
        self,
        tokens: jax.Array,
        token_types: jax.Array | None = None,
        *,
        signatures: jax.Array | None = None,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Ids [B, T], 0 for padding, to the encoder's output [B, T, M].

        For hashed words without a table, the ids are types, with `signatures` [B, T, 16].
        `segments` [B, T] keep several texts in a row apart; `positions` [B, T] count each text from
        0 by default. With `context` token each token sees only itself.
        """
        mask = padding_mask(tokens, self.right_padded)
        if segments is not None:
            mask = mask & Mask.segments(segments)
            positions = positions_within(segments) if positions is None else positions
        if self.config.context == "token":
            mask = mask & Mask.segments(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        x = self.embeddings(
            tokens, positions, token_types, signatures=signatures, deterministic=deterministic
        )
        if self.right_padded:
            x = poison_inner_padding(x, tokens)
        return self.encoder(x, mask, positions, deterministic=deterministic)


class ShuffleRandomClassifier(EncoderModel):
    """`logits = x W + b`, W [M, 3]: each token is original, from another position, or random.

    Parameters of the head: `head_dense`.

    Source: Xue & Aletras 2022, "HashFormers".
    """

    def setup(self):
        super().setup()
        self.head_dense = dense(self.config, None)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        signatures: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Float32 logits [B, T, 3] of all `tokens` [B, T]; the arguments are those of `encode`."""
        x = self.encode(tokens, signatures=signatures, deterministic=deterministic)
        return self.head_dense(x, (3,), ("embed", None)).astype(jnp.float32)


class MaskedLanguageModel(EncoderModel):
    """`logits = norm(activation(x W + b)) · token[v] + vocabulary_bias[v]` of masked tokens.

    Only the P masked positions of a row go through the head and the vocabulary: B·P·V logits, not
    B·T·V. Parameters of the head: `head_dense`, `head_norm`, `vocabulary_bias [V]`.

    >>> model = MaskedLanguageModel(ModelConfig(vocabulary_size=11, features=16, num_layers=1))
    >>> tokens = jnp.array([[3, 4, 5, 0]])
    >>> logits, _ = model.init_with_output(jax.random.key(0), tokens, jnp.array([[1, 2]]))
    >>> logits.shape
    (1, 2, 11)
    """

    def setup(self):
        super().setup()
        c = self.config
        self.head_dense = dense(c, None)
        self.head_norm = normalization(c)
        zeros = named(nn.initializers.zeros_init(), ("vocabulary",))
        self.vocabulary_bias = self.param("vocabulary_bias", zeros, (c.padded_vocabulary_size,))

    def __call__(
        self,
        tokens: jax.Array,
        masked_positions: jax.Array,
        token_types: jax.Array | None = None,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Float32 logits [B, P, V] at `masked_positions` [B, P] of `tokens` [B, T].

        A row with fewer than P masked tokens is filled up with any positions; their loss has weight
        0.
        """
        packed = {"segments": segments, "positions": positions}
        x = self.encode(tokens, token_types, **packed, deterministic=deterministic)
        return self.predict(jnp.take_along_axis(x, masked_positions[:, :, None], axis=1))

    def predict(self, x: jax.Array) -> jax.Array:
        """Encoder output [B, P, M] to float32 logits [B, P, V]."""
        c = self.config
        x = self.head_dense(x, (c.features,), ("embed", None))
        x = self.head_norm(ACTIVATIONS[c.activation](x))
        return self.embeddings.attend(x) + self.vocabulary_bias[None, None, :]
