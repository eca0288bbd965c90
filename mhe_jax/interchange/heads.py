"""Every kind of attention as query heads that read K key and value heads, as others have them.

    Q_h = x W_q[h] + b_q[h]    K_g = y W_k[g] + b_k[g]    V_g = y W_v[g] + b_v[g]    g = ⌊hK/H⌋
    out = Σ_h softmax(Q_h K_gᵀ / √S) V_g W_o[h] + b_o

K is as small as the kind allows. Exact: where nothing is folded, the numbers are those of the run.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mhe_jax.attention.conversion.heads import NOT_LINEAR
from mhe_jax.config import AttentionConfig, InputError
from mhe_jax.shapeshifter.kronecker import materialize

# Kinds without heads `x W_q[h]`, `y W_k[g]` and `y W_v[g]`, and why.
WITHOUT_HEADS = {
    **NOT_LINEAR,
    "gta": "its keys are tied to its values, and share the half that turns",
}


class Heads(NamedTuple):
    """One attention sublayer; S is the width of the scores, E that of the values."""

    query: np.ndarray  # [M, H, S]
    query_bias: np.ndarray  # [H, S]
    key: np.ndarray  # [M, K, S]
    key_bias: np.ndarray  # [K, S]
    value: np.ndarray  # [M, K, E]
    value_bias: np.ndarray  # [K, E]
    out: np.ndarray  # [H, E, M]
    out_bias: np.ndarray  # [M]

    @property
    def key_heads(self) -> int:
        """K."""
        return self.key.shape[1]

    def repeated(self, key_heads: int) -> "Heads":
        """The same with `key_heads` key and value heads, a multiple of K."""
        times = key_heads // self.key_heads
        return self._replace(
            key=np.repeat(self.key, times, 1),
            key_bias=np.repeat(self.key_bias, times, 0),
            value=np.repeat(self.value, times, 1),
            value_bias=np.repeat(self.value_bias, times, 0),
        )

    def widened(self, width: int, name: str) -> "Heads":
        """The same with queries, keys and values `width` wide; `name` is that of the home.

        Columns of zeros change neither scores nor values; queries make up for the changed scale.

        Raises:
          InputError: scores or values are wider.
        """
        scored, valued = self.query.shape[-1], self.value.shape[-1]
        if max(scored, valued) > width:
            raise InputError(
                f"{name} has heads that are {width} wide, features / num_heads: scores of width "
                f"{scored} and values of width {valued} do not fit in it"
            )
        if scored == valued == width:
            return self
        scale = np.float32((width / scored) ** 0.5)
        return self._replace(
            query=_padded(self.query * scale, -1, width),
            query_bias=_padded(self.query_bias * scale, -1, width),
            key=_padded(self.key, -1, width),
            key_bias=_padded(self.key_bias, -1, width),
            value=_padded(self.value, -1, width),
            value_bias=_padded(self.value_bias, -1, width),
            out=_padded(self.out, 1, width),
        )


def require_heads(kind: str) -> None:
    """Raises InputError for a kind whose heads are not linear maps of its inputs."""
    if kind in WITHOUT_HEADS:
        raise InputError(f"{kind} is not exported: {WITHOUT_HEADS[kind]}")


def heads_of(config: AttentionConfig, features: int, params: Mapping[str, Any]) -> Heads:
    """The heads of one attention sublayer of a model that is `features` wide.

    The key embedding of `mhe_add` is left out, since softmax cancels it. In `mva` and
    `collaborative`, the bias of a key becomes one more column of it. The query's is the root of
    its width, which the scores are divided by.

    Raises:
      InputError: `normalize_qk`, for which others have no layer; a kind that has no such heads.
    """
    require_heads(config.kind)
    if config.normalize_qk:
        raise InputError(
            "model.attention.normalize_qk cannot be exported: a LayerNorm lies between projections "
            "and scores"
        )
    M, H, kind = features, config.num_heads, config.kind
    D = (config.qkv_features or M) // H
    groups = config.num_groups or 1
    S = config.score_features or D
    has_key_bias = kind in ("mva", "collaborative")
    read = _Reader(params, M)

    if kind in ("mha", "mqa", "gqa", "skv", "el"):
        K = {"mqa": 1, "gqa": config.num_kv_heads or H}.get(kind, H)
        query = read("query", H, D)
        if kind == "el":
            key = value = np.eye(M, dtype=np.float32).reshape(M, H, D), np.zeros((H, D), "f")
        else:
            both = kind == "skv"
            key = read("key_value" if both else "key", K, D)
            value = read("key_value" if both else "value", K, D)
    else:
        # Shared by the heads of a group.
        kernel, bias = read("query", groups, S)
        query = np.repeat(kernel, H // groups, 1), np.repeat(bias, H // groups, 0)
        key = read("key", groups, S)
        value = read("value", H if has_key_bias else groups, D)
    out, out_bias = read.out(H, D)
    heads = Heads(*query, *key, *value, out, out_bias)
    if kind == "mhe_add":
        return _with_added(heads, params, H)
    if kind == "mhe_mul":
        e_q, e_k, e_v = (1 + params[f"{role}_head_embedding"] for role in ("query", "key", "value"))
        return heads._replace(
            query=heads.query * (e_q * e_k),
            query_bias=heads.query_bias * (e_q * e_k),
            out=heads.out * e_v[:, :, None],
        )
    if kind == "collaborative":
        m = 1 + params["query_head_embedding"]
        heads = heads._replace(query=heads.query * m, query_bias=heads.query_bias * m)
    if has_key_bias:
        bias, _ = read("key_bias", H, 1)
        heads = heads._replace(
            key=np.repeat(heads.key, H // groups, 1),
            key_bias=np.repeat(heads.key_bias, H // groups, 0),
        )
        # The wider heads divide by √(S + 1) instead of √S; the bias must not be divided at all.
        scale = np.float32(((S + 1) / S) ** 0.5)
        ones = np.full((H, 1), (S + 1) ** 0.5, np.float32)
        return heads._replace(
            query=_padded(heads.query * scale, -1, S + 1),
            query_bias=np.concatenate([heads.query_bias * scale, ones], -1),
            key=np.concatenate([heads.key, bias], -1),
            key_bias=_padded(heads.key_bias, -1, S + 1),
        )
    return heads


def _with_added(heads: Heads, params: Mapping[str, Any], H: int) -> Heads:
    e_q, e_v = (params[f"{role}_head_embedding"] for role in ("query", "value"))
    query, query_bias = heads.query, heads.query_bias
    if "query_group_embedding" in params:
        factors = 1 + params["query_group_embedding"]
        factors = np.repeat(factors, H // len(factors), 0)
        query, query_bias = query * factors, query_bias * factors
    return heads._replace(
        query=query,
        query_bias=query_bias + e_q,
        out_bias=heads.out_bias + np.einsum("hd,hdm->m", e_v, heads.out),
    )


def matrix(params: Mapping[str, Any], m: int, n: int) -> np.ndarray:
    """The kernel [m, n] of a projection, dense or of Kronecker products, multiplied out."""
    if "kernel" in params:
        return np.asarray(params["kernel"]).reshape(m, n)
    return np.asarray(materialize(params["a"], params["b"], m, n))


class _Reader:
    def __init__(self, params: Mapping[str, Any], features: int):
        self._params, self._features = params, features

    def __call__(self, name: str, heads: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """A projection [M, heads, width] and its bias [heads, width]."""
        params, n = self._params[name], heads * width
        kernel = matrix(params, self._features, n).reshape(-1, heads, width)
        bias = params.get("bias", np.zeros(n, np.float32))
        return kernel, np.asarray(bias).reshape(heads, width)

    def out(self, heads: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        params, M = self._params["out"], self._features
        kernel = matrix(params, heads * width, M).reshape(heads, width, M)
        return kernel, np.asarray(params.get("bias", np.zeros(M, np.float32)))


def _padded(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, size - x.shape[axis])
    return np.pad(x, pads)
