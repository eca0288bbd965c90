"""Parameters of each kind that come closest to given heads; in closed form, but for `parafac`.

Least are the differences of scores, `Σ_h ‖L (Q[h] K[h]ᵀ - Q'[h] K'[h]ᵀ) P‖²`, and of what is added
to the output, `Σ_h ‖P' (V[h] O[h] - V'[h] O'[h])‖²`, where LᵀL, PP and P'P' are the moments of the
inputs. Only the products matter: any invertible map of a head's keys that its queries undo, or of
its values that W_o undoes, leaves a head as it is, and so does another order of the heads.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Moments:
    """What the inputs are like."""

    query_mean: np.ndarray  # [M]
    query: np.ndarray  # [M, M], about the mean
    key: np.ndarray  # [N, N], about the mean of the keys that a query sees
    value: np.ndarray  # [N', N'], about 0

    @classmethod
    def unit(cls, heads: Heads) -> "Moments":
        """Of inputs that are not known: independent, of mean 0 and variance 1."""
        M, N, V = heads.query.shape[1] - 1, heads.key.shape[1], heads.value.shape[1]
        return cls(np.zeros(M), np.eye(M), np.eye(N), np.eye(V))


@dataclass(frozen=True)
class Target:
    """The module that parameters are made for; `width` is D, that of each head's values."""

    kind: str
    width: int
    num_kv_heads: int = 1
    num_groups: int = 1
    score_groups: int = 1
    score_features: int | None = None
    use_bias: bool = False


