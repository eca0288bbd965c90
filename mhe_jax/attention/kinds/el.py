"""EL-attention: the hidden states are keys and values."""

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.module import Attention, Call
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import Moments, Parameters, Scores, last, norm


class ELAttention(Attention):
    """EL: `K_h = V_h = X[:, hD:(h+1)D]`, the hidden states themselves, cut into H slices.

    W_q [M, H, D], W_o [H, D, M]; no key and no value projection. Parameters 2M², cached numbers per
    token HD. Keys and values must be H·D wide. Where `inputs_v` is given, its slices are the
    values; with `decode`, whose cache has one array for both, `inputs_v` is refused. With `rotary`
    keys are rotated as they are read from the cache, and values are not. Yan et al. 2021, in the
    form that Xue & Aletras 2023 count.

    Raises:
      ValueError: the width of `inputs_k` or `inputs_v` is not `qkv_features`.
    """

    kind: ClassVar[str] = "el"
    one_source: ClassVar[bool] = True
    turned: ClassVar[str | None] = None

    def check(self, head_features: int, features: int) -> None:
        super().check(head_features, features)
        if features != self.num_heads * head_features:
            raise ValueError(
                f"qkv_features={self.num_heads * head_features} must be {features}, the width of "
                "the hidden states, which el cuts into heads"
            )

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        memory = {"hidden": self._slices(inputs_k, call)}
        return memory if inputs_v is None else memory | {"value": self._slices(inputs_v, call)}

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        hidden = memory["hidden"]
        return self.normalized("key_ln", hidden), memory.get("value", hidden)

    def heads(self, params: Mapping[str, Any]) -> Heads:
        H, D, _ = params["out"]["kernel"].shape
        slices = {"kernel": np.eye(H * D).reshape(H * D, H, D)}
        return Heads.of({**params, "hidden": slices}, key="hidden", value="hidden")

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """Least squares of each head's scores and values by a slice of the inputs.

        Heads get slices by exchanges of two, as long as one helps.
        """
        (H, D, _), scores = heads.out.shape, Scores(heads, moments, self.use_bias)
        seen, added = (np.split(root, H, 1) for root in (scores.key, scores.value))
        forms = scores.forms.swapaxes(1, 2)

        def fit(h: int, i: int) -> tuple[np.ndarray, np.ndarray]:
            query = np.linalg.lstsq(seen[i], forms[h], rcond=None)[0]
            return query.T, np.linalg.lstsq(added[i], scores.maps[h], rcond=None)[0]

        def cost(h: int, i: int) -> float:
            query, out = fit(h, i)
            missed = norm(forms[h] - seen[i] @ query.T) / norm(forms[h])
            return missed**2 + (norm(scores.maps[h] - added[i] @ out) / norm(scores.maps[h])) ** 2

        costs = np.array([[cost(h, i) for i in range(H)] for h in range(H)])
        order = np.arange(H)
        while True:
            of_pairs = costs[order]  # [i, j]: the head of slice i in slice j
            now = np.diag(of_pairs)
            gains = of_pairs + of_pairs.T - now - now[:, None]
            i, j = np.unravel_index(np.argmin(gains), gains.shape)
            if gains[i, j] > -1e-9:
                break
            order[[i, j]] = order[[j, i]]
        query, out = zip(*(fit(h, i) for i, h in enumerate(order)), strict=True)
        query, bias = scores.queries(np.stack(query) * D**0.5)
        return {"query": {"kernel": last(query), "bias": bias}, "out": {"kernel": np.stack(out)}}

    def _slices(self, x: jax.Array, call: Call) -> jax.Array:
        """[B, S, H·D] to [B, S, H, D]."""
        # Without this, XLA's partitioner gave wrong gradients of inputs that are cut into heads on
        # one side and projected on the other.
        x = nn.with_logical_constraint(x, ("batch", "length", None))
        x = x.reshape(*x.shape[:-1], self.num_heads, call.head_features)
        return x if self.dtype is None else x.astype(self.dtype)
