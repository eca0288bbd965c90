"""Moments of real inputs, and the W_o with which a module does best on them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.mask import Mask, as_mask
from mhe_jax.attention.module import Attention
from mhe_jax.attention.nearest.scores import Moments

# How strongly W_o is held where it was, as a share of the mean square of what it reads.
RIDGE = 1e-3


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("query", "key", "mask", "valid", "output"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Activations:
    """A batch of what an attention module takes, and the output that it should give.

    Queries that `valid` leaves out, such as padding, do not count.
    """

    query: Any  # [B, T, M]
    key: Any = None  # [B, S, N]; None for `query`
    mask: Any = Mask()  # or an array, as a call takes it
    valid: Any = None  # [B, T]; None for all
    output: Any = None  # [B, T, P]; None for the output of the module to be converted

    def completed(self, module: Attention, params: Mapping[str, Any]) -> "Activations":
        """A copy with every part; an output that is missing is that of `module`."""
        key = self.query if self.key is None else self.key
        valid = np.ones(np.shape(self.query)[:2], bool) if self.valid is None else self.valid
        mask = as_mask(self.mask, np.shape(self.query)[:1])
        whole = dataclasses.replace(self, key=key, valid=valid, mask=mask)
        return whole if self.output is not None else _with_output(module, params, whole)


@partial(jax.jit, static_argnums=0)
def _with_output(module: Attention, params: Any, a: Activations) -> Activations:
    return dataclasses.replace(a, output=_apply(module, params, a))


def _apply(module: Attention, params: Any, a: Activations) -> jax.Array:
    return module.apply({"params": params}, a.query, a.key, mask=a.mask, deterministic=True)  # pyright: ignore[reportReturnType]


def moments_of(activations: Sequence[Activations]) -> Moments:
    """Means and second moments; of keys also about the mean of those that are seen in their row."""
    sums: list[Any] = [sum(part) for part in zip(*map(_sums, activations), strict=True)]
    count, mean, query, keys, about, raw = sums
    mean = mean / count
    second = query / count - np.outer(mean, mean)
    return Moments(mean, second, about / keys, raw / keys)


def _sums(a: Activations) -> tuple[Any, ...]:
    x, y = (np.asarray(part, np.float64) for part in (a.query, a.key))
    seen = np.asarray(a.mask.key_is_seen(x.shape[1], y.shape[1])).reshape(-1, y.shape[1])
    seen = np.broadcast_to(seen, y.shape[:2])
    rows, keys = x[np.asarray(a.valid, bool)], y[seen]
    means = np.einsum("bs,bsn->bn", seen, y) / np.maximum(seen.sum(1), 1)[:, None]
    about = (y - means[:, None])[seen]
    return len(rows), rows.sum(0), rows.T @ rows, len(keys), about.T @ about, keys.T @ keys


def fit_output(module: Attention, params: Any, activations: Sequence[Activations]) -> Any:
    """`params` with W_o (and its bias) fitted to real outputs by least squares.

    `W_o + (FᵀF + λ)⁻¹ Fᵀ (Y - F W_o)`, F the outputs of the heads: an exact W_o stays as it is.
    """
    kernel = np.asarray(params["out"]["kernel"], np.float64)
    H, D, P = kernel.shape
    wide = module.clone(out_features=H * D)
    eye = jnp.eye(H * D).reshape(H, D, H * D)
    out = {"kernel": eye} | ({"bias": jnp.zeros(H * D)} if "bias" in params["out"] else {})
    old = kernel.reshape(H * D, P)
    if "bias" in params["out"]:
        old = np.concatenate([old, np.asarray(params["out"]["bias"], np.float64)[None]])
    gram, right = np.zeros((len(old), len(old))), np.zeros(old.shape)
    for a in activations:
        valid = np.asarray(a.valid, bool)
        found = _with_output(wide, {**params, "out": out}, a)
        F = np.asarray(found.output, np.float64)[valid]
        F = np.pad(F, ((0, 0), (0, len(old) - H * D)), constant_values=1)
        gram += F.T @ F
        right += F.T @ (np.asarray(a.output, np.float64)[valid] - F @ old)
    ridge = RIDGE * np.trace(gram) / len(gram)
    new = old + np.linalg.solve(gram + ridge * np.eye(len(gram)), right)
    fitted = {"kernel": new[: H * D].reshape(kernel.shape)}
    if "bias" in params["out"]:
        fitted["bias"] = new[-1]
    return {
        **params,
        "out": jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), params["out"], fitted),
    }


def error(module: Attention, params: Any, activations: Sequence[Activations]) -> float:
    """`‖Y - Y'‖ / ‖Y‖` (Frobenius) over the queries that count."""
    found = jax.device_get([_losses(module, params, a) for a in activations])
    missed, whole = np.sum(np.asarray(found, np.float64), 0)
    return float((missed / max(whole, np.finfo(np.float32).tiny)) ** 0.5)


@partial(jax.jit, static_argnums=0)
def _losses(module: Attention, params: Any, a: Activations) -> tuple[jax.Array, jax.Array]:
    weights = jnp.asarray(a.valid, jnp.float32)[..., None]
    missed = _apply(module, params, a) - a.output
    return jnp.sum(weights * missed**2), jnp.sum(weights * a.output**2)
