"""From heads to the nearest parameters of a kind: what each kind's `heads` and `nearest` are of.

A kind's parameters minimize the differences of scores, `Σ_h ‖L (F[h] - F'[h]) P‖²`, and of what is
added to the output, `Σ_h ‖P' (A[h] - A'[h])‖²`, where F are `Heads.forms`, A are `Heads.maps`, and
LᵀL, PP and P'P' are the moments of the inputs. Only these products matter, in any order of heads.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhe_jax.attention.nearest.factors import common_factor, group, root, sharing, sharing_mean

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Heads:
    """H query heads that read K key and value heads, in float64; K as small as the kind allows.

        Y = Σ_h softmax([x, 1] Q[h] ([y, 1] K[g])ᵀ / √S) [z, 1] V[g] O[h] + b,  g = ⌊hK/H⌋

    x [M] is a query's input, y [N] a key's and z [N'] a value's; last rows are biases.
    """

    query: np.ndarray  # [H, M+1, S]
    key: np.ndarray  # [K, N+1, S]
    value: np.ndarray  # [K, N'+1, D], of a K of its own
    out: np.ndarray  # [H, D, P]
    bias: np.ndarray  # [P]

    @classmethod
    def of(cls, params: Mapping[str, Any], key: str = "key", value: str = "value") -> "Heads":
        """Those of projections [M, D] or [M, heads, D] with these names."""
        out = np.asarray(params["out"]["kernel"], np.float64)
        bias = np.asarray(params["out"].get("bias", np.zeros(out.shape[2])), np.float64)
        query = projected(params["query"])
        query = np.repeat(query, len(out) // len(query), 0)
        return cls(query, projected(params[key]), projected(params[value]), out, bias)

    def repeated(self, count: int | None = None) -> "Heads":
        """The same with H key and value heads, or `count` of them."""
        count = count or len(self.out)
        key, value = (np.repeat(x, count // len(x), 0) for x in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value)

    def widened(self, width: int) -> "Heads":
        """The same with queries, keys and values `width` wide, by zeros, and the same scores."""
        query = self.query * (width / self.query.shape[-1]) ** 0.5
        out = padded(self.out.swapaxes(1, 2), width).swapaxes(1, 2)
        query, key, value = (padded(x, width) for x in (query, self.key, self.value))
        return Heads(query, key, value, out, self.bias)

    # What the output depends on, where K is H. A bias of keys adds the same to all scores of a
    # query, which softmax cancels, and one of values adds the same to every output.

    @property
    def forms(self) -> np.ndarray:
        """Q[h] K[h]ᵀ / √S [H, M+1, N]: the scores."""
        return self.query @ self.key[:, :-1].swapaxes(1, 2) * self.query.shape[-1] ** -0.5

    @property
    def maps(self) -> np.ndarray:
        """V[h] O[h] [H, N', P]: what each head adds to the output for a key that it looks at."""
        return self.value[:, :-1] @ self.out

    @property
    def constant(self) -> np.ndarray:
        """b with what biases of values add [P]."""
        return self.bias + np.einsum("hd,hdp->p", self.value[:, -1], self.out)


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


def padded(x: np.ndarray, width: int) -> np.ndarray:
    """Columns of zeros up to `width`."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def projected(projection: Mapping[str, Any]) -> np.ndarray:
    """A kernel [M, D] or [M, heads, D] and its bias, if any: [heads, M+1, D], in float64."""
    kernel = np.asarray(projection["kernel"], np.float64)
    bias = np.asarray(projection.get("bias", np.zeros(kernel.shape[1:])), np.float64)
    rows = np.concatenate([kernel, bias[None]])
    return rows.reshape(len(rows), -1, rows.shape[-1]).swapaxes(0, 1)


class Scores:
    """The heads' forms and maps in coordinates in which all differences count the same.

    `forms` [H, M+1, N], without a bias of queries [H, M, N]; of queries about their mean `rest`
    [H, M, N], of the mean query `mean` [H, N]; `maps` [H, N', P].
    """

    def __init__(self, heads: Heads, moments: Moments, use_bias: bool):
        mu, M = moments.query_mean, len(moments.query_mean)
        self.key, self.key_inverse = root(moments.key)
        self.value, self.value_inverse = root(moments.value)
        self.maps = self.value @ heads.maps
        products = heads.forms @ self.key
        self.mu, (self.query, self.query_inverse) = mu, root(moments.query)
        self.rest = self.query @ products[:, :-1]
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


def in_groups(
    heads: Heads,
    moments: Moments,
    use_bias: bool,
    groups: int,
    rank: int,
    mean: bool = False,
    values: bool = True,
) -> tuple[Heads, Scores]:
    """The heads in an order in which neighbours share (or, for scores, have the `mean`) best.

    Scores are of the given rank, values as wide as the heads'.
    """
    scores = Scores(heads, moments, use_bias)
    if groups in (1, len(heads.out)):
        return heads, scores
    size = float(np.sum(scores.forms**2))
    costs = [sharing_mean(scores.rest, rank, size) if mean else sharing(scores.forms, rank)]
    costs += [sharing(scores.maps.swapaxes(1, 2), heads.out.shape[1])] * values
    order = group(len(heads.out), groups, lambda own: sum(cost(own) for cost in costs))
    query, key, value, out = (x[order] for x in (heads.query, heads.key, heads.value, heads.out))
    heads = Heads(query, key, value, out, heads.bias)
    return heads, Scores(heads, moments, use_bias)


def own_heads(heads: Heads, moments: Moments, rank: int) -> Parameters:
    """Every head as it is, where scores are no wider than `rank`; else the best of that rank."""
    S, query, key = heads.query.shape[-1], heads.query, heads.key[:, :-1]
    if rank < S:
        scores = Scores(heads, moments, use_bias=True)
        pairs = [pair(form[None], rank, scores) for form in scores.forms]
        query = np.concatenate([np.concatenate([q, b[:, None]], 1) for q, b, _ in pairs])
        key = np.stack([found for _, _, found in pairs])
    elif rank > S:
        query, key = filled(query * (rank / S) ** 0.5, key, rank)
    return own_values(heads) | {
        "query": {"kernel": query[:, :-1].swapaxes(0, 1), "bias": query[:, -1]},
        "key": {"kernel": key.swapaxes(0, 1)},
    }


def own_values(heads: Heads) -> Parameters:
    return {"value": {"kernel": heads.value[:, :-1].swapaxes(0, 1)}, "out": {"kernel": heads.out}}


def shared_heads(heads: Heads, moments: Moments, K: int, rank: int, use_bias: bool) -> Parameters:
    """Queries of each head, and for a group the best common rows of forms and columns of maps."""
    if len(heads.out) == K:
        return own_heads(heads, moments, rank)
    _, scores = in_groups(heads, moments, use_bias, K, rank)
    pairs = [pair(one, rank, scores) for one in np.split(scores.forms, K)]
    query, bias, key = zip(*pairs, strict=True)
    return shared_values(scores, K, heads.out.shape[1]) | {
        "query": {"kernel": np.concatenate(query).swapaxes(0, 1), "bias": np.concatenate(bias)},
        "key": {"kernel": np.stack(key, 1)},
    }


def shared_values(scores: Scores, groups: int, D: int) -> Parameters:
    """One value kernel [N', D] per group, [N', G, D], and W_o [H, D, P]."""
    values, outs = [], []
    for added in np.split(scores.maps, groups):
        U = padded(common_factor(added.swapaxes(1, 2), D), D)
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
    query, key = padded(query, width), padded(key, width)
    used = np.any(query.reshape(-1, width), 0)
    drawn = np.random.default_rng(0).normal(0, key.shape[-2] ** -0.5, key.shape)
    return query, np.where(used, key, drawn)
