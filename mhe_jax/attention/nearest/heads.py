"""Attention as plain heads, which others have too and from which a conversion starts."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Heads:
    """H query heads that read K key and value heads, in float64; K as small as the kind allows.

        Y = Σ_h softmax([x, 1] Q[h] ([y, 1] K[g])ᵀ / √S) [z, 1] V[g] O[h] + b,  g = ⌊hK/H⌋

    x [M] is a query's input, y [N] a key's and z [N'] a value's; last rows are biases.
    """

    query: np.ndarray  # [H, M+1, S]
    key: np.ndarray  # [K, N+1, S]
    value: np.ndarray  # [K, N'+1, D], of a K of its own
    out: np.ndarray  # [H, D, P]
    bias: np.ndarray  # [P]

    @classmethod
    def of(cls, params: Mapping[str, Any], key: str = "key", value: str = "value") -> "Heads":
        """Those of projections [M, D] or [M, heads, D] with these names."""
        out = np.asarray(params["out"]["kernel"], np.float64)
        bias = np.asarray(params["out"].get("bias", np.zeros(out.shape[2])), np.float64)
        query = projected(params["query"])
        query = np.repeat(query, len(out) // len(query), 0)
        return cls(query, projected(params[key]), projected(params[value]), out, bias)

    def with_key_bias(self, kernel: np.ndarray) -> "Heads":
        """With scores that each head adds to a key, `y kernel` [N, H], as one more column of keys.

        Queries are 1 there, times the root of the width, which scores are divided by.
        """
        H, rows, S = self.query.shape
        one = np.zeros((H, rows, 1))
        one[:, -1] = (S + 1) ** 0.5
        query = np.concatenate([self.query * ((S + 1) / S) ** 0.5, one], -1)
        column = np.pad(np.asarray(kernel, np.float64).T[:, :, None], ((0, 0), (0, 1), (0, 0)))
        key = np.concatenate([np.repeat(self.key, H // len(self.key), 0), column], -1)
        return dataclasses.replace(self, query=query, key=key)

    def repeated(self, count: int | None = None) -> "Heads":
        """The same with H key and value heads, or `count` of them."""
        count = count or len(self.out)
        key, value = (np.repeat(x, count // len(x), 0) for x in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value)

    def widened(self, width: int) -> "Heads":
        """The same with queries, keys and values `width` wide, which is as wide or wider.

        Columns of zeros change neither scores nor values; queries make up for the changed scale.
        """
        query = self.query * (width / self.query.shape[-1]) ** 0.5
        out = _padded(self.out.swapaxes(1, 2), width).swapaxes(1, 2)
        query, key, value = (_padded(x, width) for x in (query, self.key, self.value))
        return Heads(query, key, value, out, self.bias)

    def ordered(self, order: Sequence[int]) -> "Heads":
        """The same in another order, where K is H."""
        at = list(order)
        return Heads(self.query[at], self.key[at], self.value[at], self.out[at], self.bias)

    # What the output depends on, where K is H. A bias of keys adds the same to all scores of a
    # query, which softmax cancels, and one of values adds the same to every output.

    @property
    def forms(self) -> np.ndarray:
        """Q[h] K[h]ᵀ / √S [H, M+1, N]: the scores."""
        return self.query @ self.key[:, :-1].swapaxes(1, 2) * self.query.shape[-1] ** -0.5

    @property
    def maps(self) -> np.ndarray:
        """V[h] O[h] [H, N', P]: what each head adds to the output for a key that it looks at."""
        return self.value[:, :-1] @ self.out

    @property
    def constant(self) -> np.ndarray:
        """b with what biases of values add [P]."""
        return self.bias + np.einsum("hd,hdp->p", self.value[:, -1], self.out)


def _padded(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])))


def projected(projection: Mapping[str, Any]) -> np.ndarray:
    """A kernel [M, D] or [M, heads, D] and its bias, if any: [heads, M+1, D], in float64."""
    kernel = np.asarray(projection["kernel"], np.float64)
    bias = np.asarray(projection.get("bias", np.zeros(kernel.shape[1:])), np.float64)
    rows = np.concatenate([kernel, bias[None]])
    return rows.reshape(len(rows), -1, rows.shape[-1]).swapaxes(0, 1)
