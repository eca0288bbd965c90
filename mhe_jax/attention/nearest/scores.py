"""Scores and values of heads in coordinates in which all differences count the same."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mhe_jax.attention.nearest.factors import Cost, common_factor, group, root, sharing
from mhe_jax.attention.nearest.heads import Heads

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Moments:
    """Moments of the inputs."""

    query_mean: np.ndarray  # [M]
    query: np.ndarray  # [M, M], about the mean
    key: np.ndarray  # [N, N], about the mean of the keys that a query sees
    value: np.ndarray  # [N', N'], about 0

    @classmethod
    def unit(cls, heads: Heads) -> "Moments":
        """Those of unknown inputs: independent, of mean 0 and variance 1."""
        M, N, V = (part.shape[1] - 1 for part in (heads.query, heads.key, heads.value))
        return cls(np.zeros(M), np.eye(M), np.eye(N), np.eye(V))


class Scores:
    """The heads' forms and maps in coordinates in which all differences count the same.

    `forms` is [H, M+1, N], or [H, M, N] for a target whose queries have no bias. `rest` [H, M, N]
    and `mean` [H, N] are the same for queries about their mean, and for the mean query. `maps` is
    [H, N', P].
    """

    def __init__(self, heads: Heads, moments: Moments, use_bias: bool):
        mu, M = moments.query_mean, len(moments.query_mean)
        self.key, self.key_inverse = root(moments.key)
        self.value, self.value_inverse = root(moments.value)
        self.maps = self.value @ heads.maps
        products = heads.forms @ self.key
        self.mu, (about_mean, self._about_mean) = mu, root(moments.query)
        self.rest = about_mean @ products[:, :-1]
        self.mean = mu @ products[:, :-1] + products[:, -1]
        second = moments.query + np.outer(mu, mu)
        if use_bias:
            second = np.block([[second, mu[:, None]], [mu[None], np.ones((1, 1))]])
        else:
            # The least-squares fit of a constant by the inputs; 0 where their mean is 0.
            by_inputs = np.linalg.solve(second + 1e-9 * np.trace(second) * np.eye(M) / M, mu)
            products = products[:, :-1] + by_inputs[:, None] * products[:, -1:]
        whole, self._inverse = root(second)
        self.forms = whole @ products

    @classmethod
    def in_groups(
        cls,
        heads: Heads,
        moments: Moments,
        use_bias: bool,
        groups: int,
        costs: Callable[[Self], list[Cost]],
    ) -> tuple[Heads, Self]:
        """The heads in an order in which neighbours share best, and their scores."""
        scores = cls(heads, moments, use_bias)
        if groups in (1, len(heads.out)):
            return heads, scores
        parts = costs(scores)
        order = group(len(heads.out), groups, lambda own: sum(part(own) for part in parts))
        heads = heads.ordered(order)
        return heads, cls(heads, moments, use_bias)

    def queries(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Factors [..., M+1 or M, R] of `forms` as a kernel [..., M, R] and a bias [..., R]."""
        found, M = self._inverse @ found, len(self.mu)
        return found[..., :M, :], found[..., M:, :].sum(-2)

    def queries_about_mean(self, found: np.ndarray) -> np.ndarray:
        """The factor [M, R] of `rest` as a kernel."""
        return self._about_mean @ found


class Joint(Scores):
    """Scores and maps where one matrix makes both keys and values; both use moments of values.

    An error of a head's scores moves the output in proportion to how much its values differ, so its
    scores are multiplied by the size of what it adds, `sizes` [H]: then both are `rows`
    [H, M+1 (or M) + P, N], and their best common factor serves keys and values.
    """

    def __init__(self, heads: Heads, moments: Moments, use_bias: bool):
        super().__init__(heads, dataclasses.replace(moments, key=moments.value), use_bias)
        self.sizes = np.linalg.norm(self.maps, axis=(1, 2))
        scored = self.forms * self.sizes[:, None, None]
        self.rows = np.concatenate([scored, self.maps.swapaxes(1, 2)], 1)


def own_heads(heads: Heads, moments: Moments) -> Parameters:
    """Every head as it is, where the scores are no wider than D; else the best of rank D."""
    S, D = heads.query.shape[-1], heads.out.shape[1]
    query, key = heads.query, heads.key[:, :-1]
    if S > D:
        scores = Scores(heads, moments, use_bias=True)
        pairs = [pair(form[None], D, scores) for form in scores.forms]
        query = np.concatenate([np.concatenate([q, b[:, None]], 1) for q, b, _ in pairs])
        key = np.stack([found for _, _, found in pairs])
    elif S < D:
        query, key = filled(query * (D / S) ** 0.5, key, D)
    return own_values(heads) | {
        "query": {"kernel": last(query[:, :-1]), "bias": query[:, -1]},
        "key": {"kernel": last(key)},
    }


def own_values(heads: Heads) -> Parameters:
    return {"value": {"kernel": last(heads.value[:, :-1])}, "out": {"kernel": heads.out}}


def shared_heads(heads: Heads, moments: Moments, K: int, use_bias: bool) -> Parameters:
    """Keys and values that the heads of a group share, and queries of each head.

    Keys are the best common row space of width D of the group's forms, values the best common
    column space of its maps. No mean of heads, aligned by any maps, comes closer.
    """
    D = heads.out.shape[1]
    if len(heads.out) == K:
        return own_heads(heads, moments)
    _, scores = Scores.in_groups(heads, moments, use_bias, K, lambda s: shares_both(s, D))
    query, bias, key = zip(
        *(pair(one, D, scores) for one in np.split(scores.forms, K)), strict=True
    )
    return shared_values(scores, K, D) | {
        "query": {"kernel": last(np.concatenate(query)), "bias": np.concatenate(bias)},
        "key": {"kernel": np.stack(key, 1)},
    }


def shares_both(scores: Scores, rank: int) -> list[Cost]:
    """What heads lose that share keys and values of that rank."""
    return [sharing(scores.forms, rank), sharing(scores.maps.swapaxes(1, 2), rank)]


def shared_values(scores: Scores, groups: int, D: int) -> Parameters:
    """One value kernel [N', D] per group, [N', G, D], and W_o [H, D, P]."""
    values, outs = [], []
    for added in np.split(scores.maps, groups):
        U = common_factor(added.swapaxes(1, 2), D)
        U = np.pad(U, ((0, 0), (0, D - U.shape[1])))
        out = U.T @ added
        scale = balance(out.swapaxes(1, 2), U)
        values.append(scores.value_inverse @ (U / scale))
        outs.append(out * scale[:, None])
    return {"value": {"kernel": np.stack(values, 1)}, "out": {"kernel": np.concatenate(outs)}}


def pair(forms: np.ndarray, rank: int, scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kernels [n, M, R] and biases [n, R] of the queries for one key kernel [N, R]."""
    U = common_factor(forms, rank)
    found, key = forms @ U, U
    scale = balance(found, key)
    query, key = filled(found * scale, scores.key_inverse @ (key / scale), rank)
    return (*scores.queries(query * rank**0.5), key)


def balance(found: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The factors [R] that make columns of queries [..., M, R] and keys [N, R] equally large."""
    flat = found.reshape(-1, *found.shape[-2:])
    norms = np.sqrt(np.mean(np.sum(flat**2, 1), 0)), np.sqrt(np.sum(key**2, 0))
    large = norms[0] > 1e-9 * np.max(norms[0], initial=1e-300)
    return np.where(large, np.sqrt(norms[1] / np.where(large, norms[0], 1)), 1.0)


def filled(query: np.ndarray, key: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns up to `width`: queries of 0 and random keys, which change nothing but can learn."""
    used = np.any(query.reshape(-1, query.shape[-1]), 0)
    missing = width - query.shape[-1]
    query = np.pad(query, [(0, 0)] * (query.ndim - 1) + [(0, missing)])
    used = np.pad(used, (0, missing))
    shape = (*key.shape[:-1], width)
    drawn = np.random.default_rng(0).normal(0, shape[-2] ** -0.5, shape)
    return query, np.where(used, np.pad(key, [*[(0, 0)] * (key.ndim - 1), (0, missing)]), drawn)


def widened(kernel: np.ndarray, width: int) -> np.ndarray:
    """Columns [N, n] and random ones up to `width`: nothing is made from these, but can be."""
    N, n = kernel.shape
    drawn = np.random.default_rng(0).normal(0, N**-0.5, (N, width - n))
    return np.concatenate([kernel, drawn], 1)


def last(kernel: np.ndarray) -> np.ndarray:
    """[H, M, D] to [M, H, D]."""
    return kernel.swapaxes(0, 1)


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array)) + 1e-300
