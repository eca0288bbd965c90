"""Parameters of each kind that come closest to given heads; in closed form where there is one.

They minimize the differences of scores, `Σ_h ‖L (Q[h] K[h]ᵀ - Q'[h] K'[h]ᵀ) P‖²`, and of what is
added to the output, `Σ_h ‖P' (V[h] O[h] - V'[h] O'[h])‖²`, where LᵀL, PP and P'P' are the moments
of the inputs. Only the products matter: any invertible map of a head's keys that its queries undo,
or of its values that W_o undoes, leaves a head as it is, and so does another order of the heads.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from mhe_jax.attention.conversion.factors import (
    align,
    common_factor,
    group,
    left_out,
    parafac,
    root,
)
from mhe_jax.attention.conversion.heads import Heads
from mhe_jax.attention.conversion.latents import latent_heads, low_rank_queries
from mhe_jax.attention.conversion.scores import (
    Moments,
    Parameters,
    Scores,
    Target,
    balance,
    filled,
    grams,
    last,
    norm,
    pair,
    shared_values,
    size_of,
    stacked,
)
from mhe_jax.attention.conversion.tensor_products import constant_factors
from mhe_jax.attention.conversion.tied import tied_states

# Projections that never have a bias.
UNBIASED = {
    "mva": ("key_bias",),
    "collaborative": ("key_bias",),
    "mfa": ("query", "key_to_value"),
    "mla": ("query", "key", "value"),
}


def closest(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """Parameters of the module `target` that come closest to what the heads do, as float64."""
    params = TARGETS[target.kind](heads, target, moments)
    if target.use_bias:
        for name, projection in params.items():
            if "kernel" not in projection or name in UNBIASED.get(target.kind, ()):
                continue
            contracted = 2 if name == "out" else 1
            projection.setdefault("bias", np.zeros(projection["kernel"].shape[contracted:]))
        params["out"]["bias"] = heads.bias
    else:
        for projection in params.values():
            if isinstance(projection, dict):
                projection.pop("bias", None)
    return params


def own_heads(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`mha`: every head as it is, where the scores are no wider than D; else the best of rank D."""
    D, R = target.width, heads.query.shape[-1]
    query, key = heads.query, heads.key
    if R > D:
        scores = Scores(heads, moments, use_bias=True)
        pairs = [pair(form[None], D, scores) for form in scores.forms]
        query = np.concatenate([np.concatenate([k, b[:, None]], 1) for k, b, _ in pairs])
        key = np.stack([found for _, _, found in pairs])
    elif R < D:
        query, key = filled(query, key, D)
    query = query * D**0.5
    return {
        "query": {"kernel": last(query[:, :-1]), "bias": query[:, -1]},
        "key": {"kernel": last(key)},
        "value": {"kernel": last(heads.value)},
        "out": {"kernel": heads.out},
    }


