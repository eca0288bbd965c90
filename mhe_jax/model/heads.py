"""Encoders with a head for labelled examples.

The encoder is that of `MaskedLanguageModel`, `embeddings` and `encoder`, with the same parameters,
so a pre-trained one can replace it. `signatures` [..., 16] beside the ids are for hashed words
without a table.
"""

import jax
import jax.numpy as jnp

from mhe_jax.attention.dropout import Dropout
from mhe_jax.config.data import PAD
from mhe_jax.model.encoder import EncoderModel
from mhe_jax.model.layers import dense

# The logit of a position where no answer may begin or end: its probability is 0.
IMPOSSIBLE = -1e9


def _mean(x: jax.Array, where: jax.Array) -> jax.Array:
    """The mean of x [B, T, M] over T where `where` [B, T] is true; 0 if it is true nowhere."""
    inside = where.astype(x.dtype)[:, :, None]
    return jnp.sum(x * inside, axis=1) / jnp.maximum(jnp.sum(inside, axis=1), 1)


class _HeadModel(EncoderModel):
    """What all have in common: the call, and which token types the config has rows for."""

    def __call__(
        self,
        tokens: jax.Array,
        token_types: jax.Array,
        marks: jax.Array,
        *,
        signatures: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Ids [B, T], 0 for padding, with token types and marks [B, T], to what `head` returns."""
        types = token_types if self.config.num_token_types > 1 else None
        x = self.encode(tokens, types, signatures=signatures, deterministic=deterministic)
        return self.head(x, tokens, marks, deterministic)

    def head(self, x: jax.Array, tokens: jax.Array, marks: jax.Array, fixed: bool) -> jax.Array:
        """The encoder's output [B, T, M] to float32 outputs; `fixed` switches dropout off."""
        raise NotImplementedError


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

    def __call__(self, tokens, token_types, marks, *, signatures=None, deterministic=True):
        flat = (x.reshape(-1, x.shape[-1]) for x in (tokens, token_types, marks))
        if signatures is not None:
            signatures = signatures.reshape(-1, *signatures.shape[-2:])
        found = super().__call__(*flat, signatures=signatures, deterministic=deterministic)
        return found.reshape(tokens.shape[:-1])


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
        logits = jnp.where((marks > 0)[:, :, None], logits, IMPOSSIBLE)
        return jnp.swapaxes(logits, 1, 2)
