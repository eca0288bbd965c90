"""Token ids to the first activations, and the last activations to logits."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from mhe_jax.attention import Mask
from mhe_jax.attention.projection import Dropout, named
from mhe_jax.config import ModelConfig
from mhe_jax.config.data import PAD
from mhe_jax.hashformers import BYTES
from mhe_jax.hashformers.embeddings import HashEmbedding
from mhe_jax.model.layers import normalization
from mhe_jax.shapeshifter import KroneckerEmbed


def sinusoids(positions: jax.Array, features: int) -> jax.Array:
    """`[sin(p ω_i), cos(p ω_i)]`, `ω_i = 10000^(-i/(n-1))`, i < n = M/2, in float32.

    Positions [B, T] to [B, T, M].

    Sines come before cosines, while Vaswani et al. 2017 (section 3.5) interleave them: it is the
    same function up to the order of the features.
    """
    half = features // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angles = positions[..., None].astype(jnp.float32) * rates[None, None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def positions_within(segments: jax.Array) -> jax.Array:
    """Positions [B, T] that count each run of equal `segments` [B, T] from 0."""
    positions = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    begins = jnp.diff(segments, axis=1, prepend=-1) != 0
    return positions - jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)


def padding_mask(tokens: jax.Array, right_padded: bool) -> Mask:
    """Which of the `tokens` [B, T] are keys: those that are not padding."""
    exists = tokens != PAD
    if not right_padded:
        return Mask.padding(exists)
    # Kernels skip the keys past a length; they compare other padding key by key, and cuDNN takes it
    # as a bias for every pair of positions.
    ends = jnp.arange(1, tokens.shape[1] + 1)[None]
    return Mask.lengths(jnp.where(exists, ends, 0).max(1, initial=0))


class Embeddings(nn.Module):
    """`x[b, t] = √M (token[id] + position[p] + type[s])`; sinusoidal positions are added unscaled,
    and rotary ones are applied in attention instead.

    One rule for all tasks (Vaswani et al. 2017, section 3.4): tables are drawn from
    normal(0, 1/√M), looked-up rows are multiplied by √M, and the tied logits `x · token[v]` are
    not. So activations start at unit variance per table, and logits of a normalised x at unit
    variance too. BERT's normal(0, 0.02) with a LayerNorm after it gives the first layer the same.

    With `vocabulary_multiple`, V in these shapes is rounded up to a multiple of it, and logits past
    the vocabulary are -inf, like those of `absent_tokens`: softmax gives them 0, and argmax never
    finds them.

    Parameters: `token [V, M]`; `position [max_length, M]` (learned); `type [num_token_types, M]`;
    `output [M, V]` (untied), which with `kronecker.embedding` is a `KroneckerEmbed`, as is `token`;
    `vocabulary_bias [V]` (`output_bias`). For hashed words without a table, `token` is a
    `HashEmbedding`, and there are no logits. With `normalize` a norm follows, `norm`. Dropout comes
    last.

    A position past the end of a learned table, or an id past the vocabulary, gives NaN; it is never
    clamped.
    """

    config: ModelConfig
    normalize: bool = False

    def setup(self):
        c = self.config
        V, M, terms = c.padded_vocabulary_size, c.features, c.kronecker.embedding or 0
        normal, lecun = nn.initializers.normal(M**-0.5), nn.initializers.lecun_normal()

        def table(name: str, axes: tuple[str, ...], *shape: int, init: Any = normal) -> jax.Array:
            return self.param(name, named(init, axes), shape)

        def factors() -> KroneckerEmbed:
            return KroneckerEmbed(V, M, M**-0.5, rank=terms, apply_as=c.kronecker.apply)

        if not c.has_table:
            self.token = HashEmbedding(c)
        else:
            self.token = factors() if terms else table("token", ("vocabulary", "embed"), V, M)
        if c.positions == "learned":
            self.position = table("position", ("positions", "embed"), c.max_length, M)
        if c.num_token_types:
            self.type = table("type", ("token_types", "embed"), c.num_token_types, M)
        if not c.tie_embeddings and terms:
            self.output = factors()
        elif not c.tie_embeddings:
            self.output = table("output", ("embed", "vocabulary"), M, V, init=lecun)
        if c.output_bias:
            zeros = nn.initializers.zeros_init()
            self.vocabulary_bias = table("vocabulary_bias", ("vocabulary",), V, init=zeros)
        if self.normalize:
            self.norm = normalization(c)
        self.dropout = Dropout(c.dropout_rate)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        token_types: jax.Array | None = None,
        *,
        signatures: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Ids [B, T] to [B, T, M]; `positions` [B, T] count from 0 along T by default.

        For hashed words without a table, the ids are types, with `signatures` [B, T, 16].
        """
        c = self.config
        if (length := tokens.shape[1]) > c.max_length:
            raise ValueError(f"rows of {length} tokens exceed model.max_length={c.max_length}")
        if token_types is not None and not c.num_token_types:
            raise ValueError("token_types are given, but model.num_token_types is 0")
        if not c.has_table and signatures is None and self.is_initializing():
            # The parameters do not depend on the signatures.
            signatures = jnp.zeros((*tokens.shape, BYTES), jnp.uint8)
        if (signatures is None) != c.has_table:
            raise ValueError(f"signatures are for model.hashing without a table, not {c.hashing}")
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        if isinstance(self.token, HashEmbedding):
            assert signatures is not None
            x = self.token(tokens, signatures, deterministic=deterministic)
        elif isinstance(self.token, KroneckerEmbed):
            x = self.token(tokens)
        else:
            x = _rows(self.token, tokens, "vocabulary")
        if c.num_token_types:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            x += _rows(self.type, types, "token_types")
        if c.positions == "learned":
            x += _rows(self.position, positions, "positions")
        x *= c.features**0.5
        if c.positions == "sinusoidal":
            x += sinusoids(positions, c.features)
        x = x.astype(c.dtype)
        if self.normalize:
            x = self.norm(x)
        x = self.dropout(x, deterministic=deterministic)
        return nn.with_logical_constraint(x, ("batch", "length", "activation_embed"))

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits `x · token[v] (+ bias[v])`, or `x · output`: [B, T, M] to float32 [B, T, V]."""
        c = self.config
        table = self.token if c.tie_embeddings else self.output
        if isinstance(table, KroneckerEmbed):
            logits = table.attend(x)
        else:
            pattern = "btm,vm->btv" if c.tie_embeddings else "btm,mv->btv"
            (table,) = promote_dtype(table, dtype=x.dtype)
            logits = jnp.einsum(pattern, x, table, preferred_element_type=jnp.float32)
        if c.output_bias:
            logits += self.vocabulary_bias[None, None]
        if c.padded_vocabulary_size > c.vocabulary_size or c.absent_tokens:
            ids = jnp.arange(c.padded_vocabulary_size)
            exists = (ids < c.vocabulary_size) & ~jnp.isin(ids, jnp.array(c.absent_tokens, int))
            logits = jnp.where(exists[None, None], logits, -jnp.inf)
        return nn.with_logical_constraint(logits, ("batch", "length", "activation_vocabulary"))


def _rows(table: jax.Array, ids: jax.Array, axis: str) -> jax.Array:
    # Whole rows on every device: looked-up rows are split by the batch, and where the table is
    # split by the same mesh axis, either the table or all looked-up rows must be moved.
    table = nn.with_logical_constraint(table, (axis, "activation_embed"))
    return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)
