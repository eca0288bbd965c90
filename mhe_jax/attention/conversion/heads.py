"""Every kind as separate heads, from which a conversion starts.

    Y = Σ_h softmax([x, 1] Q[h] (y K[h])ᵀ) z V[h] O[h] + b

x [M] is a query's input, y [N] a key's and z [N'] a value's. The scale of the scores is within Q,
whose last row is the bias of the queries. A bias of keys adds the same to all scores of a query,
which softmax cancels; one of values adds the same to every output, and is within b.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Kinds whose heads are not linear maps of their inputs, and why.
NOT_LINEAR = {
    "mfa": "a norm lies between its inputs and its queries",
    "mla": "a norm lies between its inputs and its keys and values",
    "tpa": "its queries, keys and values are products of two maps of its inputs",
}


@dataclass(frozen=True)
class Heads:
    """One attention sublayer in float64; R is the width of the scores, D that of the values."""

    query: np.ndarray  # [H, M+1, R]
    key: np.ndarray  # [H, N, R]
    value: np.ndarray  # [H, N', D]
    out: np.ndarray  # [H, D, P]
    bias: np.ndarray  # [P]

    @property
    def forms(self) -> np.ndarray:
        """Q[h] K[h]ᵀ [H, M+1, N]: all that the scores depend on."""
        return self.query @ self.key.swapaxes(1, 2)

    @property
    def maps(self) -> np.ndarray:
        """V[h] O[h] [H, N', P]: what each head adds to the output for a key that it looks at."""
        return self.value @ self.out

    def ordered(self, order: Sequence[int]) -> "Heads":
        """The same heads in another order."""
        query, key, value, out = (
            part[list(order)] for part in (self.query, self.key, self.value, self.out)
        )
        return Heads(query, key, value, out, self.bias)


def expand(params: Mapping[str, Any], kind: str) -> Heads:
    """The heads that a module of `kind` computes with `params`; exact but for rounding.

    Raises:
      ValueError: `normalize_qk`, whose LayerNorm lies between the projections and the scores.
    """
    if "query_ln" in params or "key_ln" in params:
        raise ValueError("normalize_qk: a LayerNorm lies between projections and scores")
    p = _Parameters(params)
    out = p.array("out", "kernel")
    H, D = out.shape[:2]
    e_q, e_k, e_v = (p.table(f"{role}_head_embedding", H, D) for role in ("query", "key", "value"))
    query = p.heads("query", H, with_bias=True)
    if "query_group_embedding" in params:
        u = p.array("query_group_embedding")
        query = query * (1 + np.repeat(u, H // len(u), 0))[:, None]
    if kind == "el":
        N = H * D
        key = value = np.eye(N).reshape(N, H, D).swapaxes(0, 1)
        value_bias = np.zeros((H, D))
    else:
        both = "key_value" in params
        key = p.heads("key_value" if both else "key", H)
        value = p.heads("key_value" if both else "value", H, with_bias=True)
        value, value_bias = value[:, :-1], value[:, -1]
    if kind == "gta":
        shared = p.heads("key", H)
        key = np.concatenate([key[..., : shared.shape[-1]], shared], -1)
    scale = query.shape[-1] ** -0.5
    if kind == "mhe_add":
        query = query + np.pad(e_q[:, None], ((0, 0), (query.shape[1] - 1, 0), (0, 0)))
        value_bias = value_bias + e_v
    if kind == "mhe_mul":
        query, key = query * (1 + e_q)[:, None], key * (1 + e_k)[:, None]
        value, value_bias = value * (1 + e_v)[:, None], value_bias * (1 + e_v)
    if kind == "collaborative":
        query = query * (1 + e_q)[:, None]
    query = query * scale
    if "key_bias" in params:
        # One more column: a query of 1, and the bias as its key.
        one = np.zeros((H, query.shape[1], 1))
        one[:, -1] = 1
        query = np.concatenate([query, one], -1)
        key = np.concatenate([key, p.array("key_bias", "kernel").T[:, :, None]], -1)
    bias = np.einsum("hd,hdp->p", value_bias, out) + p.bias("out", out.shape[2:])
    return Heads(query, key, value, out, bias)


@dataclass(frozen=True)
class _Parameters:
    tree: Mapping[str, Any]

    def array(self, *names: str) -> np.ndarray:
        value: Any = self.tree
        for name in names:
            value = value[name]
        return np.asarray(value, np.float64)

    def bias(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        there = "bias" in self.tree[name]
        return self.array(name, "bias") if there else np.zeros(shape)

    def table(self, name: str, *shape: int) -> np.ndarray:
        return self.array(name) if name in self.tree else np.zeros(shape)

    def heads(self, name: str, H: int, with_bias: bool = False) -> np.ndarray:
        """A projection [M, D], or [M, G, D] of G groups, as one per head: [H, M(+1), D]."""
        kernel = self.array(name, "kernel")
        bias = self.bias(name, kernel.shape[1:])
        kernel = np.concatenate([kernel, bias[None]]) if with_bias else kernel
        kernel = kernel[:, None] if kernel.ndim == 2 else kernel
        return np.repeat(kernel, H // kernel.shape[1], 1).swapaxes(0, 1)
