"""The transformer: the kinds of attention with their fields and forms, and Kronecker products.

A new kind is its entry in `KINDS` and a class in a file of `mhe_jax/attention/kinds/`.
"""

from dataclasses import dataclass, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from mhe_jax.config import values


class KindEntry(NamedTuple):
    """What a config must know of a kind."""

    # Its fields of `AttentionConfig` that not every kind has; each is a field of its class too.
    fields: tuple[str, ...] = ()
    # The ways to compute it, from fast to slow; the last takes every call. None if it has but one.
    forms: tuple[str, ...] = ()


EMBEDDED = ("num_groups", "head_embedding_stddev")
LATENT = ("query_rank", "latent_features", "latent_groups", "rotary_features")
KINDS: dict[str, KindEntry] = {
    "mha": KindEntry(("score_features",)),
    "sha": KindEntry(),
    "mqa": KindEntry(("score_features",)),
    "gqa": KindEntry(("num_kv_heads", "score_features")),
    "skv": KindEntry(),
    "el": KindEntry(),
    "mhe_add": KindEntry((*EMBEDDED, "score_groups"), ("shared", "folded", "materialized")),
    "mhe_mul": KindEntry(EMBEDDED, ("folded", "materialized")),
    "mva": KindEntry(("num_groups", "score_features", "use_key_bias"), ("shared", "materialized")),
    "collaborative": KindEntry((*EMBEDDED, "score_features", "use_key_bias"), ("materialized",)),
    "mfa": KindEntry(("query_rank", "reuse_keys")),
    "gta": KindEntry(("num_kv_heads",)),
    "mla": KindEntry(LATENT, ("absorbed", "materialized")),
    "mlra": KindEntry((*LATENT, "latent_branches"), ("absorbed", "materialized")),
    "ghla": KindEntry(("num_kv_heads", "num_groups", "latent_features")),
    "tpa": KindEntry(("query_rank", "key_rank", "value_rank"), ("factored", "materialized")),
}
FORMS_OF_KINDS = {kind: entry.forms for kind, entry in KINDS.items() if entry.forms}
# Fields of `AttentionConfig` that belong to some kinds only.
FIELDS_OF_KINDS = {"form": tuple(FORMS_OF_KINDS)} | {
    name: tuple(kind for kind, entry in KINDS.items() if name in entry.fields)
    for name in dict.fromkeys(name for entry in KINDS.values() for name in entry.fields)
}
FORMS = ("auto", *dict.fromkeys(form for forms in FORMS_OF_KINDS.values() for form in forms))
if TYPE_CHECKING:
    Kind = str
    Form = str
else:
    Kind, Form = Literal[tuple(KINDS)], Literal[FORMS]


@dataclass(frozen=True, kw_only=True)
class KindFields:
    """Fields of some kinds only, which a conversion takes; None, the default, for all others."""

    # Key and value heads K of `gqa`, tied states of `gta`: divide num_heads; of `ghla`, None is 1.
    num_kv_heads: values.Count | None = None
    # Projections G that H/G heads share: queries, keys and values of an MHE kind, queries and keys
    # of `mva` and `collaborative`; None is 1. Score maps of `ghla`; None is H/4 or num_kv_heads.
    num_groups: values.Count | None = None
    # Width of queries and keys: of `mha`, `mqa` and `gqa` for all heads together, a multiple of
    # them, None is qkv_features; of `mva` and `collaborative` shared, None is the width of a head.
    score_features: values.Count | None = None


