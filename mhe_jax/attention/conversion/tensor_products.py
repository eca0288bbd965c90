"""`tpa` with constant factors of heads, by alternating least squares."""

import numpy as np

from mhe_jax.attention.conversion.factors import (
    alternate,
    columns,
    common_factor,
    group,
    left_out,
    root,
)
from mhe_jax.attention.conversion.heads import Heads
from mhe_jax.attention.conversion.scores import (
    Moments,
    Parameters,
    Scores,
    Target,
    size_of,
    widened,
)

State = tuple[np.ndarray, np.ndarray]


def constant_factors(heads: Heads, target: Target, moments: Moments) -> Parameters:
    """`tpa`: constant a[h], by biases, so that heads mix R projections that all of them share.

    MHA, MQA and GQA are such cases ("non-contextual TPA", Zhang et al. 2025, section 4). Keys and
    values begin as those of groups of heads; then the mixing a, the projections B and what reads
    them are found in turn. Kernels of a are 0, but can learn: it is left to training that a depends
    on the token.
    """
    D, H = target.width, len(heads.query)
    scores = Scores(heads, moments, True)
    value, value_inverse = root(moments.value)
    maps = value @ heads.maps
    a_k, keys = _shared(columns(scores.forms, heads.key.shape[-1]), target.key_rank, D)
    a_v, values = _shared(columns(maps.swapaxes(1, 2), D), target.value_rank, D)
    of_heads = np.einsum("hr,nrd->hnd", a_k, keys)
    read = scores.forms @ np.linalg.pinv(of_heads).swapaxes(1, 2)
    a_q, queries = _mixed(read, np.linalg.qr(of_heads)[1].swapaxes(1, 2), target.query_rank)
    query, bias = scores.queries(queries.swapaxes(0, 1))
    out = np.linalg.pinv(np.einsum("hr,nrd->hnd", a_v, values)) @ maps
    params: Parameters = {
        "query_basis": {"kernel": query.swapaxes(0, 1) * D**0.5, "bias": bias * D**0.5},
        "key_basis": {"kernel": np.einsum("mn,nrd->mrd", scores.key_inverse, keys)},
        "value_basis": {"kernel": np.einsum("mn,nrd->mrd", value_inverse, values)},
        "out": {"kernel": out},
    }
    inputs = len(query[0]), *(part.shape[1] for part in (heads.key, heads.value))
    for role, a, width in zip(("query", "key", "value"), (a_q, a_k, a_v), inputs, strict=True):
        R = a.shape[1]
        params[role] = {"kernel": np.zeros((width, H, R)), "bias": a * R}
    return params


def _shared(seen: np.ndarray, rank: int, D: int) -> tuple[np.ndarray, np.ndarray]:
    """a [H, R] and B [N, R, D] by which `Σ_r a[h, r] B[r]` serve the columns [H, N, C] of heads."""
    H, N, C = seen.shape
    groups, order = min(rank, H), list(range(H))
    if H % groups == 0:
        by_head = seen @ seen.swapaxes(1, 2)
        by_head = by_head / size_of(by_head)
        order = group(H, groups, lambda own: left_out(by_head[list(own)].sum(0), D))
    a, bases, factors = np.zeros((H, groups)), [], np.zeros((H, D, C))
    for r, own in enumerate(np.array_split(order, groups)):
        U = common_factor(seen[own].swapaxes(1, 2), D)
        a[own, r] = 1
        factors[own, : U.shape[1]] = U.T @ seen[own]
        bases.append(widened(U, D))
    return _alternate(seen, np.stack(bases, 1), a, factors, rank, fixed=False)


def _mixed(read: np.ndarray, factors: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """a [H, R] and B [M, R, D] of `read[h] F[h] ≈ Σ_r a[h, r] B[r] F[h]`, F [H, D, C]."""
    H, M, D = read.shape
    u, d, vt = np.linalg.svd(read.reshape(H, -1), full_matrices=False)
    R = min(rank, len(d))
    bases = (d[:R, None] * vt[:R] / H**0.5).reshape(R, M, D).swapaxes(0, 1)
    return _alternate(read @ factors, bases, u[:, :R] * H**0.5, factors, rank, fixed=True)


def _alternate(
    seen: np.ndarray,
    bases: np.ndarray,
    a: np.ndarray,
    factors: np.ndarray,
    rank: int,
    fixed: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """a and B of `seen[h] ≈ Σ_r a[h, r] B[r] F[h]`, F `fixed` or free; up to `rank` of them.

    Those that are not needed have a = 0 and random B.
    """
    N, R, D = bases.shape

    def step(bases: np.ndarray, state: State) -> tuple[np.ndarray, State]:
        _, factors = state
        B = bases.reshape(N, R, D)
        terms = np.einsum("nrd,hdc->hrnc", B, factors).reshape(len(seen), R, -1)
        both = zip(terms, seen.reshape(len(seen), -1), strict=True)
        a = np.stack([np.linalg.lstsq(one.T, whole, rcond=None)[0] for one, whole in both])
        if not fixed:
            factors = np.linalg.pinv(np.einsum("hr,nrd->hnd", a, B)) @ seen
        return np.einsum("hr,hdc->hrdc", a, factors).reshape(len(seen), R * D, -1), (a, factors)

    found, (a, _) = alternate(seen, bases.reshape(N, -1), step, (a, factors))
    a = np.pad(a, ((0, 0), (0, rank - R)))
    return a, widened(found, rank * D).reshape(N, rank, D)
