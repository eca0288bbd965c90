"""`gta`, whose keys are in part their values: by alternating least squares."""

import numpy as np

from mhe_jax.attention.conversion.factors import common_factor
from mhe_jax.attention.conversion.heads import Heads
from mhe_jax.attention.conversion.scores import (
    Joint,
    Moments,
    Parameters,
    Scores,
    Target,
    last,
    widened,
)

ROUNDS = 300


def tied_states(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`gta`: a state for the values of each group, half of which its keys have, and W_r for all.

    Least are `Σ_h ‖F[h] - A[h] [T_g, R]ᵀ‖² + ‖V[h] - [T_g, E_g] O[h]‖²` for the scores F and the
    values V of `Joint`; [T_g, E_g] becomes W[g], and R becomes W_r.
    """
    D, G = target.width, target.num_kv_heads
    heads, both = Joint.in_groups(heads, moments, target.use_bias, G, D)
    scored = both.forms.shape[1]
    bases = _alternate(
        _columns(both.rows[:, :scored], heads.key.shape[-1]),
        _columns(both.rows[:, scored:], D),
        G,
        D,
    )
    scores = Scores(heads, moments, target.use_bias)
    states, shared = both.key_inverse @ bases[:, : G * D], both.key_inverse @ bases[:, G * D :]
    queries, outs = [], []
    for g, own in enumerate(np.split(np.arange(len(heads.query)), G)):
        state = states[:, g * D : (g + 1) * D]
        keys = scores.key @ np.concatenate([state[:, : D // 2], shared], 1)
        queries.append(scores.forms[own] @ np.linalg.pinv(keys).T)
        outs.append(np.linalg.pinv(bases[:, g * D : (g + 1) * D]) @ both.maps[own])
    query, bias = scores.queries(np.concatenate(queries))
    return {
        "query": {"kernel": last(query) * D**0.5, "bias": bias * D**0.5},
        "key_value": {"kernel": states.reshape(len(states), G, D)},
        "key": {"kernel": shared},
        "out": {"kernel": np.concatenate(outs)},
    }


def _columns(rows: np.ndarray, rank: int) -> np.ndarray:
    """[H, N, rank] with the products `X Xᵀ` of rows Xᵀ [H, M, N] of that rank."""
    _, d, vt = np.linalg.svd(rows, full_matrices=False)
    return (d[:, :rank, None] * vt[:, :rank]).swapaxes(1, 2)


def _alternate(forms: np.ndarray, maps: np.ndarray, G: int, D: int) -> np.ndarray:
    """The bases [T_0, E_0, T_1, E_1, ..., R], [N, G D + D/2], for columns of H heads."""
    (H, N, n), half = forms.shape, D // 2
    both = np.concatenate([forms, maps], 2)
    groups = np.split(np.arange(H), G)
    bases, rests = [], []
    for own in groups:
        T = common_factor(both[own].swapaxes(1, 2), half)
        E = common_factor((maps[own] - T @ (T.T @ maps[own])).swapaxes(1, 2), D - half)
        bases += [widened(T, half), widened(E, D - half)]
        rests.append(forms[own] - T @ (T.T @ forms[own]))
    R = common_factor(np.concatenate(rests).swapaxes(1, 2), half)
    found = np.concatenate([*bases, widened(R, half)], 1)
    of_all = np.arange(G * D, G * D + half)
    total, error = float(np.sum(both**2)), np.inf
    for _ in range(ROUNDS):
        factors = np.zeros((H, found.shape[1], both.shape[2]))
        for g, own in enumerate(groups):
            values = np.arange(g * D, (g + 1) * D)
            keys = np.concatenate([values[:half], of_all])
            for columns, some in ((keys, slice(n)), (values, slice(n, None))):
                fitted = np.linalg.pinv(found[:, columns]) @ both[own][:, :, some]
                factors[np.ix_(own, columns, np.arange(both.shape[2])[some])] = fitted
        flat = factors.swapaxes(0, 1).reshape(found.shape[1], -1)
        seen = both.swapaxes(0, 1).reshape(N, -1)
        found = np.linalg.lstsq(flat.T, seen.T, rcond=None)[0].T
        before, error = error, float(np.sum((seen - found @ flat) ** 2))
        found = found / (np.linalg.norm(found, axis=0) + 1e-300)
        if before - error < 1e-5 * error or error < 1e-14 * total:
            break
    return found
