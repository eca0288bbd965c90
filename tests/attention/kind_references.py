"""What the tests know of each kind: its equations, its parameters, its cache and its cases.

A new kind has its line in `KINDS`, and its equations as a function: from the parameters and the
inputs to queries, keys and values of head h, each with its pull (see `reference`). Written from the
papers; nothing here calls `mhe_jax` or jax.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from reference import (
    add,
    joined,
    layer_norm,
    mapped,
    mixed,
    multiply,
    part,
    partly,
    projected,
    rms_norm,
    sliced,
    times,
)

ROLES = ("query", "key", "value")


class Kind(NamedTuple):
    """One kind; `case` has heads, width (H·D), head_features (D) and the numbers of its fields."""

    head: Callable  # (params, grads, (x, dx) of queries, keys and values, h, heads) -> q, k, v
    kernels: Callable[[Any], dict[str, tuple]]  # of a case: the shape of each projection's kernel
    cached: Callable[[Any], int]  # of a case: cached numbers for a token
    cases: list[dict]  # fields of `attention_cases.Case`; () for none
    tables: Callable[[Any], dict[str, Any]] = lambda case: {}  # shapes of other parameters
    unbiased: tuple[str, ...] = ()  # projections that never have a bias
    turned: Callable[[Any], int | None] = lambda case: None  # last features that turn; None: all


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


def mixed_queries(params, grads, x, h, heads):
    """X W_q ⊙ m[h], m = 1 + e, against X W_k and X W_v[h]."""
    query, key, value = one_projection(params, grads, x, h, heads)
    e, de = (tree["query_head_embedding"][h] for tree in (params, grads))
    return multiply(*query, e, de), key, value


def low_rank_queries(params, grads, x, h, heads):
    """norm(X W_dq) W_uq[h] against one key and one value head, or values K + α ⊙ (K N)."""

    def of(name):
        return params[name], grads[name]

    scale, d_scale = (tree["query_latent_norm"]["scale"] for tree in (params, grads))
    latent = rms_norm(*projected(*of("query_latent"), *x[0]), scale, d_scale)
    query, key = mapped(*of("query"), *latent, h), projected(*of("key"), *x[1], 0)
    if "value_scale" not in params:
        return query, key, projected(*of("value"), *x[2], 0)
    k, pull_k = projected(*of("key"), *x[2], 0)
    rest, pull_rest = mapped(*of("key_to_value"), k, pull_k)
    alpha, d_alpha = of("value_scale")

    def pull(dv):
        pull_k(dv)
        pull_rest(dv * alpha)
        d_alpha[...] += (dv * rest).sum(0)

    return query, key, (k + alpha * rest, pull)


def half_tied(params, grads, x, h, heads):
    """[first half of X W[g], X W_r] against X W[g]; a norm of each half."""

    def of(name):
        return params[name], grads[name]

    g = h // (heads // params["key_value"]["kernel"].shape[1])
    half = params["key"]["kernel"].shape[1]
    tied = part(*projected(*of("key_value"), *x[1], g), slice(half))
    key = joined(*tied, *projected(*of("key"), *x[1]))
    if "tied_ln" in params:
        key = partly(layer_norm, slice(half), *key, *of("tied_ln"))
        key = partly(layer_norm, slice(half, None), *key, *of("rotary_ln"))
    return projected(*of("query"), *x[0], h), key, projected(*of("key_value"), *x[2], g)


def latents(params, grads, x, h, heads, calibrated=False):
    """[c W_uk[h], y W_kr] and c W_uv[h] of c = norm(y W), the latent of the head's group."""

    def of(name):
        return params[name], grads[name]

    def normed(name, latent, cut=slice(None)):
        scale, d_scale = (tree[name]["scale"].reshape(-1)[cut] for tree in (params, grads))
        inputs = len(params[name.removesuffix("_norm")]["kernel"])
        factor = (inputs / scale.size) ** 0.5 if calibrated else 1.0
        return times(*rms_norm(*part(*latent, cut), scale, d_scale), factor)

    width = len(params["key"]["kernel"])
    g = h // (heads * width // params["latent_norm"]["scale"].size)
    key, value = (
        mapped(
            *of(role),
            *normed(
                "latent_norm",
                projected(*of("latent"), *x[i]),
                slice(g * width, (g + 1) * width),
            ),
            h,
        )
        for i, role in ((1, "key"), (2, "value"))
    )
    if "rotary_key" in params:
        key = joined(*key, *projected(*of("rotary_key"), *x[1]))
    h %= params["query"]["kernel"].shape[1]
    if "query_latent" not in params:
        return projected(*of("query"), *x[0], h), key, value
    latent = normed("query_latent_norm", projected(*of("query_latent"), *x[0]))
    return mapped(*of("query"), *latent, h), key, value


def latents_of_branches(params, grads, x, h, heads):
    """`latents` for every head of each of b branches, which are added up, over √b."""
    query, key, value = latents(params, grads, x, h, heads, calibrated=True)
    branches = heads // len(params["out"]["kernel"])
    return query, key, times(*value, branches**-0.5)


