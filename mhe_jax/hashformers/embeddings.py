"""Vectors of whole words from the 128 bits of their hash, instead of a table of all words.

    x = S[type] + E(b)        b in {0, 1}^128, all 0 for special tokens

S [6, M] has a row for each special token and one for all words. E is one of

    Pool   E = Σ_k softmax_k(A)[k] ⊙ dropout(T[c_k])        c_k = 1 + the number in bits of chunk k
    Add    E = (W₁ b + W₀ (1 - b)) / √128, dropout on W₁ and W₀
    Proj   E_j = Pearson correlation of b with row j of W

Where tokens are buckets of the hash (`_emb`) there is nothing to do here: E is the ordinary table,
and special tokens are its first rows.

Parameters, M = 768: Pool 797,184, Add 196,608, Proj 98,304; S 4,608 more; the table of Emb has
38,603,520.

Source: Xue & Aletras 2022, "HashFormers". Types are in the order of our special tokens (pad,
unknown, start, end, mask, word); theirs is start, pad, end, unknown, mask, word.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.projection import Dropout, named
from mhe_jax.config import ModelConfig
from mhe_jax.config.data import NUM_SPECIAL
from mhe_jax.hashformers import BITS

# Chunks of Pool from the highest bit on: 12 of 10 bits, one of 8.
CHUNKS = (10,) * 12 + (8,)
ROWS = 1 + 2 ** max(CHUNKS)  # of Pool's table; row 0 is that of special tokens
NUM_TYPES = NUM_SPECIAL + 1  # rows of S: the special tokens by their ids, and words
# Where `fsdp` splits a parameter, it is moved to the activations, not they to it.
_whole = nn.with_logical_constraint


def unpack_bits(signatures: jax.Array) -> jax.Array:
    """Bytes [..., 16] to bits [..., 128] of int32, the highest of each byte first.

    >>> unpack_bits(jnp.array([[0xB9] + 15 * [0]], jnp.uint8))[0, :8].tolist()
    [1, 0, 1, 1, 1, 0, 0, 1]
    """
    shifts = jnp.arange(7, -1, -1, dtype=jnp.int32).reshape(*(1,) * signatures.ndim, 8)
    bits = (signatures[..., None].astype(jnp.int32) >> shifts) & 1
    return bits.reshape(*signatures.shape[:-1], BITS)


def chunk_numbers(bits: jax.Array) -> jax.Array:
    """Bits [..., 128] to c [..., 13], each 1 + the number in the bits of a chunk."""
    found, start = [], 0
    for size in CHUNKS:
        powers = 2 ** jnp.arange(size - 1, -1, -1, dtype=jnp.int32)
        found.append(1 + bits[..., start : start + size] @ powers)
        start += size
    return jnp.stack(found, axis=-1)


class _Embedding(nn.Module):
    """Bits [B, T, 128], all 0 at special tokens, where `ordinary` [B, T] is false, to [B, T, M]."""

    features: int
    dropout_rate: float = 0.0


class Pool(_Embedding):
    """Parameters: `table [1025, M]`, `weights [13, M]` (A); with A = 0 the mean of 13 rows."""

    @nn.compact
    def __call__(self, bits: jax.Array, ordinary: jax.Array, *, deterministic: bool = True):
        M = self.features
        # The mean of 13 rows starts with the variance of one row of an ordinary table.
        init = nn.initializers.normal((len(CHUNKS) / M) ** 0.5)
        table = self.param("table", named(init, (None, "embed")), (ROWS, M))
        init = nn.initializers.normal(0.02)
        weights = self.param("weights", named(init, (None, "embed")), (len(CHUNKS), M))
        # The weighted tables are small, and rows looked up in them need not be kept for gradients.
        weighted = nn.softmax(weights, axis=0)[:, None] * table[None]
        weighted = _whole(weighted.reshape(-1, M), (None, "activation_embed"))
        rows = jnp.where(ordinary[..., None], chunk_numbers(bits), 0)
        rows += ROWS * jnp.arange(len(CHUNKS)).reshape(1, 1, -1)
        found = jnp.take(weighted, rows, axis=0)
        found = Dropout(self.dropout_rate)(found, deterministic=deterministic)
        return jnp.sum(found, axis=-2)


class Add(_Embedding):
    """Parameters: `one [M, 128]` (W₁), `zero [M, 128]` (W₀), with dropout on them."""

    @nn.compact
    def __call__(self, bits: jax.Array, ordinary: jax.Array, *, deterministic: bool = True):
        init = named(nn.initializers.normal(self.features**-0.5), ("embed", None))
        shape = (self.features, BITS)
        dropout = Dropout(self.dropout_rate)
        one, zero = (
            dropout(_whole(matrix, ("activation_embed", None)), deterministic=deterministic)
            for matrix in (self.param(name, init, shape) for name in ("one", "zero"))
        )
        x = jnp.einsum("btc,mc->btm", bits.astype(one.dtype), one - zero)
        return (x + jnp.sum(zero, axis=1)[None, None]) * BITS**-0.5


class Proj(_Embedding):
    """`E_j = (b - mean b)·(w_j - mean w_j) / (|b - mean b| |w_j - mean w_j|)`, in float32.

    Norms are at least 1e-8: special tokens have 0. Parameters: `kernel [M, 128]`. No dropout.
    """

    @nn.compact
    def __call__(self, bits: jax.Array, ordinary: jax.Array, *, deterministic: bool = True):
        init = named(nn.initializers.normal(self.features**-0.5), ("embed", None))
        kernel = self.param("kernel", init, (self.features, BITS))
        kernel = _standard(_whole(kernel, ("activation_embed", None)))
        return jnp.einsum("btc,mc->btm", _standard(bits), kernel)


def _standard(x: jax.Array) -> jax.Array:
    """x with mean 0 and norm 1 over the last axis; 0 where it is constant."""
    x = x.astype(jnp.float32)
    x -= jnp.mean(x, axis=-1, keepdims=True)
    squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    # Bounds the squares, not the norm: the gradient of a root at 0 is not finite.
    return x * jax.lax.rsqrt(jnp.maximum(squares, 1e-16))


EMBEDDINGS = {"pool": Pool, "add": Add, "proj": Proj}


class HashEmbedding(nn.Module):
    """`S[type] + E(b)` of the config's hash: types [B, T] and signatures [B, T, 16] to [B, T, M].

    Parameters: `special [6, M]` (S) and those of E.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, types: jax.Array, signatures: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Types below 5 are special tokens, with signatures of zeros; a type above 5 gives NaN."""
        c = self.config
        assert c.hashing is not None
        make = EMBEDDINGS[c.hashing.partition("_")[2]]
        init = named(nn.initializers.normal(c.features**-0.5), ("token_types", "embed"))
        special = self.param("special", init, (NUM_TYPES, c.features))
        special = _whole(special, ("token_types", "activation_embed"))
        x = jnp.take(special, types, axis=0, mode="fill", fill_value=jnp.nan)
        embed = make(c.features, c.dropout_rate, name="hash")
        bits, ordinary = unpack_bits(signatures), types >= NUM_SPECIAL
        return x + embed(bits, ordinary, deterministic=deterministic)
