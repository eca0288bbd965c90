"""Dense parameters to sums of Kronecker products, by a singular value decomposition of the
rearranged matrix, `R(W) = U S Vᵀ`, `A = √S Uᵀ`, `B = √S Vᵀ`: the best of each rank where the sizes
of the factors are divisors; where W is padded, the best for W with zeros as padding."""

import math
from typing import Any

import numpy as np

from mhe_jax.shapeshifter import Factors


def factorize(params: Any, like: Any) -> tuple[Any, dict[str, float]]:
    """Parameters of the shapes of `like`, of a model with `model.kronecker`, closest to `params`.

    Also, by the path of each matrix that has become factors, its relative error
    ‖W - Σ A ⊗ B‖ / ‖W‖ (Frobenius).
    """
    errors: dict[str, float] = {}
    return _tree(params, like, "", errors), errors


def best_factors(w: Any, factors: Factors, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A [r, m1, n1] and B [r, m2, n2] that come closest to W [m, n], padded with zeros.

    >>> w = np.kron(np.arange(6.0).reshape(2, 3), np.arange(4.0).reshape(2, 2))
    >>> a, b = best_factors(w, Factors(2, 3, 2, 2), 1)
    >>> bool(np.allclose(np.kron(a[0], b[0]), w))
    True
    """
    f = factors
    w = np.pad(w, ((0, f.m1 * f.m2 - w.shape[0]), (0, f.n1 * f.n2 - w.shape[1])))
    w = w.reshape(f.m1, f.m2, f.n1, f.n2).transpose(0, 2, 1, 3).reshape(f.m1 * f.n1, -1)
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    root = np.sqrt(s[:rank])
    a = (u[:, :rank] * root).T.reshape(rank, f.m1, f.n1)
    b = (vt[:rank] * root[:, None]).reshape(rank, f.m2, f.n2)
    return a.astype(np.float32), b.astype(np.float32)


def _tree(params: Any, like: Any, path: str, errors: dict[str, float]) -> Any:
    if not isinstance(like, dict):
        return params
    name = path.rpartition("/")[2]
    if not isinstance(params, dict):  # a table
        # Tables are [V, M], but an untied output matrix is kept as [M, V].
        w = np.swapaxes(params, -1, -2) if name == "output" else params
        return _matrices(w, like, path, errors)
    out = {}
    if "kernel" in params and "a" in like:
        kernel, stacked = params["kernel"], like["a"].ndim - 3
        # The kernel of `out`, [H, D, M], contracts two axes; the others contract the first.
        split = stacked + (2 if name == "out" else 1)
        rows = math.prod(kernel.shape[stacked:split])
        kernel = np.reshape(kernel, (*kernel.shape[:stacked], rows, -1))
        out = _matrices(kernel, like, f"{path}/kernel", errors)
    return out | {
        child: _tree(params[child], like[child], f"{path}/{child}".lstrip("/"), errors)
        for child in like
        if child not in out
    }


def _matrices(w: Any, like: dict[str, Any], path: str, errors: dict[str, float]) -> dict[str, Any]:
    """Factors of W [m, n], or of one W per layer [L, m, n]."""
    (rank, m1, n1), (_, m2, n2) = like["a"].shape[-3:], like["b"].shape[-3:]
    if w.ndim == 3:
        one = {"a": np.empty((rank, m1, n1)), "b": np.empty((rank, m2, n2))}
        layers = [_matrices(w[i], one, f"{path}[{i}]", errors) for i in range(len(w))]
        return {name: np.stack([layer[name] for layer in layers]) for name in one}
    w = np.asarray(w, np.float32)
    a, b = best_factors(w, Factors(m1, n1, m2, n2), rank)
    whole = np.einsum("kab,kce->acbe", a, b).reshape(m1 * m2, n1 * n2)
    missed = np.linalg.norm(w - whole[: w.shape[0], : w.shape[1]])
    errors[path] = float(missed / max(np.linalg.norm(w), np.finfo(np.float32).tiny))
    return {"a": a, "b": b}
