"""What each attention kind costs, in closed form: parameters, cached numbers, operations.

`python -m mhe_jax.attention.cost` prints both parameter tables of the paper beside the computed
counts, and what one sublayer costs.
"""

import typing
from dataclasses import dataclass

from mhe_jax.attention import published
from mhe_jax.config import Kind


@dataclass(frozen=True)
class Shape:
    """A sublayer: width M, H heads of width D, K key and value heads (`gqa`)."""

    features: int
    heads: int
    head_features: int
    kv_heads: int | None = None

    @classmethod
    def of(cls, features: int, heads: int, kv_heads: int | None = None) -> "Shape":
        """Heads of width M / H, as in every published shape."""
        return cls(features, heads, features // heads, kv_heads)


@dataclass(frozen=True)
class Heads:
    """How kinds differ, in heads of width D."""

    query: int  # made by the query projection
    key: int  # made by the key projection
    value: int  # made by the value projection
    cached: int  # kept of a token by the cache
    scored: int  # with scores of their own
    tables: int = 0  # [H, D] tables of head embeddings


def heads(kind: str, shape: Shape) -> Heads:
    """The row of `kind` for `shape`.

    Raises:
      ValueError: an unknown kind, or `gqa` without a number of key and value heads.
    """
    H, K = shape.heads, shape.kv_heads
    if kind == "gqa" and not K:
        raise ValueError("gqa needs kv_heads")
    K = K or H
    rows = {
        "mha": Heads(query=H, key=H, value=H, cached=2 * H, scored=H),
        "sha": Heads(query=1, key=1, value=1, cached=2, scored=1),
        "mqa": Heads(query=H, key=1, value=1, cached=2, scored=H),
        "gqa": Heads(query=H, key=K, value=K, cached=2 * K, scored=H),
        "skv": Heads(query=H, key=H, value=0, cached=H, scored=H),
        "el": Heads(query=H, key=0, value=0, cached=H, scored=H),
        "mhe_add": Heads(query=1, key=1, value=1, cached=2, scored=H, tables=3),
        "mhe_mul": Heads(query=1, key=1, value=1, cached=2, scored=H, tables=3),
    }
    if kind not in rows:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(rows)}")
    return rows[kind]


def parameters(kind: str, shape: Shape, use_bias: bool = False) -> int:
    """Parameters of one sublayer: (q + k + v)·MD + H·D·M + tables·HD, and biases by choice.

    >>> parameters("mhe_mul", Shape.of(768, 12))
    739584
    """
    row, D, M = heads(kind, shape), shape.head_features, shape.features
    projected = row.query + row.key + row.value
    biases = projected * D + M if use_bias else 0
    return projected * M * D + shape.heads * D * M + row.tables * shape.heads * D + biases


def cached_numbers(kind: str, shape: Shape) -> int:
    """Numbers that the cache keeps of each token.

    >>> cached_numbers("mhe_mul", Shape.of(768, 12)), cached_numbers("mha", Shape.of(768, 12))
    (128, 1536)
    """
    return heads(kind, shape).cached * shape.head_features


def forward_flops(kind: str, shape: Shape, keys: int) -> int:
    """Operations of the forward pass for one token that attends to `keys` keys (mean, if masked).

    Two for each multiply-add of the projections, `2·(q+k+v)·MD + 2·HD·M`, and of the core,
    `4·keys·D` for each head with scores of its own. The backward pass is twice that.

    >>> forward_flops("mha", Shape.of(768, 12), keys=512)
    6291456
    """
    row, D, M = heads(kind, shape), shape.head_features, shape.features
    projected = row.query + row.key + row.value
    core = 4 * keys * D * row.scored
    return 2 * projected * M * D + 2 * shape.heads * D * M + core


def encoder_table() -> str:
    """The seven encoder rows of the paper beside the computed counts."""
    shape = Shape.of(published.ENCODER_FEATURES, published.ENCODER_HEADS)
    lines = [
        "Encoder: 12 layers, M = 768, H = 12, D = 64, no biases",
        "| kind | per sublayer | 12 layers | in millions | printed | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for kind, printed in published.ENCODER_MILLIONS.items():
        one = parameters(kind, shape)
        total = one * published.ENCODER_LAYERS
        millions = f"{total / 1e6:.2f}"
        verdict = "equal" if millions == printed else "differs"
        lines.append(f"| {kind} | {one:,} | {total:,} | {millions} | {printed} | {verdict} |")
    return "\n".join(lines)


def translation_table() -> str:
    """The fourteen translation cells of the paper beside the computed counts."""
    lines = [
        "Translation: three attention sublayers for each encoder and decoder layer, no biases",
        "| model | layers | M | H | kind | computed | printed | |",
        "|---|---|---:|---:|---|---:|---:|---|",
    ]
    for row in published.TRANSLATION:
        for kind in ("mha", "mhe_mul"):
            one = parameters(kind, Shape.of(row.features, row.heads))
            total = one * published.TRANSLATION_SUBLAYERS * row.layers
            printed = getattr(row, kind)
            verdict = "equal" if total == printed else "differs"
            lines.append(
                f"| {row.name} | {row.layers}+{row.layers} | {row.features} | {row.heads} | {kind} "
                f"| {total:,} | {printed:,} | {verdict} |"
            )
    return "\n".join(lines)


def cost_table() -> str:
    """Parameters, cache and operations of one sublayer, for every kind."""
    shape = Shape.of(768, 12, kv_heads=4)
    lines = [
        "One sublayer: M = 768, H = 12, D = 64 (gqa with 4 key and value heads), 512 keys",
        "| kind | parameters | cached numbers per token | forward FLOPs per token |",
        "|---|---:|---:|---:|",
    ]
    for kind in typing.get_args(Kind):
        flops = forward_flops(kind, shape, keys=512)
        lines.append(
            f"| {kind} | {parameters(kind, shape):,} | {cached_numbers(kind, shape):,} "
            f"| {flops:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(encoder_table(), translation_table(), cost_table(), sep="\n\n")
