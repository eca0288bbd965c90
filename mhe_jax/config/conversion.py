"""A trained run with another attention: what is asked for."""

from dataclasses import dataclass

from mhe_jax.config.model import Kind


@dataclass(frozen=True)
class ConversionConfig:
    """The attention that a run is converted to, and what it is fitted on."""

    # Which attention.
    kind: Kind | None = None
    # Number of key and value heads of `gqa`, of tied states of `gta`.
    num_kv_heads: int | None = None
    # Shared projections; `mhe_add`, `mhe_mul`, `mva` and `collaborative` only; None is 1.
    num_groups: int | None = None
    # Groups of heads, each with its own score matrix; `mhe_add` only; None is 1.
    score_groups: int | None = None
    # Width of queries and keys; `mva` and `collaborative` only; None is the width of a head.
    score_features: int | None = None
    # Rank of the map to queries, 2 or more: for `mfa`, None is the width of a head; for `mla`, None
    # is full rank, without a latent. For `tpa`, the number of products in the queries; None is 6.
    query_rank: int | None = None
    # Products in the keys of `tpa`; None is 2.
    key_rank: int | None = None
    # Products in the values of `tpa`; None is 2.
    value_rank: int | None = None
    # Compute values from keys, and cache only keys (MFA-KR); `mfa` only; None is False.
    reuse_keys: bool | None = None
    # Width of the latent from which `mla` makes keys and values, 2 or more for each of
    # latent_groups; None is 4 times the width of a head.
    latent_features: int | None = None
    # Latents of `mla`; each has its share of latent_features and of the heads; None is 1.
    latent_groups: int | None = None
    # Rows of the run's training text to fit on; 0 reads none.
    rows: int = 1000
