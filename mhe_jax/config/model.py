"""The transformer and its Kronecker products."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from mhe_jax.config.kinds import FIELDS_OF_KINDS, AttentionByRole, AttentionConfig
from mhe_jax.config.tasks import Role
from mhe_jax.config.values import Activation, Count, Hashing, Natural, Positive, Share


@dataclass(frozen=True)
class KroneckerConfig:
    """Matrices as sums of Kronecker products (Shapeshifter): how many; None keeps them dense."""

    # Terms of each projection of attention.
    attention: Count | None = None
    # Terms of each matrix of the MLPs, and of the head of `mlm`.
    mlp: Count | None = None
    # Terms of the token embeddings, and of the output matrix if that is separate.
    embedding: Count | None = None
    # `factored` never forms the matrix, `materialized` forms it in each step; `auto` takes the one
    # with fewer operations.
    apply: Literal["auto", "factored", "materialized"] = "auto"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the transformer; its architecture follows from the task."""

    # Vocabulary V; a tokenizer trained by a run gets exactly this many pieces. For hashed words
    # with a table (`_emb`), its rows: 5 special tokens and the buckets, 50,265 in the paper; other
    # hashed words have no vocabulary.
    vocabulary_size: Count = 8000
    # Whole words by their hash instead of pieces (HashFormers, encoders only): MD5, or LSH of the
    # word's pieces, and how the hash becomes a vector; None takes pieces.
    hashing: Hashing | None = None
    # Rows of the embedding tables are rounded up to a multiple of this; rows past the vocabulary
    # are never predicted or counted.
    vocabulary_multiple: Count = 1
    # Width M.
    features: Count = 512
    # Width F of the hidden layer of the MLP.
    mlp_features: Count = 2048
    # Layers of the encoder or of the language model.
    num_layers: Count = 6
    # Layers of the decoder in translation; None means num_layers.
    num_decoder_layers: Count | None = None
    # The attention of every layer.
    attention: AttentionConfig = AttentionConfig()
    # Where encoder, decoder and cross-attention differ from `attention`.
    attention_by_role: AttentionByRole = AttentionByRole()
    # Matrices as sums of Kronecker products.
    kronecker: KroneckerConfig = KroneckerConfig()
    # `plain`: down(activation(up(x))); `gated`: down(activation(gate(x)) * up(x)), a third matrix.
    # Gated with silu is SwiGLU, with gelu GEGLU.
    mlp: Literal["plain", "gated"] = "plain"
    # Biases of the MLP's matrices.
    mlp_bias: bool = True
    # Non-linearity of the MLP: gelu is exact, gelu_tanh its approximation by tanh.
    activation: Activation = "gelu"
    # LayerNorm, or RMSNorm, which subtracts no mean and has no bias.
    norm: Literal["layer", "rms"] = "layer"
    # The norm before each sublayer (and once after the stack), or after each residual sum.
    norm_position: Literal["pre", "post"] = "pre"
    # Added in the norm's denominator, of either kind.
    layer_norm_epsilon: Positive = 1e-6
    # What each token of an encoder sees: all tokens of its text, or only itself, which switches
    # attention off: a baseline without context.
    context: Literal["text", "token"] = "text"
    # Learned position rows, fixed sine and cosine, or queries and keys of self-attention rotated by
    # their positions (RoPE).
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    # Rotary positions: the first pair of a head's features turns by 1 per position, the last by
    # about 1 / rotary_base.
    rotary_base: Positive = 10000.0
    # Which features of a head turn together: i and i + D/2 (Llama, GPT-NeoX), or 2i and 2i + 1
    # (RoFormer, GPT-J).
    rotary_pairs: Literal["half", "interleaved"] = "half"
    # Divides rotary positions: 4 reads texts four times as long as those trained on.
    rotary_scaling: Positive = 1.0
    # Longest sequence; rows of the learned positions, and the size of the cache.
    max_length: Count = 512
    # Kinds of segment, each with an embedding (BERT has 2); 0 for none.
    num_token_types: Natural = 0
    # Dropout on embeddings and on the output of each sublayer.
    dropout_rate: Share = 0.1
    # Outputs of a classifier; None: as many as `data.labels`.
    num_classes: Count | None = None
    # What stands for a whole text in a classifier: the output at its first token, as in BERT, or
    # the mean over its tokens.
    pooling: Literal["first", "mean"] = "first"
    # Marked spans that a classifier reads besides the whole text; None: as in `data.dataset`.
    num_spans: Natural | None = None
    # One table for input embeddings and output logits.
    tie_embeddings: bool = True
    # A bias for each token on the logits of a language model or translation; `mlm` always has one.
    output_bias: bool = False
    # Special tokens that the vocabulary of an imported model lacks: never predicted.
    absent_tokens: tuple[int, ...] = ()
    # One compiled layer scanned over stacked parameters: compiles faster, and keeps only products
    # and attention for the backward pass; False unrolls the layers.
    scan_layers: bool = False
    # Recompute each layer in the backward pass: less memory, about a third more time.
    remat: bool = False
    # Type of activations; parameters, softmax and loss stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def decoder_layers(self) -> int:
        """Layers of the decoder in translation."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def padded_vocabulary_size(self) -> int:
        """Rows of the embedding tables."""
        return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def has_table(self) -> bool:
        """Whether each token has a row of a table, instead of being embedded by its hash's bits."""
        return self.hashing is None or self.hashing.endswith("_emb")

    @property
    def has_pieces(self) -> bool:
        """Whether a sentencepiece model splits texts, or the words that are hashed."""
        return self.hashing is None or self.hashing.startswith("lsh_")

    def attention_for(self, role: Role) -> AttentionConfig:
        """`attention`, overridden by what `attention_by_role` says of `role`."""
        override = getattr(self.attention_by_role, role)
        changes = {f.name: getattr(override, f.name) for f in dataclasses.fields(override)}
        changes = {name: value for name, value in changes.items() if value is not None}
        common = self.attention
        if changes.get("kind", common.kind) != common.kind:
            # Fields of the common kind alone mean nothing to another kind.
            common = dataclasses.replace(common, **dict.fromkeys(FIELDS_OF_KINDS))
        return dataclasses.replace(common, **changes)

    def attention_field(self, role: Role, field: str) -> str:
        """The dotted name of where a field of `attention_for(role)` is set."""
        override = getattr(self.attention_by_role, role)
        # A role of another kind does not take the fields of the common kind alone.
        other = override.kind not in (None, self.attention.kind) and field in FIELDS_OF_KINDS
        own = other or getattr(override, field) is not None
        return f"model.attention_by_role.{role}.{field}" if own else f"model.attention.{field}"