@dataclass(frozen=True)
class AttentionConfig(KindFields):
    """One attention sublayer. Fields of one kind are None by default and refused for the others."""

    # Which attention: see docs/kinds.md.
    kind: Kind = "mha"
    # Number of query heads H.
    num_heads: values.Count = 8
    # Width of all heads together, H*D; None means the width of the model.
    qkv_features: values.Count | None = None
    # How a kind of several forms is computed; None is `auto`, the fastest that is exact here.
    form: Form | None = None
    # Deviation of initial head embeddings; None: 0.02 (mhe_add) or 0.5 (mhe_mul, collaborative).
    head_embedding_stddev: values.NotNegative | None = None
    # Groups of heads, each with its own score matrix; `mhe_add` only; None is 1.
    score_groups: values.Count | None = None
    # A bias of each key for each head; `mva` and `collaborative` only; None is True.
    use_key_bias: bool | None = None
    # Products in the keys of `tpa`; None is 2.
    key_rank: values.Count | None = None
    # Products in the values of `tpa`; None is 2.
    value_rank: values.Count | None = None
    # Compute values from keys, and cache only keys (MFA-KR); `mfa` only; None is False.
    reuse_keys: bool | None = None
    # Rank of the map to queries: for `mfa`, None is a head's width; for `mla` and `mlra`, None is
    # full rank; products in the queries of `tpa`, None is 6.
    query_rank: values.Count | None = None
    # Width of the latent of `mla` and `mlra`; None is 4 times a head's. Width of a value latent of
    # `ghla`; None is twice a head's, or once for an odd H/G.
    latent_features: values.Count | None = None
    # Latents of `mla` and `mlra`, which share latent_features and the heads; None is 1 or 4.
    latent_groups: values.Count | None = None
    # Latents that each head of `mlra` reads, with a softmax for each; None is latent_groups, all.
    latent_branches: values.Count | None = None
    # Width of the rotary queries and keys of `mla` and `mlra`; None is half the width of a head.
    rotary_features: values.Count | None = None
    # The engine that computes the softmax; `auto` takes the fastest that supports the call.
    engine: values.Engine = "auto"
    # Dropout on the attention weights, one mask per example shared over its heads.
    dropout_rate: values.Share = 0.0
    # Biases in the four projections; the published parameter counts have none.
    use_bias: bool = False
    # LayerNorm over each head's queries and keys.
    normalize_qk: bool = False


@dataclass(frozen=True)
class ConversionConfig(KindFields):
    """The attention that a trained run is converted to, and what it is fitted on."""

    # Which attention.
    kind: Kind | None = None
    # Rows of the run's training text to fit on; 0 reads none.
    rows: values.Natural = 1000


if TYPE_CHECKING:
    AttentionOverride = AttentionConfig
else:
    # Every field of `AttentionConfig`, None by default; None leaves it unchanged.
    AttentionOverride = make_dataclass(
        "AttentionOverride",
        [(f.name, f.type | None, None) for f in fields(AttentionConfig)],
        frozen=True,
    )
    AttentionOverride.__module__ = __name__
    AttentionOverride.__doc__ = "Fields of `AttentionConfig` that one role changes."


@dataclass(frozen=True)
class AttentionByRole:
    """Where one role of attention differs from `model.attention`."""

    # Self-attention of the encoder.
    encoder: AttentionOverride = AttentionOverride()
    # Causal self-attention of the decoder or language model.
    decoder: AttentionOverride = AttentionOverride()
    # Attention of the decoder to the encoder.
    cross: AttentionOverride = AttentionOverride()


