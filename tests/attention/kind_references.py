"""What the tests know of each kind: its equations, its parameters, its cache and its cases.

A new kind has its line in `KINDS`, and its equations as a function: from the parameters and the
inputs to queries, keys and values of head h, each with its pull (see `reference`). Written from the
papers; nothing here calls `mhe_jax` or jax.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from reference import add, multiply, projected, sliced

ROLES = ("query", "key", "value")


class Kind(NamedTuple):
    """One kind; `case` has heads, width (H·D), head_features (D) and the numbers of its fields."""

    head: Callable  # (params, grads, (x, dx) of queries, keys and values, h, heads) -> q, k, v
    kernels: Callable[[Any], dict[str, tuple]]  # of a case: the shape of each projection's kernel
    cached: Callable[[Any], int]  # of a case: cached numbers for a token
    cases: list[dict]  # fields of `attention_cases.Case`; () for none
    tables: Callable[[Any], dict[str, Any]] = lambda case: {}  # shapes of other parameters
    unbiased: tuple[str, ...] = ()  # projections that never have a bias


def own_heads(params, grads, x, h, heads):
    """X W[h]; query heads 0 .. H/K-1 read key head 0, the next H/K read key head 1, and so on."""
    g = h // (heads // params["key"]["kernel"].shape[1])
    return [
        projected(params[role], grads[role], *x[i], h if role == "query" else g)
        for i, role in enumerate(ROLES)
    ]


def one_projection(params, grads, x, h, heads):
    """X W with one kernel for all heads, or one for each group of heads."""
    return [
        projected(params[role], grads[role], *x[i], _group(params[role], h, heads))
        for i, role in enumerate(ROLES)
    ]


def key_is_value(params, grads, x, h, heads):
    """K_h = V_h = X W[h]."""
    names = "query", "key_value", "key_value"
    return [projected(params[n], grads[n], *x[i], h) for i, n in enumerate(names)]


def hidden_states(params, grads, x, h, heads):
    """K_h = V_h = slice h of X."""
    query = projected(params["query"], grads["query"], *x[0], h)
    return query, *(sliced(*x[i], h, heads) for i in (1, 2))


def head_embeddings(psi):
    """ψ(X W, e[h]) of each role; with groups of scores, queries X W ⊙ (1 + u[c]) before that."""

    def head(params, grads, x, h, heads):
        steps = one_projection(params, grads, x, h, heads)
        if "query_group_embedding" in params:
            c = h // (heads // len(params["query_group_embedding"]))
            u, du = (tree["query_group_embedding"][c] for tree in (params, grads))
            steps[0] = multiply(*steps[0], u, du)
        names = [f"{role}_head_embedding" for role in ROLES]
        return [psi(*s, params[n][h], grads[n][h]) for s, n in zip(steps, names, strict=True)]

    return head


def _group(p, h, heads):
    """Which of G projections head h reads; None where there is one for all."""
    kernel = p["kernel"]
    return None if kernel.ndim == 2 else h // (heads // kernel.shape[1])


def _heads(case, number, *names):
    return {name: (case.width, number, case.head_features) for name in names}


def _shared(case, width, *names):
    groups = (case.groups,) if case.groups else ()
    return {name: (case.width, *groups, width) for name in names}


def _tables(case):
    D = case.head_features
    tables = {f"{role}_head_embedding": (case.heads, D) for role in ROLES}
    return tables | ({"query_group_embedding": (case.score_groups, D)} if case.score_groups else {})


def _mhe(psi, cases):
    return Kind(
        head_embeddings(psi),
        lambda c: _shared(c, c.head_features, *ROLES),
        lambda c: 2 * (c.groups or 1) * c.head_features,
        cases,
        _tables,
    )


KINDS = {
    "mha": Kind(own_heads, lambda c: _heads(c, c.heads, *ROLES), lambda c: 2 * c.width, [{}]),
    "sha": Kind(
        one_projection,
        lambda c: _shared(c, c.head_features, *ROLES),
        lambda c: 2 * c.head_features,
        [{}],
    ),
    "mqa": Kind(
        own_heads,
        lambda c: _heads(c, c.heads, "query") | _heads(c, 1, "key", "value"),
        lambda c: 2 * c.head_features,
        [{}],
    ),
    "gqa": Kind(
        own_heads,
        lambda c: _heads(c, c.heads, "query") | _heads(c, c.kv_heads, "key", "value"),
        lambda c: 2 * c.kv_heads * c.head_features,
        [{"kv_heads": 1}, {"heads": 6, "kv_heads": 2}, {"heads": 6, "kv_heads": 3}],
    ),
    "skv": Kind(
        key_is_value,
        lambda c: _heads(c, c.heads, "query", "key_value"),
        lambda c: c.width,
        [{}],
    ),
    "el": Kind(hidden_states, lambda c: _heads(c, c.heads, "query"), lambda c: c.width, [{}]),
    "mhe_add": _mhe(
        add,
        [
            {"form": "materialized"},
            {"form": "folded"},
            {"form": "shared"},
            {"form": "shared", "heads": 6, "groups": 2},
            {"form": "folded", "heads": 6, "groups": 2},
            {"form": "materialized", "heads": 6, "groups": 2},
            {"form": "shared", "heads": 6, "score_groups": 3},
            {"form": "folded", "heads": 6, "score_groups": 3},
            {"form": "materialized", "heads": 6, "score_groups": 3},
        ],
    ),
    "mhe_mul": _mhe(
        multiply,
        [
            {"form": "materialized"},
            {"form": "folded"},
            {"form": "folded", "heads": 6, "groups": 3},
            {"form": "materialized", "heads": 6, "groups": 3},
        ],
    ),
    "mva": Kind(
        one_projection,
        lambda c: (
            _shared(c, c.score_features or c.head_features, "query", "key")
            | _heads(c, c.heads, "value")
            | {"key_bias": (c.width, c.heads)}
        ),
        lambda c: (c.groups or 1) * (c.score_features or c.head_features) + c.width + c.heads,
        [
            {"form": "shared", "score_features": 13},
            {"form": "materialized", "score_features": 13},
            {"form": "shared", "heads": 6, "groups": 2},
            {"form": "materialized", "heads": 6, "groups": 2},
        ],
        unbiased=("key_bias",),  # it would move all scores of a head alike
    ),
}
