"""Best factors of matrices that several heads are to share, in float64."""

from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np

Cost = Callable[[tuple[int, ...]], float]
Factors = tuple[np.ndarray, np.ndarray, np.ndarray]


def root(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P and its inverse, P P = `moments` [N, N] (symmetric, made definite where it is not)."""
    values, vectors = np.linalg.eigh(moments)
    values = np.maximum(values, 1e-5 * np.mean(values))  # outputs of a LayerNorm have a null space
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def common_factor(stack: np.ndarray, rank: int) -> np.ndarray:
    """The orthonormal columns U [N, R] that minimize `‖S - S U Uᵀ‖`, S [..., N]."""
    rows = stack.reshape(-1, stack.shape[-1])
    _, vectors = np.linalg.eigh(rows.T @ rows)
    return vectors[:, ::-1][:, :rank]


def left_out(gram: np.ndarray, rank: int) -> float:
    """The part of the trace of SᵀS [N, N] that the best common factor of that rank leaves out."""
    return float(np.sum(np.linalg.eigvalsh(gram)[: max(len(gram) - rank, 0)]))


def sharing(stack: np.ndarray, rank: int) -> Cost:
    """What a common factor of that rank leaves out of some of S [H, M, N], as a part of all."""
    by_head = stack.swapaxes(1, 2) @ stack
    by_head = by_head / (np.sum(stack**2) + 1e-300)
    return lambda own: left_out(by_head[list(own)].sum(0), rank)


def sharing_mean(stack: np.ndarray, rank: int, size: float) -> Cost:
    """What the mean of some of S at that rank leaves out, less a constant; as a part of `size`."""

    def cost(own: tuple[int, ...]) -> float:
        mean = stack[list(own)].mean(0)
        return len(own) * (left_out(mean.T @ mean, rank) - float(np.sum(mean**2))) / (size + 1e-300)

    return cost


def group(count: int, groups: int, cost: Cost) -> list[int]:
    """An order of 0 .. count-1 whose `groups` runs of equal length cost little together.

    It begins unchanged, and takes the best exchange of two as long as one helps.

    >>> group(4, 2, lambda one: float(sum(one) % 2))
    [0, 2, 1, 3]
    """
    cost, size = cache(cost), count // groups
    parts = [tuple(range(g * size, (g + 1) * size)) for g in range(groups)]
    while size > 1 and groups > 1:
        best, chosen = -1e-9, None
        for b, a in combinations(range(groups), 2):
            now = cost(parts[a]) + cost(parts[b])
            for i, j in product(parts[a], parts[b]):
                one, other = (tuple(sorted({*parts[at]} ^ {i, j})) for at in (a, b))
                gain = cost(one) + cost(other) - now
                if gain < best:
                    best, chosen = gain, (a, b, one, other)
        if chosen is None:
            break
        a, b, parts[a], parts[b] = chosen
    return [h for part in sorted(parts) for h in part]


def parafac(slices: np.ndarray, rank: int) -> Factors:
    """A [M, R], s [C, R] and K [N, R] of `X[c] ≈ A diag(s[c]) Kᵀ`.

    s[:, r] has mean square 1. Least squares, one factor after the other (PARAFAC), from the better
    of two A by eigenvectors, which are exact where there is an exact answer.
    """
    found = []
    for A in _eigenvectors(slices, rank):
        found.append(_improve(slices, (A, *_scaled_rows(np.linalg.pinv(A) @ slices)), 20))
    _, best = min(found, key=lambda one: one[0])
    A, s, K = _improve(slices, best, 300)[1]
    size = np.sqrt(np.mean(s**2, 0)) * np.where(s.sum(0) < 0, -1, 1) + 1e-300
    return A * size, s / size, K


def _eigenvectors(slices: np.ndarray, rank: int) -> list[np.ndarray]:
    """A of `X[c] = A diag(s[c]) Kᵀ` from the eigenvectors of two of its mixtures (Jennrich)."""
    draw, found = np.random.default_rng(0), []
    U, W = common_factor(slices.swapaxes(1, 2), rank), common_factor(slices, rank)
    core = U.T @ slices @ W  # [C, R, R]
    for _ in range(2):
        a, b = (np.einsum("c,cij->ij", draw.normal(size=len(core)), core) for _ in range(2))
        vectors: Any = np.linalg.eig(a @ np.linalg.pinv(b))[1]
        # For a complex pair, which no real factors have, its real and its imaginary part.
        second = vectors.imag > 1e-9
        found.append(U @ np.where(second, vectors.imag, vectors.real))
    return found


def _scaled_rows(mixed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """s [C, R] and K [N, R] of `Z[c] ≈ diag(s[c]) Kᵀ`: for each row, the nearest of rank one."""
    u, d, vt = np.linalg.svd(mixed.swapaxes(0, 1), full_matrices=False)
    return u[:, :, 0].T, (vt[:, 0] * d[:, :1]).T


def _improve(slices: np.ndarray, start: Factors, rounds: int) -> tuple[float, Factors]:
    """The error ‖·‖² and the factors after `rounds` rounds, or once nothing changes any more."""
    (A, s, K), total = start, float(np.sum(slices**2))
    error = np.inf
    for _ in range(rounds):
        XK, KK = slices @ K, K.T @ K
        A = _solve(KK * (s.T @ s), np.einsum("cmr,cr->mr", XK, s))
        s = _solve(KK * (A.T @ A), np.einsum("cmr,mr->cr", XK, A))
        norms = np.linalg.norm(s, axis=0) + 1e-300
        A, s = A * norms, s / norms
        right = np.einsum("cnr,cr->nr", slices.swapaxes(1, 2) @ A, s)
        K = _solve((A.T @ A) * (s.T @ s), right)
        before, error = error, total - float(np.sum(right * K))  # after least squares
        if before - error < 1e-5 * error or error < 1e-14 * total:
            break
    return error, (A, s, K)


def _solve(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    """`right` [N, R] times the inverse of `gram` [R, R], with a tiny ridge."""
    ridge = 1e-12 * np.trace(gram) / len(gram) + 1e-300
    return np.linalg.solve(gram + ridge * np.eye(len(gram)), right.T).T
