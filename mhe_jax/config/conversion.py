"""A trained run with another attention: what is asked for."""

from dataclasses import dataclass

from mhe_jax.config.model import Kind


@dataclass(frozen=True)
class ConversionConfig:
    """The attention that a run is to have, and what it is fitted on."""

    # Which attention.
    kind: Kind | None = None
    # Number of key and value heads; `gqa` only.
    num_kv_heads: int | None = None
    # Shared projections; `mhe_add`, `mhe_mul` and `mva` only; None is 1.
    num_groups: int | None = None
    # Groups of heads with a score matrix each; `mhe_add` only; None is 1.
    score_groups: int | None = None
    # Width of queries and keys; `mva` only; None is the width of a head.
    score_features: int | None = None
    # Rows of the run's training text to fit on; 0 reads none.
    rows: int = 1000
    # Directories from which files that the run names may be read, beside the run itself.
    trust: tuple[str, ...] = (".",)
