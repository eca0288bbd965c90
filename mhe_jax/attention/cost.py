"""The cost of each attention kind in closed form: parameters, cached numbers, operations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A sublayer: width M, H heads of width D; what kinds have beside that.

    `kv_heads` K of `gqa`; `groups` G of shared projections and `score_groups` C of MHE-Add;
    `score_features` D_s of `mva`, None for D.
    """

    features: int
    heads: int
    head_features: int
    kv_heads: int | None = None
    groups: int = 1
    score_groups: int = 1
    score_features: int | None = None

    @classmethod
    def of(cls, features: int, heads: int, kv_heads: int | None = None) -> "Shape":
        """Heads of width M / H, as in every published shape."""
        return cls(features, heads, features // heads, kv_heads)


@dataclass(frozen=True)
class Widths:
    """How kinds differ: numbers for each token, and what else has parameters."""

    query: int  # made by the query projection
    key: int  # made by the key projection
    value: int  # made by the value projection
    cached: int  # kept of a token by the cache
    scored: int  # multiply-adds for the scores of one query and one key
    weighted: int  # multiply-adds for one query's sums over one key's values
    tables: int = 0  # numbers in head embeddings
    unbiased: int = 0  # made by a projection that never has a bias


def widths(kind: str, shape: Shape) -> Widths:
    """The row of `kind` for `shape`, in its cheapest form.

    Raises:
      ValueError: an unknown kind, or `gqa` without a number of key and value heads.
    """
    H, D, G, C = shape.heads, shape.head_features, shape.groups, shape.score_groups
    if kind == "gqa" and not shape.kv_heads:
        raise ValueError("gqa needs kv_heads")
    K, HD = (shape.kv_heads or H) * D, H * D
    S = G * (shape.score_features or D)
    rows = {
        "mha": Widths(query=HD, key=HD, value=HD, cached=2 * HD, scored=HD, weighted=HD),
        "sha": Widths(query=D, key=D, value=D, cached=2 * D, scored=D, weighted=D),
        "mqa": Widths(query=HD, key=D, value=D, cached=2 * D, scored=HD, weighted=HD),
        "gqa": Widths(query=HD, key=K, value=K, cached=2 * K, scored=HD, weighted=HD),
        "skv": Widths(query=HD, key=HD, value=0, cached=HD, scored=HD, weighted=HD),
        "el": Widths(query=HD, key=0, value=0, cached=HD, scored=HD, weighted=HD),
        # One score matrix a group, and H sums and H denominators.
        "mhe_add": Widths(
            query=G * D,
            key=G * D,
            value=G * D,
            cached=2 * G * D,
            scored=max(G, C) * D,
            weighted=HD + H,
            tables=3 * HD + (C * D if C > 1 else 0),
        ),
        "mhe_mul": Widths(
            query=G * D,
            key=G * D,
            value=G * D,
            cached=2 * G * D,
            scored=HD,
            weighted=HD,
            tables=3 * HD,
        ),
        "mva": Widths(
            query=S, key=S, value=HD, cached=S + HD + H, scored=S, weighted=HD + H, unbiased=H
        ),
    }
    if kind not in rows:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(rows)}")
    return rows[kind]


def parameters(kind: str, shape: Shape, use_bias: bool = False) -> int:
    """Parameters of one sublayer: of the four projections, head embeddings, and biases by choice.

    >>> parameters("mhe_mul", Shape.of(768, 12))
    739584
    """
    row, M = widths(kind, shape), shape.features
    projected = row.query + row.key + row.value
    biases = projected + M if use_bias else 0
    out = shape.heads * shape.head_features * M
    return (projected + row.unbiased) * M + out + row.tables + biases


def cached_numbers(kind: str, shape: Shape) -> int:
    """Numbers that the cache keeps of each token.

    >>> cached_numbers("mhe_mul", Shape.of(768, 12)), cached_numbers("mha", Shape.of(768, 12))
    (128, 1536)
    """
    return widths(kind, shape).cached


def forward_flops(kind: str, shape: Shape, keys: int) -> int:
    """Operations of the forward pass for one token that attends to `keys` keys (mean, if masked).

    Two for each multiply-add of the projections, and of the core for each key, with MHE-Add and
    `mva` in the form `shared`. The backward pass is twice that.

    >>> forward_flops("mha", Shape.of(768, 12), keys=512)
    6291456
    """
    row, M = widths(kind, shape), shape.features
    projected = row.query + row.key + row.value + row.unbiased
    out = shape.heads * shape.head_features
    return 2 * (projected + out) * M + 2 * keys * (row.scored + row.weighted)
