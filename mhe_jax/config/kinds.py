"""The kinds of attention as a config knows them: their fields, and their forms.

A new kind is its entry in `KINDS` and a file in `mhe_jax/attention/kinds/`.
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mhe_jax.config.values import Count, Engine, Natural, NotNegative, Share


class KindEntry(NamedTuple):
    """What a config must know of a kind."""

    # Its fields of `AttentionConfig` that not every kind has; each is a field of its class too.
    fields: tuple[str, ...] = ()
    # The ways to compute it, from fast to slow; the last takes every call. None if it has but one.
    forms: tuple[str, ...] = ()


KINDS: dict[str, KindEntry] = {
    "mha": KindEntry(),
    "sha": KindEntry(),
    "mqa": KindEntry(),
    "gqa": KindEntry(("num_kv_heads",)),
    "skv": KindEntry(),
    "el": KindEntry(),
    "mhe_add": KindEntry(
        ("num_groups", "score_groups", "head_embedding_stddev"),
        ("shared", "folded", "materialized"),
    ),
    "mhe_mul": KindEntry(("num_groups", "head_embedding_stddev"), ("folded", "materialized")),
    "mva": KindEntry(("num_groups", "score_features"), ("shared", "materialized")),
    "collaborative": KindEntry(
        ("num_groups", "score_features", "head_embedding_stddev"), ("materialized",)
    ),
    "mfa": KindEntry(("query_rank", "reuse_keys")),
    "gta": KindEntry(("num_kv_heads",)),
    "mla": KindEntry(
        ("query_rank", "latent_features", "latent_groups", "rotary_features"),
        ("absorbed", "materialized"),
    ),
    "mlra": KindEntry(
        ("query_rank", "latent_features", "latent_groups", "latent_branches", "rotary_features"),
        ("absorbed", "materialized"),
    ),
    "ghla": KindEntry(("num_kv_heads", "num_groups", "latent_features")),
    "tpa": KindEntry(("query_rank", "key_rank", "value_rank"), ("factored", "materialized")),
}
FORMS_OF_KINDS = {kind: entry.forms for kind, entry in KINDS.items() if entry.forms}
FORMS = ("auto", *dict.fromkeys(form for forms in FORMS_OF_KINDS.values() for form in forms))
if typing.TYPE_CHECKING:
    Kind = Form = str
else:
    Kind, Form = Literal[tuple(KINDS)], Literal[FORMS]


@dataclass(frozen=True, kw_only=True)
class KindFields:
    """What only some kinds of attention have; None, the default, for all others."""

    # Number of key and value heads K of `gqa`, of tied states G of `gta`; divides num_heads. For
    # `ghla`, None is 1, and it divides num_groups.
    num_kv_heads: Count | None = None
    # Shared projections G: queries, keys and values of an MHE kind, queries and keys of `mva` and
    # `collaborative`; H/G heads share each; None is 1. Score maps of `ghla`; None is H/4,
    # or num_kv_heads where that does not divide H/4.
    num_groups: Count | None = None
    # Groups of heads, each with its own score matrix; `mhe_add` only; None is 1.
    score_groups: Count | None = None
    # Width of queries and keys; `mva` and `collaborative` only; None is the width of a head.
    score_features: Count | None = None
    # Rank of the map to queries: for `mfa`, None is the width of a head; for `mla` and `mlra`, None
    # is full rank, without a latent; for `tpa`, the number of products in the queries, None is 6.
    query_rank: Count | None = None
    # Compute values from keys, and cache only keys (MFA-KR); `mfa` only; None is False.
    reuse_keys: bool | None = None
    # Products in the keys of `tpa`; None is 2.
    key_rank: Count | None = None
    # Products in the values of `tpa`; None is 2.
    value_rank: Count | None = None
    # Width of the latent from which `mla` and `mlra` make keys and values; None is 4 times a head's
    # width. Width of a value latent of `ghla`; None is twice a head's, or once for an odd H/G.
    latent_features: Count | None = None
    # Latents of `mla` and `mlra`; each has its share of latent_features and of the heads, or of a
    # branch's; None is 1 for `mla` and 4 for `mlra`.
    latent_groups: Count | None = None


@dataclass(frozen=True)
class AttentionConfig(KindFields):
    """One attention sublayer. Fields of one kind are None by default and refused for the others."""

    # Which attention: see the table of kinds in the README.
    kind: Kind = "mha"
    # Number of query heads H.
    num_heads: Count = 8
    # Width of all heads together, H*D; None means the width of the model.
    qkv_features: Count | None = None
    # How a kind that has several forms is computed; None is `auto`: the fastest form that is exact
    # for the call.
    form: Form | None = None
    # Standard deviation of the initial head embeddings; None: 0.02 for mhe_add, 0.5 for mhe_mul and
    # collaborative.
    head_embedding_stddev: NotNegative | None = None
    # Latents that each head of `mlra` reads, with a softmax for each; None is latent_groups, all.
    latent_branches: Count | None = None
    # Width of the rotary queries and keys of `mla` and `mlra`; None is half the width of a head.
    rotary_features: Count | None = None
    # The engine that computes the softmax; `auto` takes the fastest that supports the call.
    engine: Engine = "auto"
    # Dropout on the attention weights, one mask per example shared over its heads.
    dropout_rate: Share = 0.0
    # Biases in the four projections; the published parameter counts have none.
    use_bias: bool = False
    # LayerNorm over each head's queries and keys.
    normalize_qk: bool = False


def _kinds_with(name: str) -> tuple[str, ...]:
    entries = KINDS.items()
    return tuple(kind for kind, of in entries if name in of.fields or (name == "form" and of.forms))


# Fields of `AttentionConfig` that belong to some kinds only.
FIELDS_OF_KINDS = {
    f.name: kinds for f in dataclasses.fields(AttentionConfig) if (kinds := _kinds_with(f.name))
}


@dataclass(frozen=True)
class ConversionConfig(KindFields):
    """The attention that a trained run is converted to, and what it is fitted on."""

    # Which attention.
    kind: Kind | None = None
    # Rows of the run's training text to fit on; 0 reads none.
    rows: Natural = 1000


if typing.TYPE_CHECKING:
    AttentionOverride = AttentionConfig
else:
    # Every field of `AttentionConfig`, None by default; None leaves it unchanged.
    AttentionOverride = dataclasses.make_dataclass(
        "AttentionOverride",
        [
            (name, hint | None, field(default=None))
            for name, hint in typing.get_type_hints(AttentionConfig, include_extras=True).items()
        ],
        frozen=True,
    )
    AttentionOverride.__module__ = __name__
    AttentionOverride.__doc__ = (
        "Fields of `AttentionConfig` that one role changes; None keeps them."
    )


@dataclass(frozen=True)
class AttentionByRole:
    """Where one role of attention differs from `model.attention`."""

    # Self-attention of the encoder.
    encoder: AttentionOverride = AttentionOverride()
    # Causal self-attention of the decoder or language model.
    decoder: AttentionOverride = AttentionOverride()
    # Attention of the decoder to the encoder.
    cross: AttentionOverride = AttentionOverride()
