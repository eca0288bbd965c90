"""Every kind of attention as query heads that read K key and value heads, as others have them.

    Q_h = x W_q[h] + b_q[h]    K_g = y W_k[g] + b_k[g]    V_g = y W_v[g] + b_v[g]    g = ⌊hK/H⌋
    out = Σ_h softmax(Q_h K_gᵀ / √S) V_g W_o[h] + b_o

K is as small as the kind allows. Exact: where nothing is folded, the numbers are those of the run.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mhe_jax.attention import KINDS
from mhe_jax.config import AttentionConfig, InputError

# Kinds without heads `x W_q[h]`, `y W_k[g]` and `y W_v[g]`, and why.
WITHOUT_HEADS = {
    **{kind: module.not_linear for kind, module in KINDS.items() if module.not_linear},
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

    def repeated(self, key_heads: int) -> "Heads":
        """The same with `key_heads` key and value heads, a multiple of K."""
        times = key_heads // self.key.shape[1]
        names = ("key", "key_bias", "value", "value_bias")
        return self._replace(**{n: np.repeat(getattr(self, n), times, -2) for n in names})

    def widened(self, width: int, name: str) -> "Heads":
        """The same with queries, keys and values `width` wide; `name` is that of the home.

        Columns of zeros change neither scores nor values; queries make up for the changed scale.
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
            query=_padded(self.query * scale, width),
            query_bias=_padded(self.query_bias * scale, width),
            key=_padded(self.key, width),
            key_bias=_padded(self.key_bias, width),
            value=_padded(self.value, width),
            value_bias=_padded(self.value_bias, width),
            out=_padded(self.out.swapaxes(1, 2), width).swapaxes(1, 2),
        )


def require_heads(kind: str) -> None:
    """Raises InputError for a kind whose heads are not linear maps of its inputs."""
    if kind in WITHOUT_HEADS:
        raise InputError(f"{kind} is not exported: {WITHOUT_HEADS[kind]}")


def require_keys_that_turn(kind: str, home: str) -> None:
    """Raises InputError if keys have embeddings or biases per head, which `home` rotates too."""
    require_heads(kind)
    if kind not in ("mha", "mqa", "gqa", "sha", "skv", "el"):
        raise InputError(
            f"model.attention.kind is {kind!r}: {home} turns keys after their embeddings or "
            "biases, which have no place in it"
        )


def heads_of(config: AttentionConfig, features: int, params: Mapping[str, Any]) -> Heads:
    """The heads of one attention sublayer of a model that is `features` wide.

    The key embedding of `mhe_add` is left out, since softmax cancels it. In `mva` and
    `collaborative`, the bias of a key becomes one more column of it. The query's is the root of
    its width, which the scores are divided by.
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

    def read(name: str, heads: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """A projection [M, heads, width] and its bias [heads, width]."""
        bias = params[name].get("bias", np.zeros(heads * width, np.float32))
        kernel = params[name]["kernel"].reshape(-1, heads, width)
        return kernel, bias.reshape(heads, width)

    def embedding(name: str) -> np.ndarray:
        return params[f"{name}_embedding"]

    if kind in ("mha", "mqa", "gqa", "skv", "el"):
        K = {"mqa": 1, "gqa": config.num_kv_heads or H}.get(kind, H)
        query = read("query", H, D)
        if kind == "el":
            key = value = np.eye(M, dtype=np.float32).reshape(M, H, D), np.zeros((H, D), "f")
        else:
            key = read("key_value" if kind == "skv" else "key", K, D)
            value = read("key_value" if kind == "skv" else "value", K, D)
    else:
        # Shared by the heads of a group.
        kernel, bias = read("query", groups, S)
        query = np.repeat(kernel, H // groups, 1), np.repeat(bias, H // groups, 0)
        key = read("key", groups, S)
        value = read("value", H if has_key_bias else groups, D)
    out = params["out"]["kernel"].reshape(H, D, -1)
    out_bias = params["out"].get("bias", np.zeros(out.shape[-1], np.float32))
    heads = Heads(*query, *key, *value, out, out_bias)
    if kind == "mhe_add":
        if "query_group_embedding" in params:
            factors = 1 + embedding("query_group")
            heads = _times(heads, np.repeat(factors, H // len(factors), 0))
        added = np.einsum("hd,hdm->m", embedding("value_head"), out)
        return heads._replace(
            query_bias=heads.query_bias + embedding("query_head"), out_bias=out_bias + added
        )
    if kind == "mhe_mul":
        heads = _times(heads, (1 + embedding("query_head")) * (1 + embedding("key_head")))
        return heads._replace(out=out * (1 + embedding("value_head"))[:, :, None])
    if kind == "collaborative":
        heads = _times(heads, 1 + embedding("query_head"))
    if has_key_bias:
        bias, _ = read("key_bias", H, 1)
        # The wider heads divide by √(S + 1) instead of √S; the bias must not be divided at all.
        heads = _times(heads, np.float32(((S + 1) / S) ** 0.5))
        ones = np.full((H, 1), (S + 1) ** 0.5, np.float32)
        return heads._replace(
            query=_padded(heads.query, S + 1),
            query_bias=np.concatenate([heads.query_bias, ones], -1),
            key=np.concatenate([np.repeat(heads.key, H // groups, 1), bias], -1),
            key_bias=_padded(np.repeat(heads.key_bias, H // groups, 0), S + 1),
        )
    return heads


def _times(heads: Heads, factors: Any) -> Heads:
    """With queries, and their biases, times `factors`."""
    return heads._replace(query=heads.query * factors, query_bias=heads.query_bias * factors)


def _padded(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