class Scores:
    """The heads' Q[h] K[h]ᵀ in coordinates in which every difference counts the same.

    `forms` [H, M+1, N], or [H, M, N] of a target whose queries have no bias. `rest` [H, M, N] and
    `mean` [H, N] are the same for queries about their mean, and for the mean query.
    """

    def __init__(self, heads: Heads, moments: Moments, use_bias: bool):
        mu, M = moments.query_mean, len(moments.query_mean)
        self.key, self.key_inverse = root(moments.key)
        products = heads.forms @ self.key
        self.mu, (about_mean, self._about_mean) = mu, root(moments.query)
        self.rest = about_mean @ products[:, :-1]
        self.mean = mu @ products[:, :-1] + products[:, -1]
        second = moments.query + np.outer(mu, mu)
        if use_bias:
            second = np.block([[second, mu[:, None]], [mu[None], np.ones((1, 1))]])
        else:
            # The least squares of a constant by the inputs; 0 where their mean is.
            by_inputs = np.linalg.solve(second + 1e-9 * np.trace(second) * np.eye(M) / M, mu)
            products = products[:, :-1] + by_inputs[:, None] * products[:, -1:]
        whole, self._inverse = root(second)
        self.forms = whole @ products

    def queries(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Factors [..., M+1 or M, R] of `forms` as a kernel [..., M, R] and a bias [..., R]."""
        found, M = self._inverse @ found, len(self.mu)
        return found[..., :M, :], found[..., M:, :].sum(-2)

    def queries_about_mean(self, found: np.ndarray) -> np.ndarray:
        """The factor [M, R] of `rest` as a kernel."""
        return self._about_mean @ found


def closest(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """Parameters of the module `target` that does nearest what the heads do, as float64."""
    params = TARGETS[target.kind](heads, target, moments)
    if target.use_bias:
        for name, projection in params.items():
            if name == "key_bias" or "embedding" in name:
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
    """`mha`: every head as it is, where the scores are no wider than D; else its best of rank D."""
    D, R = target.width, heads.query.shape[-1]
    query, key = heads.query, heads.key
    if R > D:
        scores = Scores(heads, moments, use_bias=True)
        pairs = [_pair(form[None], D, scores) for form in scores.forms]
        query = np.concatenate([np.concatenate([k, b[:, None]], 1) for k, b, _ in pairs])
        key = np.stack([found for _, _, found in pairs])
    elif R < D:
        query, key = _filled(query, key, D)
    query = query * D**0.5
    return {
        "query": {"kernel": _last(query[:, :-1]), "bias": query[:, -1]},
        "key": {"kernel": _last(key)},
        "value": {"kernel": _last(heads.value)},
        "out": {"kernel": heads.out},
    }


def grouped(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`gqa` and `mqa`: keys and values that the heads of a group share, queries of each head.

    The stack of the group's Q[h] K[h]ᵀ has the best common row space of width D; so have its
    V[h] O[h] a column space. No mean of heads, aligned by any maps, comes closer.
    """
    D, H = target.width, len(heads.query)
    K = 1 if target.kind == "mqa" else target.num_kv_heads
    if K == H:
        return own_heads(heads, target, moments)
    heads = _in_groups(heads, K, target, moments)
    scores = Scores(heads, moments, target.use_bias)
    found = [_pair(one, D, scores) for one in np.split(scores.forms, K)]
    value, out = _shared_values(heads, K, D, moments)
    return {
        "query": {
            "kernel": _last(np.concatenate([q for q, _, _ in found])) * D**0.5,
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
    query, bias, key = _pair(scores.forms.mean(0)[None], D, scores)
    whole = dataclasses.replace(heads, value=heads.maps.sum(0)[None], out=_eye(heads)[None])
    (value,), out = _shared_values(whole, 1, D, moments)
    return {
        "query": {"kernel": query[0] * D**0.5, "bias": bias[0] * D**0.5},
        "key": {"kernel": key},
        "value": {"kernel": value},
        "out": {"kernel": np.repeat(out / H, H, 0)},
    }


def shared_key_values(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`skv`: of each head the columns that keys and values have in common, each counted alike."""
    D = target.width
    moments = dataclasses.replace(moments, key=moments.value)
    scores = Scores(heads, moments, target.use_bias)
    queries, biases, keys, outs = [], [], [], []
    for form, added in zip(scores.forms, scores.key @ heads.maps, strict=True):
        parts = [form / _norm(form), added.T / _norm(added)]
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
    """`el`: the least squares of each head's scores and values by a slice of the inputs."""
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
        missed = _norm(scores.forms[h] - query @ seen[i].T) / _norm(scores.forms[h])
        return float(missed**2 + (_norm(maps[h] - added[i] @ out) / _norm(maps[h])) ** 2)

    order = _assign(np.array([[cost((h, i)) for i in range(H)] for h in range(H)]))
    fits = [fit(h, i) for i, h in enumerate(order)]
    query, bias = scores.queries(np.stack([q for q, _ in fits]))
    return {
        "query": {"kernel": _last(query) * D**0.5, "bias": bias * D**0.5},
        "out": {"kernel": np.stack([out for _, out in fits])},
    }


def head_embeddings(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`mhe_add` and `mhe_mul`: queries, keys and values that a group of heads shares.

    Scores of `mhe_mul` are W_q diag((1 + e_q[h]) (1 + e_k[h])) W_kᵀ, those of `mhe_add` are one
    form for all and a bias of keys, e_q[h] W_kᵀ, for each; W_o has room for all of e_v.
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
            scale = _balance(found, key)
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
            scale = _balance(found / n**0.5, key)
            found, key, rows = found * scale / n**0.5, key / scale, rows * scale
            kernel, bias = scores.queries_about_mean(found), np.zeros(D)
            factors = np.repeat(factors, n, 0)
            tables["query"][own] = rows - (scores.mu @ kernel) * factors
        kernels.append(kernel)
        biases.append(bias)
        keys.append(scores.key_inverse @ key)
        if C > G:
            tables["query_group"] = factors[:: H // C] - 1
    values, out = _shared_values(heads, G, D, moments)
    scale = D**0.5
    params: Parameters = {
        "query": {"kernel": _groups(kernels) * scale, "bias": _groups(biases, 0) * scale},
        "key": {"kernel": _groups(keys)},
        "value": {"kernel": _groups(values)},
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
    """`mva`: values and W_o as they are; of the scores the mean of a group's, at width D_s.

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
        scale = _balance(found, key)
        kernel = scores.queries_about_mean(found * scale)
        key = scores.key_inverse @ (key / scale)
        kernel, key = _filled(kernel, key, R)
        kernels.append(kernel * R**0.5)
        keys.append(key)
        biases.append(scores.key_inverse @ mean.T - (key @ (scores.mu @ kernel))[:, None])
    return {
        "query": {"kernel": _groups(kernels)},
        "key": {"kernel": _groups(keys)},
        "key_bias": {"kernel": np.concatenate(biases, 1)},
        "value": {"kernel": _last(heads.value)},
        "out": {"kernel": heads.out},
    }


def _pair(
    forms: np.ndarray, rank: int, scores: Scores
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kernels [n, M, R] and biases [n, R] of the queries for one key kernel [N, R]."""
    U = common_factor(forms, rank)
    found, key = forms @ U, U
    scale = _balance(found, key)
    query, key = _filled(found * scale, scores.key_inverse @ (key / scale), rank)
    return (*scores.queries(query), key)


def _balance(found: np.ndarray, key: np.ndarray) -> np.ndarray:
    """What makes the columns of queries [..., M, R] and keys [N, R] equally large: [R]."""
    flat = found.reshape(-1, *found.shape[-2:])
    norms = np.sqrt(np.mean(np.sum(flat**2, 1), 0)), np.sqrt(np.sum(key**2, 0))
    large = norms[0] > 1e-9 * np.max(norms[0], initial=1e-300)
    return np.where(large, np.sqrt(norms[1] / np.where(large, norms[0], 1)), 1.0)


def _filled(query: np.ndarray, key: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns up to `width`: queries of 0 and random keys, which change nothing but can learn."""
    used = np.any(query.reshape(-1, query.shape[-1]), 0)
    missing = width - query.shape[-1]
    query = np.pad(query, [(0, 0)] * (query.ndim - 1) + [(0, missing)])
    used = np.pad(used, (0, missing))
    shape = (*key.shape[:-1], width)
    drawn = np.random.default_rng(0).normal(0, shape[-2] ** -0.5, shape)
    return query, np.where(used, np.pad(key, [*[(0, 0)] * (key.ndim - 1), (0, missing)]), drawn)


def _shared_values(
    heads: Heads, groups: int, D: int, moments: Moments
) -> tuple[list[np.ndarray], np.ndarray]:
    """One value kernel [N', D] a group, and W_o [H, D, P]."""
    P, P_inverse = root(moments.value)
    values, outs = [], []
    for added in np.split(P @ heads.maps, groups):
        U = common_factor(added.swapaxes(1, 2), D)
        U = np.pad(U, ((0, 0), (0, D - U.shape[1])))
        out = U.T @ added
        scale = _balance(out.swapaxes(1, 2), U)
        values.append(P_inverse @ (U / scale))
        outs.append(out * scale[:, None])
    return values, np.concatenate(outs)


def _in_groups(heads: Heads, groups: int, target: Target, moments: Moments) -> Heads:
    """The heads in the order in which neighbours share best."""
    H, D = len(heads.query), target.width
    if groups in (1, H):
        return heads
    scores = Scores(heads, moments, target.use_bias)
    R = target.score_features or D if target.kind == "mva" else D
    means = target.kind in ("mhe_add", "mva")  # one form for all, and a bias of keys for each
    score_grams = _grams(scores.forms)
    value_grams = _grams((root(moments.value)[0] @ heads.maps).swapaxes(1, 2))
    scored, valued = (np.trace(grams.sum(0)) for grams in (score_grams, value_grams))

    def cost(one: tuple[int, ...]) -> float:
        own = list(one)
        if means:
            rest = scores.rest[own]
            mean = rest.mean(0)
            kept = len(own) * (np.sum(mean**2) - left_out(mean.T @ mean, R))
            missed = (np.sum(rest**2) - kept) / scored
        else:
            missed = left_out(score_grams[own].sum(0), R) / scored
        if target.kind == "mva" or target.score_groups > 1:
            return float(missed)  # values are not shared by these groups
        return float(missed + left_out(value_grams[own].sum(0), D) / valued)

    order = group(H, groups, cost)
    parts = {f.name: getattr(heads, f.name) for f in dataclasses.fields(heads)}
    return Heads(**{name: part if name == "bias" else part[order] for name, part in parts.items()})


def _grams(stack: np.ndarray) -> np.ndarray:
    """XᵀX of each X [M, N]."""
    return stack.swapaxes(1, 2) @ stack


def _aligned(heads: Heads, own: slice, D: int, scores: Scores) -> list[np.ndarray]:
    """A start of `parafac`: heads turned to each other, and of each column what they share."""
    if heads.query.shape[-1] != D:
        return []
    found = scores.forms[own] @ scores.key_inverse @ np.linalg.pinv(heads.key[own].swapaxes(1, 2))
    keys = scores.key @ heads.key[own]
    size = np.sqrt(_norm(found) / _norm(keys))
    turned = np.concatenate([found / size, keys * size], 1)
    turned = (turned @ align(turned))[:, : found.shape[1]]
    u, _, _ = np.linalg.svd(turned.transpose(2, 1, 0), full_matrices=False)
    return [u[:, :, 0].T]


def _assign(costs: np.ndarray) -> list[int]:
    """The head [i] for each slice i: exchanges of two, as long as one helps."""
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


def _groups(parts: list[np.ndarray], axis: int = 1) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.stack(parts, axis)


def _last(kernel: np.ndarray) -> np.ndarray:
    """[H, M, D] to [M, H, D]."""
    return kernel.swapaxes(0, 1)


def _eye(heads: Heads) -> np.ndarray:
    return np.eye(heads.out.shape[-1])


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array)) + 1e-300


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
}
