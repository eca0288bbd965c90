"""The target of a conversion, in coordinates in which all differences count the same."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhe_jax.attention.conversion.factors import common_factor, group, left_out, root
from mhe_jax.attention.conversion.heads import Heads

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
    query_rank: int = 0  # for mla, 0 makes queries from the inputs themselves
    key_rank: int = 2
    value_rank: int = 2
    reuse_keys: bool = False
    latent_features: int = 0
    latent_groups: int = 1
    use_bias: bool = False


class Scores:
    """The heads' Q[h] K[h]ᵀ in coordinates in which all differences count the same.

    `forms` is [H, M+1, N], or [H, M, N] for a target whose queries have no bias. `rest` [H, M, N]
    and `mean` [H, N] are the same for queries about their mean, and for the mean query.
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
            # The least-squares fit of a constant by the inputs; 0 where their mean is 0.
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


class Joint(Scores):
    """Scores and what heads add, where one matrix makes both keys and values.

    Both use the moments of values. `maps` [H, N, P] are V[h] O[h] in their coordinates. An error of
    a head's scores moves the output in proportion to how much its values differ, so its scores are
    multiplied by the size of what it adds, `sizes` [H]: then both are `rows`
    [H, M+1 (or M) + P, N], and their best common factor serves keys and values.
    """

    def __init__(self, heads: Heads, moments: Moments, use_bias: bool):
        super().__init__(heads, dataclasses.replace(moments, key=moments.value), use_bias)
        self.maps = self.key @ heads.maps
        self.sizes = np.linalg.norm(self.maps, axis=(1, 2))
        scored = self.forms * self.sizes[:, None, None]
        self.rows = np.concatenate([scored, self.maps.swapaxes(1, 2)], 1)

    @classmethod
    def in_groups(
        cls, heads: Heads, moments: Moments, use_bias: bool, groups: int, rank: int
    ) -> tuple[Heads, "Joint"]:
        """The heads in the order in which neighbours share a factor of that rank best."""
        found = cls(heads, moments, use_bias)
        if groups in (1, len(found.rows)):
            return heads, found
        by_head = grams(found.rows)
        by_head = by_head / size_of(by_head)

        def cost(own: tuple[int, ...]) -> float:
            return left_out(by_head[list(own)].sum(0), rank)

        heads = heads.ordered(group(len(by_head), groups, cost))
        return heads, cls(heads, moments, use_bias)


def pair(forms: np.ndarray, rank: int, scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kernels [n, M, R] and biases [n, R] of the queries for one key kernel [N, R]."""
    U = common_factor(forms, rank)
    found, key = forms @ U, U
    scale = balance(found, key)
    query, key = filled(found * scale, scores.key_inverse @ (key / scale), rank)
    return (*scores.queries(query), key)


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


def shared_values(
    heads: Heads, groups: int, D: int, moments: Moments
) -> tuple[list[np.ndarray], np.ndarray]:
    """One value kernel [N', D] per group, and W_o [H, D, P]."""
    P, P_inverse = root(moments.value)
    values, outs = [], []
    for added in np.split(P @ heads.maps, groups):
        U = common_factor(added.swapaxes(1, 2), D)
        U = np.pad(U, ((0, 0), (0, D - U.shape[1])))
        out = U.T @ added
        scale = balance(out.swapaxes(1, 2), U)
        values.append(P_inverse @ (U / scale))
        outs.append(out * scale[:, None])
    return values, np.concatenate(outs)


def grams(stack: np.ndarray) -> np.ndarray:
    """XᵀX of each X [M, N]."""
    return stack.swapaxes(1, 2) @ stack


def size_of(by_head: np.ndarray) -> float:
    """The trace of all Gram matrices together, by which differences are weighted; never 0."""
    return float(np.trace(by_head.sum(0))) + 1e-300


def stacked(parts: list[np.ndarray], axis: int = 1) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.stack(parts, axis)


def last(kernel: np.ndarray) -> np.ndarray:
    """[H, M, D] to [M, H, D]."""
    return kernel.swapaxes(0, 1)


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array)) + 1e-300
