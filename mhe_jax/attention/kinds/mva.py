"""Multi-value attention: one score matrix for all heads, and separate values for each."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.forms import AttentionInGroups
from mhe_jax.attention.module import Call
from mhe_jax.attention.nearest.factors import Cost, Factors, common_factor, sharing_mean
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import (
    Moments,
    Parameters,
    Scores,
    balance,
    filled,
    own_values,
)


class MultiValueAttention(AttentionInGroups):
    """MVA: `O_h = softmax(X W_q (X W_k)ᵀ / √D_s + 1·(X U)[:, h]ᵀ) X W_v[h]`.

    W_q, W_k [M, D_s] for all heads, with D_s = `score_features`; W_v [M, H, D]; U [M, H] a bias of
    each key for each head, `key_bias/kernel`, without which all heads would have the same weights;
    W_o [H, D, M]. The mirror of multi-query attention: there values are shared, here queries and
    keys are, so one score matrix and one exponential serve all heads. With `num_groups` G, W_q and
    W_k are [M, G, D_s] and head h reads those of group ⌊hG/H⌋.

    With `rotary` the shared queries and keys are rotated, which leaves one score matrix, and the
    bias X U is not: it weighs a token by its content, wherever it stands. (The query bias of an
    MHA, otherwise a case of X U, is not one then, because what it adds depends on the distance.)

    Source: collaborative attention (Cordonnier, Loukas and Jaggi 2020, "Multi-Head Attention:
    Collaborate Instead of Concatenate", arXiv 2006.16362) has these shared queries and keys, a
    mixing vector for each head, a content bias on the keys, and separate values for each head; with
    each mixing vector fixed at one it is MVA. Grouped-head latent attention (arXiv 2506.17286) is a
    neighbour. The factoring to one exponential is close to the Attention Free Transformer (Zhai et
    al. 2021, arXiv 2105.14103), which has one learned matrix instead of these scores; for softmax
    attention, exact and with kernels, a search found no earlier instance.

    Parameters 2·G·M·D_s + 2·M² + MH. Cached numbers per token G·D_s + H·D + H: with D_s = D a
    little more than half of MHA's, and far more than MHE's 2D.

    Attributes beyond `AttentionInGroups`:
      form: 'shared' (see `mhe_jax.attention.engines.shared.xla`), or 'materialized': H query and
        key heads, and the bias added to their scores.
      score_features: D_s; None for D.

    Raises:
      ValueError: 'shared' for a call that it cannot do, such as a mask that differs between heads.
    """

    score_features: int | None = None

    kind: ClassVar[str] = "mva"
    turned_by: ClassVar[str] = "score_features"
    keeps_bias: ClassVar[tuple[str, ...]] = ("query",)
    not_rotated: ClassVar[str | None] = "the bias of each key does not turn"

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        q = self.project_groups("query", x, self.turned_features(call.head_features))
        return self._over_heads(self.normalized("query_ln", q), call)

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array, call: Call) -> KeyValues:
        key = self.project_groups("key", inputs_k, self.turned_features(call.head_features))
        # This projection has no bias, which would shift all scores of a head alike.
        bias = self._projection("key_bias", use_bias=False)
        return {
            "key": self.normalized("key_ln", key),
            "value": self.project_heads("value", inputs_v, self.num_heads, call),
            "key_bias": bias(inputs_k, (self.num_heads,), ("embed", "heads")),
        }

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        return self._over_heads(memory["key"], call), memory["value"]

    def score_bias(self, memory: KeyValues, key: jax.Array, call: Call) -> jax.Array:
        return memory["key_bias"]

    def turned_features(self, head_features: int) -> int:
        """D_s."""
        return self.score_features or head_features

    def core(self, head_features: int) -> tuple[int, int, int]:
        scored = self.num_groups * self.turned_features(head_features)
        return scored, self.num_heads * (head_features + 1), 0

    def heads(self, params: Mapping[str, Any]) -> Heads:
        return super().heads(params).with_key_bias(params["key_bias"]["kernel"])

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """Values and W_o as they are; for the scores of a group `common_forms`, at width D_s.

        The bias of each head's keys has all that its mean query adds, and so all of its bias.
        """
        G, R = self.num_groups, self.score_features or heads.out.shape[1]
        heads, scores = Scores.in_groups(
            heads, moments, self.use_bias, G, lambda scores: [self.common_cost(scores, R)]
        )
        kernels, keys, factors, biases = [], [], [], []
        for rest, mean in zip(np.split(scores.rest, G), np.split(scores.mean, G), strict=True):
            found, mixing, key = self.common_forms(rest, R, heads.key.shape[-1])
            scale = balance(found, key)
            kernel = scores.queries_about_mean(found * scale)
            kernel, key = filled(kernel, scores.key_inverse @ (key / scale), R)
            mixing = np.pad(mixing, ((0, 0), (0, R - mixing.shape[1])), constant_values=1)
            biases.append(scores.key_inverse @ mean.T - key @ ((scores.mu @ kernel) * mixing).T)
            kernels.append(kernel * R**0.5)
            keys.append(key)
            factors.append(mixing)
        return own_values(heads) | {
            "query": {"kernel": np.stack(kernels, 1)},
            "query_head_embedding": np.concatenate(factors) - 1,
            "key": {"kernel": np.stack(keys, 1)},
            "key_bias": {"kernel": np.concatenate(biases, 1)},
        }

    def common_cost(self, scores: Scores, rank: int) -> Cost:
        """What heads lose that share scores of that rank."""
        return sharing_mean(scores.rest, rank, float(np.sum(scores.forms**2)))

    def common_forms(self, forms: np.ndarray, rank: int, width: int) -> Factors:
        """Their mean [M, R] [R, N], between which stand factors of heads [n, R]: here none."""
        U = common_factor(forms.mean(0), rank)
        return forms.mean(0) @ U, np.ones((len(forms), U.shape[1])), U

    def _over_heads(self, x: jax.Array, call: Call) -> jax.Array:
        """[B, T, G, D_s] to [B, T, H, D_s], which 'shared' does not need."""
        if call.form == "shared":
            return x
        return jnp.repeat(x, self.num_heads // self.num_groups, 2)