@dataclass(frozen=True)
class KroneckerConfig:
    """Matrices as sums of Kronecker products (Shapeshifter): how many; None keeps them dense."""

    # Terms of each projection of attention.
    attention: values.Count | None = None
    # Terms of each matrix of the MLPs, and of the head of `mlm`.
    mlp: values.Count | None = None
    # Terms of the token embeddings, and of the output matrix if that is separate.
    embedding: values.Count | None = None
    # `factored` never forms the matrix, `materialized` does in each step; `auto` takes the faster.
    apply: Literal["auto", "factored", "materialized"] = "auto"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the transformer; its architecture follows from the task."""

    # Vocabulary V: pieces of a tokenizer that a run trains. For hashed words with a table (`_emb`),
    # 5 special tokens and the buckets, 50,265 in the paper; other hashed words have none.
    vocabulary_size: values.Count = 8000
    # Whole words by their hash (HashFormers, encoders only): MD5, or LSH of the word's pieces, and
    # how the hash becomes a vector; None takes pieces.
    hashing: values.Hashing | None = None
    # Rows of the embedding tables are rounded up to a multiple of this, never predicted or counted.
    vocabulary_multiple: values.Count = 1
    # Width M.
    features: values.Count = 512
    # Width F of the hidden layer of the MLP.
    mlp_features: values.Count = 2048
    # Layers of the encoder or of the language model.
    num_layers: values.Count = 6
    # Layers of the decoder in translation; None means num_layers.
    num_decoder_layers: values.Count | None = None
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
    activation: values.Activation = "gelu"
    # LayerNorm, or RMSNorm, which subtracts no mean and has no bias.
    norm: Literal["layer", "rms"] = "layer"
    # The norm before each sublayer (and once after the stack), or after each residual sum.
    norm_position: Literal["pre", "post"] = "pre"
    # Added in the norm's denominator, of either kind.
    layer_norm_epsilon: values.Positive = 1e-6
    # What a token of an encoder sees: its text, or only itself: a baseline without attention.
    context: Literal["text", "token"] = "text"
    # Learned rows, fixed sine and cosine, or rotated queries and keys of self-attention (RoPE).
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    # A head's first pair of features turns by 1 per position, the last by about 1 / rotary_base.
    rotary_base: values.Positive = 10000.0
    # Which turn together: i and i + D/2 (Llama, GPT-NeoX), or 2i and 2i + 1 (RoFormer, GPT-J).
    rotary_pairs: Literal["half", "interleaved"] = "half"
    # Divides rotary positions: 4 reads texts four times as long as those trained on.
    rotary_scaling: values.Positive = 1.0
    # Longest sequence; rows of the learned positions, and the size of the cache.
    max_length: values.Count = 512
    # Kinds of segment, each with an embedding (BERT has 2); 0 for none.
    num_token_types: values.Natural = 0
    # Dropout on embeddings and on the output of each sublayer.
    dropout_rate: values.Share = 0.1
    # Outputs of a classifier; None: as many as `data.labels`.
    num_classes: values.Count | None = None
    # What a classifier reads: the output at the first token, as in BERT, or the mean over all.
    pooling: Literal["first", "mean"] = "first"
    # Marked spans that a classifier reads besides the whole text; None: as in `data.dataset`.
    num_spans: values.Natural | None = None
    # One table for input embeddings and output logits.
    tie_embeddings: bool = True
    # A bias for each token on the logits of a language model or translation; `mlm` always has one.
    output_bias: bool = False
    # Special tokens that the vocabulary of an imported model lacks: never predicted.
    absent_tokens: tuple[int, ...] = ()
    # One compiled layer scanned over stacked parameters: compiles faster, and keeps only products
    # and attention for the backward pass.
    scan_layers: bool = False
    # Recompute each layer in the backward pass: less memory, about a third more time.
    remat: bool = False
    # Type of activations; parameters, softmax and loss stay float32.
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def decoder_layers(self) -> int:
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

    def attention_for(self, role: values.Role) -> AttentionConfig:
        """`attention`, overridden by what `attention_by_role` says of `role`."""
        override, common = vars(getattr(self.attention_by_role, role)), self.attention
        changes = {name: value for name, value in override.items() if value is not None}
        if changes.get("kind", common.kind) != common.kind:
            # Fields of the common kind alone mean nothing to another kind.
            common = replace(common, **dict.fromkeys(FIELDS_OF_KINDS))
        return replace(common, **changes)

    def attention_field(self, role: values.Role, field: str) -> str:
        """The dotted name of where a field of `attention_for(role)` is set."""
        override = getattr(self.attention_by_role, role)
        # A role of another kind does not take the fields of the common kind alone.
        other = override.kind not in (None, self.attention.kind) and field in FIELDS_OF_KINDS
        own = other or getattr(override, field) is not None
        return f"model.attention_by_role.{role}.{field}" if own else f"model.attention.{field}"
