"""GTA: grouped-tied attention, whose keys are half a value and half a rotary part."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.kinds.gqa import GroupedQueryAttention
from mhe_jax.attention.module import Call
from mhe_jax.attention.nearest.factors import alternate, columns, common_factor, sharing
from mhe_jax.attention.nearest.heads import Heads, projected
from mhe_jax.attention.nearest.scores import (
    Joint,
    Moments,
    Parameters,
    Scores,
    last,
    widened,
)


class GroupedTiedAttention(GroupedQueryAttention):
    """GTA: `V_g = X W[g]`, `K_g = [first half of V_g ; rope(X W_r)]`, g = ⌊hG/H⌋ for query head h.

    W_q [M, H, D]; W [M, G, D], `key_value`, for G = `num_kv_heads` groups; W_r [M, D/2], `key`, one
    for all of them; W_o [H, D, M]. With `rotary` the last half of queries and keys is rotated, that
    of keys before it is cached; the tied halves are not. Without it the shapes are the same. With
    `normalize_qk` each half of a key has its own norm, `tied_ln` and `rotary_ln`, because they are
    cached apart.

    Parameters 2·M·HD + M·GD + MD/2, cached numbers per token GD + D/2. Where `inputs_v` is given,
    values are its projection by the same W; with `decode`, whose cache has one array for them and
    the tied halves, `inputs_v` is refused.

    Source: Zadouri, Strauss and Dao 2025, "Hardware-Efficient Attention for Fast Decoding", arXiv
    2505.21487.

    Raises:
      ValueError: D is odd, or as `GroupedQueryAttention`.
    """

    kind: ClassVar[str] = "gta"
    one_source: ClassVar[bool] = True
    not_rotated: ClassVar[str | None] = "half of a key does not turn"

    def check(self, head_features: int, features: int) -> None:
        if head_features % 2:
            raise ValueError(
                f"num_heads={self.num_heads}: gta ties half of a key to its value, and a head is "
                f"{head_features} wide, which is odd"
            )
        super().check(head_features, features)

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        half = call.head_features // 2
        tied = self.project_both("key_value", inputs_k, inputs_v, self.kv_heads, call)
        key = self._projection("key")(inputs_k, (half,), ("embed", "head_features"))
        return {**tied, "key": self.normalized("rotary_ln", key[:, :, None])}

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        state, key = memory["key_value"], memory["key"]
        tied = self.normalized("tied_ln", state[..., : key.shape[-1]])
        key = jnp.concatenate([tied, jnp.broadcast_to(key, tied.shape)], -1)
        return key, memory.get("value", state)

    def turned_features(self, head_features: int) -> int:
        return head_features // 2

    def heads(self, params: Mapping[str, Any]) -> Heads:
        heads = Heads.of(params, key="key_value", value="key_value")
        shared = np.repeat(projected(params["key"]), len(heads.key), 0)
        key = np.concatenate([heads.key[..., : shared.shape[-1]], shared], -1)
        return dataclasses.replace(heads, key=key)

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """For each group a state for its values, half of it also in its keys; W_r for all.

        They minimize `Σ_h ‖F[h] - A[h] [T_g, R]ᵀ‖² + ‖V[h] - [T_g, E_g] O[h]‖²` for the scores F
        and the values V of `Joint`; [T_g, E_g] becomes W[g], and R becomes W_r.
        """
        D, G = heads.out.shape[1], self.kv_heads
        heads, both = Joint.in_groups(
            heads, moments, self.use_bias, G, lambda both: [sharing(both.rows, D + D // 2)]
        )
        scored = both.forms.shape[1]
        forms = columns(both.rows[:, :scored], heads.key.shape[-1])
        bases = _bases(forms, columns(both.rows[:, scored:], D), G, D)
        bases = bases / (np.linalg.norm(bases, axis=0) + 1e-300)
        scores = Scores(heads, moments, self.use_bias)
        states, shared = np.split(both.key_inverse @ bases, [G * D], 1)
        queries, outs = [], []
        for g, own in enumerate(np.split(np.arange(len(forms)), G)):
            state = slice(g * D, (g + 1) * D)
            keys = scores.key @ np.concatenate([states[:, state][:, : D // 2], shared], 1)
            queries.append(scores.forms[own] @ np.linalg.pinv(keys).T)
            outs.append(np.linalg.pinv(bases[:, state]) @ both.maps[own])
        query, bias = scores.queries(np.concatenate(queries) * D**0.5)
        return {
            "query": {"kernel": last(query), "bias": bias},
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
