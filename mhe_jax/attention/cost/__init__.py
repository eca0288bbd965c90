"""The cost of each attention kind in closed form: parameters, cached numbers, operations.

Each function takes a module, as `make_attention` makes it, and the width M of its input.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Widths:
    """How kinds differ: numbers per token, and other parameters."""

    query: int  # made by the query projection
    key: int  # made by the key projection
    value: int  # made by the value projection
    cached: int  # held by the cache for a token
    scored: int  # multiply-adds for the scores of one query and one key
    weighted: int  # multiply-adds for one query's sums over one key's values
    tables: int = 0  # numbers in head embeddings, in the norms of latents and the like
    unbiased: int = 0  # made by a projection that never has a bias
    inner: int = 0  # in matrices between the projections: each is one multiply-add per token
    mixed: int = 0  # multiply-adds per token beyond one for each parameter


class Costed(Protocol):
    """The part of an attention module that determines its cost."""

    num_heads: int
    qkv_features: int | None
    out_features: int | None
    use_bias: bool

    def widths(self, head_features: int) -> Widths:
        """The row of the module's kind for heads of width D, in its cheapest form."""
        ...


def parameters(module: Costed, features: int) -> int:
    """Parameters of one sublayer: projections, their biases if any, tables and scales.

    The scales of `normalize_qk` are left out.

    Examples:
      >>> from mhe_jax.attention import make_attention
      >>> parameters(make_attention("mhe_mul", num_heads=12, use_bias=False), features=768)
      739584
    """
    D = _head_features(module, features)
    row = module.widths(D)
    projected = row.query + row.key + row.value
    made = module.out_features or features
    out = module.num_heads * D * made
    biases = projected + made if module.use_bias else 0
    return (projected + row.unbiased) * features + row.inner + out + row.tables + biases


def cached_numbers(module: Costed, features: int) -> int:
    """Numbers that the cache holds for each token.

    Examples:
      >>> from mhe_jax.attention import make_attention
      >>> [cached_numbers(make_attention(k, num_heads=12), 768) for k in ("mhe_mul", "mha")]
      [128, 1536]
    """
    return module.widths(_head_features(module, features)).cached


def forward_flops(module: Costed, features: int, keys: int) -> int:
    """Operations of the forward pass for one token that attends to `keys` keys (mean, if masked).

    Two for each multiply-add of the projections, and of the core for each key. `mva`, and MHE-Add
    where it can, count in the form `shared`, and with `decode`, `mla` and `tpa` count in the form
    for one query. Rotation is negligible and left out. The backward pass is twice that.

    Examples:
      >>> from mhe_jax.attention import make_attention
      >>> forward_flops(make_attention("mha", num_heads=12), features=768, keys=512)
      6291456
    """
    D = _head_features(module, features)
    row = module.widths(D)
    projected = row.query + row.key + row.value + row.unbiased
    out = module.num_heads * D * (module.out_features or features)
    of_token = projected * features + out + row.inner + row.mixed
    return 2 * (of_token + keys * (row.scored + row.weighted))


def _head_features(module: Costed, features: int) -> int:
    """D."""
    return (module.qkv_features or features) // module.num_heads
