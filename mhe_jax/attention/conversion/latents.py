"""Kinds with a norm on what heads are made from: `mla` and `mfa`.

RMSNorm divides a latent u = x W by its size `√(mean u²)`, which differs from token to token. No
other kind does that. So one feature of u is a constant B, set by a bias: beside it the others are
so small that the size is the same for all tokens, up to a part of about `(‖u‖² - E‖u‖²) / 2B²`, and
the norm is a constant factor, which its scale undoes. That feature is 1 after the norm, and what is
made from it is the bias that projections of a latent do not have.
"""

import numpy as np

from mhe_jax.attention.conversion.factors import common_factor
from mhe_jax.attention.conversion.heads import Heads
from mhe_jax.attention.conversion.scores import (
    Joint,
    Moments,
    Parameters,
    Scores,
    Target,
    filled,
    last,
    shared_values,
    stacked,
    widened,
)
from mhe_jax.config import InputError

# B is at least this many times √E‖u‖²: the size is constant to about 1e-6.
CONSTANT = 1000


def latent_heads(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`mla`: the best common columns of keys and values of all heads, or of a group's.

    The joint SVD of keys and values (MHA2MLA, Ji et al. 2025, arXiv 2502.14837), of `Joint`.
    Queries stay as they are, without a bias, which has no place; with `query_rank` they are made
    from the latent that serves those of all heads best, and from their bias.
    """
    D, G, compressed = target.width, target.latent_groups, target.query_rank > 0
    width = target.latent_features // G
    _check("latent_features", target.latent_features, 2 * G)
    heads, both = Joint.in_groups(heads, moments, compressed, G, width - 1)
    scores = Scores(heads, moments, compressed)
    latents, bases, keys, values = [], [], [], []
    for own in np.split(np.arange(len(both.rows)), G):
        U = common_factor(both.rows[own], width - 1)
        kernel = both.key_inverse @ U
        latents.append(_held(widened(kernel, width - 1), moments.value))
        basis, upper = np.linalg.qr(scores.key @ kernel)
        for h in own:
            V = common_factor(scores.forms[h] @ basis, D)
            bases.append(basis @ V)
            keys.append(np.linalg.solve(upper, V))
            values.append(U.T @ both.key @ heads.value[h])
    params: Parameters = {}
    if compressed:
        query = _compress(scores, both.sizes, np.stack(bases), target.query_rank, moments, params)
    else:
        query, _ = scores.queries(scores.forms @ np.stack(bases))
    query, key = filled(query, np.stack(keys), D)
    kernels, biases, scales = zip(*latents, strict=True)
    return params | {
        "query": {"kernel": last(query) * D**0.5},
        "latent": {"kernel": np.concatenate(kernels, 1), "bias": np.concatenate(biases)},
        "latent_norm": {"scale": stacked(list(scales), 0)},
        "key": {"kernel": _rows_up_to(last(key), width)},
        "value": {"kernel": _rows_up_to(last(np.stack(values)), width)},
        "out": {"kernel": heads.out},
    }


def low_rank_queries(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`mfa`: keys and values as in `mqa`, with `reuse_keys` one for both, like the latent of `mla`.

    With `reuse_keys` values are the keys, since W_o can hold any map of them.
    """
    D = target.width
    both = Joint(heads, moments, True)
    scores = Scores(heads, moments, True)
    params: Parameters = {}
    if target.reuse_keys:
        U = common_factor(both.rows, D)
        basis, upper = np.linalg.qr(scores.key @ both.key_inverse @ U)
        out = upper @ U.T @ both.maps
        params["key_to_value"] = {"kernel": np.zeros((D, D))}
        params["value_scale"] = np.ones(D)
        params["out"] = {"kernel": np.pad(out, ((0, 0), (0, D - out.shape[1]), (0, 0)))}
    else:
        basis = common_factor(scores.forms * both.sizes[:, None, None], D)
        (value,), out = shared_values(heads, 1, D, moments)
        params |= {"value": {"kernel": value[:, None]}, "out": {"kernel": out}}
    bases = np.broadcast_to(basis, (len(heads.query), *basis.shape))
    query = _compress(scores, both.sizes, bases, target.query_rank, moments, params)
    key = widened(scores.key_inverse @ basis, D)
    query = np.pad(query, ((0, 0), (0, 0), (0, D - query.shape[-1])))
    params["query"] = {"kernel": last(query) * D**0.5}
    params["key"] = {"kernel": key[:, None]}
    return params


def _compress(
    scores: Scores,
    sizes: np.ndarray,
    bases: np.ndarray,
    rank: int,
    moments: Moments,
    params: Parameters,
) -> np.ndarray:
    """The map [H, rank, R] to queries from the latent, which is put into `params`.

    `bases` [H, N, R] are the keys of each head, orthonormal in the coordinates of `scores`.
    """
    _check("query_rank", rank, 2)
    rest = scores.rest @ bases
    U = common_factor(rest.swapaxes(1, 2) * sizes[:, None, None], rank - 1)
    kernel = widened(scores.queries_about_mean(U), rank - 1)
    kernel, bias, scale = _held(kernel, moments.query, -scores.mu @ kernel)
    params["query_latent"] = {"kernel": kernel, "bias": bias}
    params["query_latent_norm"] = {"scale": scale}
    up = _rows_up_to(last(U.T @ rest), rank)
    up[-1] = np.einsum("hn,hnr->hr", scores.mean, bases)
    return last(up)


def _held(
    kernel: np.ndarray, second: np.ndarray, bias: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kernel, bias and norm scale of u = x W + b [n] and the constant, [n+1].

    `second` has the moments of x, about its mean where b subtracts that.
    """
    size = np.trace(kernel.T @ second @ kernel)
    # A power of two, which narrow types hold exactly.
    constant = 2.0 ** np.ceil(np.log2(CONSTANT * max(size, 1.0) ** 0.5))
    n = kernel.shape[1]
    scale = np.full(n + 1, ((constant**2 + size) / (n + 1)) ** 0.5)
    scale[-1] /= constant
    return np.pad(kernel, ((0, 0), (0, 1))), np.append(np.zeros(n) + bias, constant), scale


def _rows_up_to(kernel: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(kernel, ((0, rows - len(kernel)), (0, 0), (0, 0)))


def _check(field: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(
            f"{field} is {value}: takes {least} or more, for one feature of a latent holds its norm"
        )