def decoded_latents(params, grads, x, h, heads):
    """The values of head h: its features of copies of the latent, and what W_d[h] makes of it."""

    def of(name):
        return params[name], grads[name]

    D, G = (params["query"]["kernel"].shape[i] for i in (2, 1))
    g, h_in_group = divmod(h, heads // G)
    k = g // (G // params["key"]["kernel"].shape[1])
    latent, pull_latent = projected(*of("value"), *x[2], k)
    features = (h_in_group * D + np.arange(D)) % latent.shape[1]
    made, pull_made = mapped(*of("decoder"), latent, pull_latent, h)

    def pull(dv):
        pull_made(dv)
        copies = np.zeros_like(latent)
        np.add.at(copies, (slice(None), features), dv)
        pull_latent(copies)

    query, key = projected(*of("query"), *x[0], g), projected(*of("key"), *x[1], k)
    return query, key, (latent[:, features] + made, pull)


def sums_of_products(params, grads, x, h, heads):
    """1/R Σ_i a_i[h] b_i, a number times D of them, both of the input."""

    def role_of(role, *of):
        basis = params[f"{role}_basis"], grads[f"{role}_basis"]
        terms = [projected(*basis, *of, i) for i in range(basis[0]["kernel"].shape[1])]
        return mixed(*projected(params[role], grads[role], *of, h), terms)

    return [role_of(role, *x[i]) for i, role in enumerate(ROLES)]


def _group(p, h, heads):
    """Which of G projections head h reads; None where there is one for all."""
    kernel = p["kernel"]
    return None if kernel.ndim == 2 else h // (heads // kernel.shape[1])


def _heads(case, number, *names):
    return {name: (case.width, number, case.head_features) for name in names}


def _thin(case):
    return case.score_features // case.heads if case.score_features else case.head_features


def _with_thin_keys(case, number):
    own = {"query": (case.width, case.heads, _thin(case)), "key": (case.width, number, _thin(case))}
    return own | _heads(case, number, "value")


def _shared(case, width, *names):
    groups = (case.groups,) if case.groups else ()
    return {name: (case.width, *groups, width) for name in names}


def _of_low_rank(case):
    rank, C = _more(case, "query_rank") or case.head_features, case.head_features
    own = {"query_latent": (case.width, rank), "query": (rank, case.heads, C)}
    if _more(case, "reuse_keys"):
        return own | _heads(case, 1, "key") | {"key_to_value": (C, C)}
    return own | _heads(case, 1, "key", "value")


def _more(case, name):
    return dict(case.more).get(name)


def _tables(case):
    D = case.head_features
    tables = {f"{role}_head_embedding": (case.heads, D) for role in ROLES}
    return tables | ({"query_group_embedding": (case.score_groups, D)} if case.score_groups else {})


def _latent_numbers(case):
    """Latent groups and the width of each, the rank of queries, and features that turn."""
    fields, groups = dict(case.more), case.latent_groups or _more(case, "latent_groups") or 1
    width = fields["latent_features"] // groups
    return groups, width, fields.get("query_rank"), fields["rotary_features"] * case.rotated


def _latent_kernels(case):
    groups, width, rank, _ = _latent_numbers(case)
    of_head = case.heads, case.head_features
    kernels = {"latent": (case.width, groups * width), "query": (rank or case.width, *of_head)}
    kernels |= dict.fromkeys(("key", "value"), (width, case.readers, case.head_features))
    return kernels | ({"query_latent": (case.width, rank)} if rank else {})


def _latent_norms(case):
    groups, width, rank, _ = _latent_numbers(case)
    scales = {"latent_norm": {"scale": (groups, width) if groups > 1 else (width,)}}
    return scales | ({"query_latent_norm": {"scale": (rank,)}} if rank else {})


def _latent_cached(case):
    groups, width, _, turning = _latent_numbers(case)
    return groups * width + turning


def _factors(case):
    H, D = case.heads, case.head_features
    kernels = {}
    for role in ROLES:
        rank = dict(case.more)[f"{role}_rank"]
        kernels |= {role: (case.width, H, rank), f"{role}_basis": (case.width, rank, D)}
    return kernels


def _decoded_kernels(case):
    G, width = (_more(case, name) for name in ("num_groups", "latent_features"))
    own = _heads(case, G, "query") | _heads(case, case.kv_heads, "key")
    own |= _heads(case, case.heads, "gate")
    own["value"] = (case.width, case.kv_heads, width)
    return own | {"decoder": (width, case.heads, case.head_features)}


# Even, since meshes split a latent that heads are made of.
LATENTS = ("latent_features", 14), ("query_rank", 10), ("rotary_features", 6)
TWO_LATENTS = ("latent_features", 28), ("rotary_features", 6)
BRANCHES = *TWO_LATENTS, ("latent_groups", 2), ("query_rank", 10)
TWO_BRANCHES = ("latent_features", 24), ("rotary_features", 6), ("latent_branches", 2)
DECODED = ("num_groups", 4), ("latent_features", 4)
RANKS = ("query_rank", 8), ("key_rank", 4), ("value_rank", 6)


def _in_forms(forms, *cases):
    return [{"form": form, **case} for case in cases for form in forms]


def _mhe(psi, forms, *cases):
    return Kind(
        head_embeddings(psi),
        lambda c: _shared(c, c.head_features, *ROLES),
        lambda c: 2 * (c.groups or 1) * c.head_features,
        _in_forms(forms, *cases),
        _tables,
    )


def _shared_scores(head, cases, tables=lambda case: {}):
    def width(c):
        return c.score_features or c.head_features

    def kernels(c):
        bias = {"key_bias": (c.width, c.heads)} if has_bias(c) else {}
        return bias | _heads(c, c.heads, "value") | _shared(c, width(c), "query", "key")

    def cached(c):
        return (c.groups or 1) * width(c) + c.width + c.heads * has_bias(c)

    def has_bias(c):
        return _more(c, "use_key_bias") is None

    # A bias of the key bias would move all scores of a head alike.
    return Kind(head, kernels, cached, cases, tables, unbiased=("key_bias",))


def _of_latents(head, *cases):
    of_forms = _in_forms(("absorbed", "materialized"), *cases)
    plain = "query", "key", "value"  # so that they are absorbed
    return Kind(head, _latent_kernels, _latent_cached, of_forms, _latent_norms, unbiased=plain)


KINDS = {
    "mha": Kind(
        own_heads,
        lambda c: _with_thin_keys(c, c.heads),
        lambda c: (c.score_features or c.width) + c.width,
        [{}, {"score_features": 12}],
    ),
    "sha": Kind(
        one_projection,
        lambda c: _shared(c, c.head_features, *ROLES),
        lambda c: 2 * c.head_features,
        [{}],
    ),
    "mqa": Kind(
        own_heads,
        lambda c: _with_thin_keys(c, 1),
        lambda c: 2 * c.head_features,
        [{}],
    ),
    "gqa": Kind(
        own_heads,
        lambda c: _with_thin_keys(c, c.kv_heads),
        lambda c: c.kv_heads * (_thin(c) + c.head_features),
        [
            {"kv_heads": 1},
            {"heads": 6, "kv_heads": 2},
            {"heads": 6, "kv_heads": 3, "score_features": 42},
        ],
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
        ("shared", "folded", "materialized"),
        {},
        {"heads": 6, "groups": 2},
        {"heads": 6, "score_groups": 3},
    ),
    "mhe_mul": _mhe(multiply, ("folded", "materialized"), {}, {"heads": 6, "groups": 3}),
    "mva": _shared_scores(
        one_projection,
        _in_forms(
            ("shared", "materialized"),
            {"score_features": 13},
            {"heads": 6, "groups": 2},
            {"heads": 6, "groups": 3, "more": (("use_key_bias", False),)},
        ),
    ),
    "collaborative": _shared_scores(
        mixed_queries,
        [{"score_features": 13}, {"heads": 6, "groups": 2}],
        lambda c: {"query_head_embedding": (c.heads, c.score_features or c.head_features)},
    ),
    "mfa": Kind(
        low_rank_queries,
        _of_low_rank,
        lambda c: (1 if _more(c, "reuse_keys") else 2) * c.head_features,
        [{"more": (("query_rank", 14),)}, {"more": (("reuse_keys", True),)}],
        lambda c: (
            {"query_latent_norm": {"scale": (_more(c, "query_rank") or c.head_features,)}}
            | ({"value_scale": (c.head_features,)} if _more(c, "reuse_keys") else {})
        ),
        unbiased=("query", "key_to_value"),
    ),
    "gta": Kind(
        half_tied,
        lambda c: (
            _heads(c, c.heads, "query")
            | _heads(c, c.kv_heads, "key_value")
            | {"key": (c.width, c.head_features // 2)}
        ),
        lambda c: c.kv_heads * c.head_features + c.head_features // 2,
        [
            {"heads": 6, "kv_heads": 2, "head_features": 14},
            {"kv_heads": 1, "head_features": 14},
            {"heads": 6, "kv_heads": 3, "head_features": 14},
        ],
        turned=lambda c: c.head_features // 2,
    ),
    "mla": _of_latents(
        latents, {"more": LATENTS}, {"heads": 6, "latent_groups": 2, "more": TWO_LATENTS}
    ),
    "mlra": _of_latents(
        latents_of_branches,
        {"more": BRANCHES},
        {"heads": 6, "latent_groups": 4, "more": TWO_BRANCHES},
    ),
    "ghla": Kind(
        decoded_latents,
        _decoded_kernels,
        lambda c: c.kv_heads * (c.head_features + _more(c, "latent_features")),
        [
            {"heads": 8, "kv_heads": 2, "head_features": 6, "more": DECODED},
            {
                "heads": 6,
                "kv_heads": 1,
                "head_features": 14,
                "more": (("num_groups", 2), ("latent_features", 21)),
            },
        ],
        unbiased=("decoder",),
    ),
    "tpa": Kind(
        sums_of_products,
        _factors,
        lambda c: (
            sum(dict(c.more)[n] for n in ("key_rank", "value_rank")) * (c.heads + c.head_features)
        ),
        [{"form": "factored", "more": RANKS}, {"form": "materialized", "more": RANKS}],
    ),
}
