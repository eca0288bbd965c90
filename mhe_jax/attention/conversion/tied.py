"""`gta`, whose keys are in part their values, by alternating least squares."""

from typing import Any

import numpy as np

from mhe_jax.attention.conversion.factors import alternate, columns, common_factor
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


def tied_states(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`gta`: for each group a state for its values, half of it also in its keys; W_r for all.

    It minimizes `Σ_h ‖F[h] - A[h] [T_g, R]ᵀ‖² + ‖V[h] - [T_g, E_g] O[h]‖²` for the scores F and the
    values V of `Joint`; [T_g, E_g] becomes W[g], and R becomes W_r.
    """
    D, G = target.width, target.num_kv_heads
    heads, both = Joint.in_groups(heads, moments, target.use_bias, G, D + D // 2)
    scored = both.forms.shape[1]
    forms = columns(both.rows[:, :scored], heads.key.shape[-1])
    bases = _bases(forms, columns(both.rows[:, scored:], D), G, D)
    bases = bases / (np.linalg.norm(bases, axis=0) + 1e-300)
    scores = Scores(heads, moments, target.use_bias)
    states, shared = np.split(both.key_inverse @ bases, [G * D], 1)
    queries, outs = [], []
    for g, own in enumerate(np.split(np.arange(len(forms)), G)):
        state = slice(g * D, (g + 1) * D)
        keys = scores.key @ np.concatenate([states[:, state][:, : D // 2], shared], 1)
        queries.append(scores.forms[own] @ np.linalg.pinv(keys).T)
        outs.append(np.linalg.pinv(bases[:, state]) @ both.maps[own])
    query, bias = scores.queries(np.concatenate(queries))
    return {
        "query": {"kernel": last(query) * D**0.5, "bias": bias * D**0.5},
        "key_value": {"kernel": states.reshape(len(states), G, D)},
        "key": {"kernel": shared},
        "out": {"kernel": np.concatenate(outs)},
    }


def _bases(forms: np.ndarray, maps: np.ndarray, G: int, D: int) -> np.ndarray:
    """[T_0, E_0, T_1, E_1, ..., R], [N, G·D + D/2], for columns of H heads."""
    H, half = len(forms), D // 2
    seen, scored = np.concatenate([forms, maps], 2), forms.shape[2]
    groups = np.split(np.arange(H), G)
    found, rests = [], []
    for own in groups:
        # The directions in which the columns of keys and of values come closest.
        K, V = (common_factor(one[own].swapaxes(1, 2), D) for one in (forms, maps))
        T = V @ np.linalg.svd(V.T @ K)[0][:, :half]
        left = seen[own] - T @ (T.T @ seen[own])
        E = common_factor(left[:, :, scored:].swapaxes(1, 2), half)
        found += [widened(T, half), widened(E, half)]
        rests.append(left[:, :, :scored])
    R = common_factor(np.concatenate(rests).swapaxes(1, 2), half)
    start = np.concatenate([*found, widened(R, half)], 1)

    def step(bases: np.ndarray, state: Any) -> tuple[np.ndarray, Any]:
        factors = np.zeros((H, bases.shape[1], seen.shape[2]))
        for g, own in enumerate(groups):
            values = np.arange(g * D, (g + 1) * D)
            keys = np.concatenate([values[:half], np.arange(G * D, G * D + half)])
            rows = slice(own[0], own[-1] + 1)
            factors[rows, keys, :scored] = np.linalg.pinv(bases[:, keys]) @ forms[rows]
            factors[rows, values, scored:] = np.linalg.pinv(bases[:, values]) @ maps[rows]
        return factors, state

    return alternate(seen, start, step)[0]