def grouped(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`gqa` and `mqa`: keys and values that the heads of a group share, queries of each head.

    Keys are the best common row space of width D of the group's stacked Q[h] K[h]ᵀ, values the best
    common column space of its V[h] O[h]. No mean of heads, aligned by any maps, comes closer.
    """
    D, H = target.width, len(heads.query)
    K = 1 if target.kind == "mqa" else target.num_kv_heads
    if K == H:
        return own_heads(heads, target, moments)
    heads = _in_groups(heads, K, target, moments)
    scores = Scores(heads, moments, target.use_bias)
    found = [pair(one, D, scores) for one in np.split(scores.forms, K)]
    value, out = shared_values(heads, K, D, moments)
    return {
        "query": {
            "kernel": last(np.concatenate([q for q, _, _ in found])) * D**0.5,
            "bias": np.concatenate([b for _, b, _ in found]) * D**0.5,
        },
        "key": {"kernel": np.stack([k for _, _, k in found], 1)},
        "value": {"kernel": np.stack(value, 1)},
        "out": {"kernel": out},
    }


def one_head(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`sha`: the mean of all scores, and the sum of what heads add, at width D."""
    D, H = target.width, len(heads.query)
    scores = Scores(heads, moments, target.use_bias)
    query, bias, key = pair(scores.forms.mean(0)[None], D, scores)
    whole = dataclasses.replace(heads, value=heads.maps.sum(0)[None], out=_eye(heads)[None])
    (value,), out = shared_values(whole, 1, D, moments)
    return {
        "query": {"kernel": query[0] * D**0.5, "bias": bias[0] * D**0.5},
        "key": {"kernel": key},
        "value": {"kernel": value},
        "out": {"kernel": np.repeat(out / H, H, 0)},
    }


def shared_key_values(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`skv`: for each head, the best common columns of keys and values, both counted alike."""
    D = target.width
    moments = dataclasses.replace(moments, key=moments.value)
    scores = Scores(heads, moments, target.use_bias)
    queries, biases, keys, outs = [], [], [], []
    for form, added in zip(scores.forms, scores.key @ heads.maps, strict=True):
        parts = [form / norm(form), added.T / norm(added)]
        U = common_factor(np.concatenate(parts), D)
        query, bias = scores.queries(form @ U)
        queries.append(query)
        biases.append(bias)
        keys.append(scores.key_inverse @ U)
        outs.append(U.T @ added)
    return {
        "query": {"kernel": np.stack(queries, 1) * D**0.5, "bias": np.stack(biases) * D**0.5},
        "key_value": {"kernel": np.stack(keys, 1)},
        "out": {"kernel": np.stack(outs)},
    }


def hidden_states(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`el`: least squares of each head's scores and values by a slice of the inputs."""
    D, (H, N) = target.width, heads.key.shape[:2]
    scores = Scores(heads, moments, target.use_bias)
    slices = [np.eye(N)[:, i * D : (i + 1) * D] for i in range(H)]
    value, _ = root(moments.value)
    seen, added = [scores.key @ one for one in slices], [value @ one for one in slices]
    maps = value @ heads.maps

    def fit(h: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        query = np.linalg.lstsq(seen[i], scores.forms[h].T, rcond=None)[0].T
        return query, np.linalg.lstsq(added[i], maps[h], rcond=None)[0]

    def cost(pair: tuple[int, ...]) -> float:
        h, i = pair
        query, out = fit(h, i)
        missed = norm(scores.forms[h] - query @ seen[i].T) / norm(scores.forms[h])
        return float(missed**2 + (norm(maps[h] - added[i] @ out) / norm(maps[h])) ** 2)

    order = _assign(np.array([[cost((h, i)) for i in range(H)] for h in range(H)]))
    fits = [fit(h, i) for i, h in enumerate(order)]
    query, bias = scores.queries(np.stack([q for q, _ in fits]))
    return {
        "query": {"kernel": last(query) * D**0.5, "bias": bias * D**0.5},
        "out": {"kernel": np.stack([out for _, out in fits])},
    }


def head_embeddings(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`mhe_add` and `mhe_mul`: queries, keys and values that a group of heads shares.

    Scores of `mhe_mul` are W_q diag((1 + e_q[h]) (1 + e_k[h])) W_kᵀ, those of `mhe_add` are one
    form for all and a bias of keys, e_q[h] W_kᵀ, for each; W_o can absorb all of e_v.
    """
    D, H, G = target.width, len(heads.query), target.num_groups
    C = max(G, target.score_groups)
    heads = _in_groups(heads, C, target, moments)
    scores = Scores(heads, moments, target.use_bias)
    kernels, biases, keys, tables = [], [], [], {"query": np.zeros((H, D))}
    for g in range(G):
        own = slice(g * H // G, (g + 1) * H // G)
        if target.kind == "mhe_mul":
            start = _aligned(heads, own, D, scores)
            found, factors, key, _ = parafac(scores.forms[own], D, start)
            scale = balance(found, key)
            found, key = found * scale, key / scale
            kernel, bias = scores.queries(found)
            tables["query"][own] = factors - 1
        else:
            n = H // C
            means = [rest.mean(0) * n**0.5 for rest in np.split(scores.rest[own], C // G)]
            if C == G:
                both = np.concatenate([means[0], scores.mean[own]])
                key = common_factor(both, D)
                found, factors, rows = means[0] @ key, np.ones((1, D)), scores.mean[own] @ key
            else:
                found, factors, key, rows = parafac(np.stack(means), D, (), scores.mean)
            scale = balance(found / n**0.5, key)
            found, key, rows = found * scale / n**0.5, key / scale, rows * scale
            kernel, bias = scores.queries_about_mean(found), np.zeros(D)
            factors = np.repeat(factors, n, 0)
            tables["query"][own] = rows - (scores.mu @ kernel) * factors
        kernels.append(kernel)
        biases.append(bias)
        keys.append(scores.key_inverse @ key)
        if C > G:
            tables["query_group"] = factors[:: H // C] - 1
    values, out = shared_values(heads, G, D, moments)
    scale = D**0.5
    params: Parameters = {
        "query": {"kernel": stacked(kernels) * scale, "bias": stacked(biases, 0) * scale},
        "key": {"kernel": stacked(keys)},
        "value": {"kernel": stacked(values)},
        "out": {"kernel": out},
        "key_head_embedding": np.zeros((H, D)),
        "value_head_embedding": np.zeros((H, D)),
    }
    if target.kind == "mhe_add":
        tables["query"] = tables["query"] * scale
        if not target.use_bias and np.any(heads.bias):
            flat = np.linalg.lstsq(out.reshape(-1, out.shape[-1]).T, heads.bias, rcond=None)[0]
            params["value_head_embedding"] = flat.reshape(H, D)
    params["query_head_embedding"] = tables["query"]
    if "query_group" in tables:
        params["query_group_embedding"] = tables["query_group"]
    return params


def one_score(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`mva`: values and W_o as they are; as scores the mean of those of a group, at width D_s.

    The bias of each head's keys has what its mean query adds, all of it, and so all of its bias.
    """
    G = target.num_groups
    R = target.score_features or target.width
    heads = _in_groups(heads, G, target, moments)
    scores = Scores(heads, moments, target.use_bias)
    kernels, keys, biases = [], [], []
    for rest, mean in zip(np.split(scores.rest, G), np.split(scores.mean, G), strict=True):
        U = common_factor(rest.mean(0), R)
        found, key = rest.mean(0) @ U, U
        scale = balance(found, key)
        kernel = scores.queries_about_mean(found * scale)
        key = scores.key_inverse @ (key / scale)
        kernel, key = filled(kernel, key, R)
        kernels.append(kernel * R**0.5)
        keys.append(key)
        biases.append(scores.key_inverse @ mean.T - (key @ (scores.mu @ kernel))[:, None])
    return {
        "query": {"kernel": stacked(kernels)},
        "key": {"kernel": stacked(keys)},
        "key_bias": {"kernel": np.concatenate(biases, 1)},
        "value": {"kernel": last(heads.value)},
        "out": {"kernel": heads.out},
    }


def mixed_scores(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`collaborative`: values and W_o as they are; scores W_q diag(1 + e[h]) W_kᵀ by PARAFAC.

    The bias of each head's keys has what its mean query adds, all of it, and so all of its bias.
    """
    G, R = target.num_groups, target.score_features or target.width
    heads = _in_groups(heads, G, target, moments)
    scores = Scores(heads, moments, target.use_bias)
    kernels, keys, factors, biases = [], [], [], []
    for rest, mean in zip(np.split(scores.rest, G), np.split(scores.mean, G), strict=True):
        found, mixing, key = _mixed(rest, R, heads.key.shape[-1])
        scale = balance(found, key)
        kernel = scores.queries_about_mean(found * scale)
        key = scores.key_inverse @ (key / scale)
        mixing = np.pad(mixing, ((0, 0), (0, R - mixing.shape[1])), constant_values=1)
        kernel, key = filled(kernel, key, R)
        biases.append(scores.key_inverse @ mean.T - key @ ((scores.mu @ kernel) * mixing).T)
        kernels.append(kernel * R**0.5)
        keys.append(key)
        factors.append(mixing)
    return {
        "query": {"kernel": stacked(kernels)},
        "query_head_embedding": np.concatenate(factors) - 1,
        "key": {"kernel": stacked(keys)},
        "key_bias": {"kernel": np.concatenate(biases, 1)},
        "value": {"kernel": last(heads.value)},
        "out": {"kernel": heads.out},
    }


def _mixed(forms: np.ndarray, rank: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [M, R], s [n, R] and K [N, R] of `forms[h] ≈ A diag(s[h]) Kᵀ` [n, M, N], R at most `rank`.

    Where there is room for every head's singular vectors, `width` per head, these are used,
    exactly.
    """
    u, d, vt = np.linalg.svd(forms, full_matrices=False)
    width = min(width, d.shape[1])
    chosen = np.argsort(-d[:, :width], None, kind="stable")[:rank]
    h, i = np.unravel_index(chosen, (len(forms), width))
    A = u[h, :, i].T * d[h, i]
    if rank < len(forms) * width:
        return parafac(forms, rank, [A])[:3]
    size = len(forms) ** 0.5  # s has mean square 1, as in `parafac`
    own = np.arange(len(forms))[:, None] == h
    return A / size, own * size, vt[h, i].T


def _in_groups(heads: Heads, groups: int, target: Target, moments: Moments) -> Heads:
    """The heads in an order in which neighbours share best."""
    H, D = len(heads.query), target.width
    if groups in (1, H):
        return heads
    scores = Scores(heads, moments, target.use_bias)
    own_values = target.kind in ("mva", "collaborative")
    R = target.score_features or D if own_values else D
    means = target.kind in ("mhe_add", "mva")  # one form for all, and a bias of keys for each
    score_grams = grams(scores.forms)
    value_grams = grams((root(moments.value)[0] @ heads.maps).swapaxes(1, 2))
    scored, valued = size_of(score_grams), size_of(value_grams)

    def cost(one: tuple[int, ...]) -> float:
        own = list(one)
        if means:
            rest = scores.rest[own]
            mean = rest.mean(0)
            kept = len(own) * (np.sum(mean**2) - left_out(mean.T @ mean, R))
            missed = (np.sum(rest**2) - kept) / scored
        else:
            missed = left_out(score_grams[own].sum(0), R) / scored
        if own_values or target.score_groups > 1:
            return float(missed)  # values are not shared by these groups
        return float(missed + left_out(value_grams[own].sum(0), D) / valued)

    return heads.ordered(group(H, groups, cost))


def _aligned(heads: Heads, own: slice, D: int, scores: Scores) -> list[np.ndarray]:
    """A start for `parafac`: heads rotated to each other, and what they share of each column."""
    if heads.query.shape[-1] != D:
        return []
    found = scores.forms[own] @ scores.key_inverse @ np.linalg.pinv(heads.key[own].swapaxes(1, 2))
    keys = scores.key @ heads.key[own]
    size = np.sqrt(norm(found) / norm(keys))
    turned = np.concatenate([found / size, keys * size], 1)
    turned = (turned @ align(turned))[:, : found.shape[1]]
    u, _, _ = np.linalg.svd(turned.transpose(2, 1, 0), full_matrices=False)
    return [u[:, :, 0].T]


def _assign(costs: np.ndarray) -> list[int]:
    """The head [i] for each slice i, by exchanges of two as long as one helps."""
    order = list(range(len(costs)))
    while True:
        gains = {
            (i, j): costs[order[j], i]
            + costs[order[i], j]
            - costs[order[i], i]
            - costs[order[j], j]
            for i in order
            for j in range(i)
        }
        pair = min(gains, key=lambda one: gains[one], default=None)
        if pair is None or gains[pair] > -1e-9:
            return order
        i, j = pair
        order[i], order[j] = order[j], order[i]


def _eye(heads: Heads) -> np.ndarray:
    return np.eye(heads.out.shape[-1])


TARGETS: dict[str, Callable[[Heads, Target, Moments], Parameters]] = {
    "mha": own_heads,
    "sha": one_head,
    "mqa": grouped,
    "gqa": grouped,
    "skv": shared_key_values,
    "el": hidden_states,
    "mhe_add": head_embeddings,
    "mhe_mul": head_embeddings,
    "mva": one_score,
    "collaborative": mixed_scores,
    "mfa": low_rank_queries,
    "gta": tied_states,
    "mla": latent_heads,
    "tpa": constant_factors,
}
