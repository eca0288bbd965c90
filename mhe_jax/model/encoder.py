"""A BERT-shaped encoder, the models that train it on text, and those with a head for labels.

All have `embeddings` and `encoder` with the same parameters, so that a pre-trained one can replace
those of another. `signatures` [..., 16] beside ids are for hashed words without a table.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention import Mask
from mhe_jax.attention.projection import Dropout, named
from mhe_jax.config import ModelConfig
from mhe_jax.config.data import PAD
from mhe_jax.model.embeddings import Embeddings, padding_mask, positions_within
from mhe_jax.model.layers import ACTIVATIONS, dense, normalization
from mhe_jax.model.stack import Stack


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
        self.encoder = Stack(c, c.num_layers)

    def encode(
        self,
        tokens: jax.Array,
        token_types: jax.Array | None = None,
        *,
        signatures: jax.Array | None = None,
        segments: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Ids [B, T], 0 for padding, to the encoder's output [B, T, M].

        For hashed words without a table, the ids are types. `segments` [B, T] keep several texts in
        a row apart, and each counts its positions from 0. With `context` token each token sees only
        itself.
        """
        mask, positions = padding_mask(tokens, self.right_padded), None
        if segments is not None:
            mask, positions = mask & Mask.segments(segments), positions_within(segments)
        if self.config.context == "token":
            mask = mask & Mask.segments(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        x = self.embeddings(
            tokens, positions, token_types, signatures=signatures, deterministic=deterministic
        )
        if self.right_padded:  # no length describes a row where padding precedes a token
            before = ((tokens[:, :-1] == PAD) & (tokens[:, 1:] != PAD)).any(1)
            x = jnp.where(before[:, None, None], jnp.nan, x)
        return self.encoder(x, mask=mask, positions=positions, deterministic=deterministic)


class ShuffleRandomClassifier(EncoderModel):
    """`logits = x W + b`, W [M, 3]: each token is original, from another position, or random.

    Parameters of the head: `head_dense`.

    Source: Xue & Aletras 2022, "HashFormers".
    """

    def setup(self):
        super().setup()
        self.head_dense = dense(self.config, None)

    def __call__(self, tokens: jax.Array, **inputs: Any) -> jax.Array:
        """Float32 logits [B, T, 3] of all `tokens` [B, T]; the arguments are those of `encode`."""
        x = self.encode(tokens, **inputs)
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
        deterministic: bool = True,
    ) -> jax.Array:
        """Float32 logits [B, P, V] at `masked_positions` [B, P] of `tokens` [B, T].

        A row with fewer than P masked tokens is filled up with any positions; their loss has weight
        0.
        """
        x = self.encode(tokens, token_types, segments=segments, deterministic=deterministic)
        x = jnp.take_along_axis(x, masked_positions[:, :, None], axis=1)
        c = self.config
        x = self.head_dense(x, (c.features,), ("embed", None))
        x = self.head_norm(ACTIVATIONS[c.activation](x))
        return self.embeddings.attend(x) + self.vocabulary_bias[None, None, :]


def _mean(x: jax.Array, where: jax.Array) -> jax.Array:
    """The mean of x [B, T, M] over T where `where` [B, T] is true; 0 if it is true nowhere."""
    inside = where.astype(x.dtype)[:, :, None]
    return jnp.sum(x * inside, axis=1) / jnp.maximum(jnp.sum(inside, axis=1), 1)


class _HeadModel(EncoderModel):
    def head(self, x: jax.Array, tokens: jax.Array, marks: jax.Array, fixed: bool) -> jax.Array:
        """The encoder's output [B, T, M] to float32 outputs; `fixed` switches dropout off."""
        raise NotImplementedError

    def __call__(
        self,
        tokens: jax.Array,
        token_types: jax.Array,
        marks: jax.Array,
        *,
        signatures: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Ids [..., T], 0 for padding, with token types and marks [..., T], to what `head` gives.

        The axes before T, such as B and choices C, are rows.
        """
        rows, flat = tokens.shape[:-1], (-1, tokens.shape[-1])
        tokens, token_types, marks = (x.reshape(flat) for x in (tokens, token_types, marks))
        if signatures is not None:
            signatures = signatures.reshape(-1, *signatures.shape[-2:])
        types = token_types if self.config.num_token_types > 1 else None
        x = self.encode(tokens, types, signatures=signatures, deterministic=deterministic)
        found = self.head(x, tokens, marks, deterministic)
        return found.reshape(*rows, *found.shape[1:])


class Classifier(_HeadModel):
    """`logits = dropout(tanh(dropout(z) W_p + b_p)) W_c + b_c`, z = [x_0; s_1; ...; s_S].

    x_0 [M] is the encoder's output at the first token (with `pooling` mean: the mean of its outputs
    where there is no padding) and s_i the mean of its outputs where `marks` is i (0 if that is
    nowhere), for S = `num_spans` spans. The logits are [B, C]. Parameters: `pooler` [(S + 1) M, M]
    and `classifier` [M, C], C = `num_classes` or 1, with biases.

    Source: Devlin et al. 2019, section 4.1; for spans Wang et al. 2019 (SuperGLUE), section 4.
    """

    def setup(self):
        super().setup()
        self.pooler = dense(self.config, None)
        self.classifier = dense(self.config, None)
        self.dropout = Dropout(self.config.dropout_rate)

    def head(self, x: jax.Array, tokens: jax.Array, marks: jax.Array, fixed: bool) -> jax.Array:
        c = self.config
        parts = [x[:, 0] if c.pooling == "first" else _mean(x, tokens != PAD)]
        parts += [_mean(x, marks == span) for span in range(1, (c.num_spans or 0) + 1)]
        z = self.dropout(jnp.concatenate(parts, axis=-1), deterministic=fixed)
        z = jnp.tanh(self.pooler(z, (c.features,), ("embed", None)))
        z = self.dropout(z, deterministic=fixed)
        logits = self.classifier(z, (c.num_classes or 1,), ("embed", None))
        return logits.astype(jnp.float32)


class Regressor(Classifier):
    """A `Classifier` with one output, a number: ids, types and marks [..., T] to numbers [...].

    Of choices [B, C, T] it is a score of each, [B, C].
    """

    def head(self, x: jax.Array, tokens: jax.Array, marks: jax.Array, fixed: bool) -> jax.Array:
        return super().head(x, tokens, marks, fixed)[:, 0]


class SpanFinder(_HeadModel):
    """`logits = x W + b`, W [M, 2]: where an answer begins and where it ends, [B, 2, T].

    Positions whose mark is 0 have the logit -1e9. Parameters: `span`.

    Source: Devlin et al. 2019, section 4.2.
    """

    def setup(self):
        super().setup()
        self.span = dense(self.config, None)

    def head(self, x: jax.Array, tokens: jax.Array, marks: jax.Array, fixed: bool) -> jax.Array:
        logits = self.span(x, (2,), ("embed", None)).astype(jnp.float32)
        logits = jnp.where((marks > 0)[:, :, None], logits, -1e9)  # a probability of 0
        return jnp.swapaxes(logits, 1, 2)
