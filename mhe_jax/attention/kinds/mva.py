"""One query and key projection for all heads: MVA, and collaborative attention, which mixes it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.forms import AttentionInGroups
from mhe_jax.attention.module import Attention, Call
from mhe_jax.attention.nearest import (
    Heads,
    Moments,
    Parameters,
    balance,
    filled,
    in_groups,
    own_values,
)
from mhe_jax.attention.nearest.factors import common_factor
from mhe_jax.attention.projection import named


class MultiValueAttention(AttentionInGroups):
    """MVA: `O_h = softmax(X W_q (X W_k)ᵀ / √D_s + 1·(X U)[:, h]ᵀ) X W_v[h]`.

    W_q, W_k [M, D_s] for all heads, with D_s = `score_features`; W_v [M, H, D]; U [M, H] a bias of
    each key for each head, `key_bias/kernel`, without which all heads have the same weights;
    W_o [H, D, M]. One score matrix and one exponential serve all heads. With `num_groups` G, W_q
    and W_k are [M, G, D_s] and head h reads those of group ⌊hG/H⌋.

    With `rotary` the shared queries and keys are rotated, which leaves one score matrix, and the
    bias X U is not: it weighs a token by its content, wherever it stands.

    Source: collaborative attention with each mixing vector fixed at one (`CollaborativeAttention`).
    Name and head structure are those of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 7.2),
    which has no softmax. The factoring to one exponential has the algebra of its decays, and is
    close to the Attention Free Transformer (Zhai et al. 2021, arXiv 2105.14103), which has one
    learned matrix instead of these scores; docs/kinds.md has more.

    Parameters 2·G·M·D_s + 2·M² + MH. Cached numbers per token G·D_s + H·D + H: with D_s = D a
    little more than half of MHA's, and far more than MHE's 2D.

    Attributes beyond `AttentionInGroups`:
      form: 'shared' (see `mhe_jax.attention.engines.shared`), or 'materialized': H query and
        key heads, and the bias added to their scores.
      score_features: D_s; None for D.
      use_key_bias: False leaves out U: heads differ by their values alone, as a control.

    Raises:
      ValueError: 'shared' for a call that it cannot do, such as a mask that differs between heads.
    """

    score_features: int | None = None
    use_key_bias: bool = True

    kind: ClassVar[str] = "mva"
    turned_by: ClassVar[str] = "score_features"
    norms_heads: ClassVar[bool] = False
    not_rotated: ClassVar[str | None] = "the bias of each key does not turn"

    @property
    def keeps_bias(self) -> tuple[str, ...]:
        return ("query",) if self.use_key_bias else ()

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        q = self.project_groups("query", x, self.scored_features(call.head_features))
        return self._over_heads(self.normalized("query_ln", q), call)

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array, call: Call) -> KeyValues:
        H, D = self.num_heads, call.head_features
        key = self.project_groups("key", inputs_k, self.scored_features(D))
        memory = {
            "key": self.normalized("key_ln", key),
            "value": self.project_heads("value", inputs_v, H, D),
        }
        if self.use_key_bias:
            # This projection has no bias, which would shift all scores of a head alike.
            bias = self._projection("key_bias", use_bias=False)
            memory["key_bias"] = bias(inputs_k, (H,), ("embed", "heads"))
        return memory

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        return self._over_heads(memory["key"], call), memory["value"]

    def score_bias(self, memory: KeyValues, key: jax.Array, call: Call) -> jax.Array | None:
        if call.form != "shared":
            return memory.get("key_bias")
        # Engines of this form take no None.
        return memory["key_bias"] if self.use_key_bias else jnp.zeros_like(memory["value"][..., 0])

    def scored_features(self, head_features: int) -> int:
        """D_s."""
        return self.score_features or head_features

    def core(self, head_features: int) -> tuple[int, int, int]:
        scored = self.num_groups * self.scored_features(head_features)
        return scored, self.num_heads * (head_features + 1), 0

    def heads(self, params: Mapping[str, Any]) -> Heads:
        """The bias of keys is one more column of theirs, where the queries are a constant."""
        heads = super().heads(params)
        if not self.use_key_bias:
            return heads
        H, rows, S = heads.query.shape
        one = np.zeros((H, rows, 1))
        one[:, -1] = (S + 1) ** 0.5  # which scores are divided by
        query = np.concatenate([heads.query * ((S + 1) / S) ** 0.5, one], -1)
        kernel = np.asarray(params["key_bias"]["kernel"], np.float64)
        column = np.pad(kernel.T[:, :, None], ((0, 0), (0, 1), (0, 0)))
        key = np.concatenate([np.repeat(heads.key, H // len(heads.key), 0), column], -1)
        return dataclasses.replace(heads, query=query, key=key)

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """Values and W_o as they are; the mean scores of a group; what a mean query adds as U."""
        G, R = self.num_groups, self.score_features or heads.out.shape[1]
        heads, scores = in_groups(heads, moments, self.use_bias, G, R, mean=True, values=False)
        kernels, keys, biases = [], [], []
        for rest, mean in zip(np.split(scores.rest, G), np.split(scores.mean, G), strict=True):
            form = rest.mean(0)
            key = common_factor(form, R)
            found = form @ key
            scale = balance(found, key)
            kernel = scores.query_inverse @ (found * scale)
            kernel, key = filled(kernel, scores.key_inverse @ (key / scale), R)
            biases.append(scores.key_inverse @ mean.T - (key @ (scores.mu @ kernel))[:, None])
            kernels.append(kernel * R**0.5)
            keys.append(key)
        return own_values(heads) | {
            "query": {"kernel": np.stack(kernels, 1)},
            "key": {"kernel": np.stack(keys, 1)},
            "key_bias": {"kernel": np.concatenate(biases, 1)},
        }

    def _over_heads(self, x: jax.Array, call: Call) -> jax.Array:
        """[B, T, G, D_s] to [B, T, H, D_s], which 'shared' does not need."""
        if call.form == "shared":
            return x
        return jnp.repeat(x, self.num_heads // self.num_groups, 2)


class CollaborativeAttention(MultiValueAttention):
    """Collaborative: `O_h = softmax((X W_q ⊙ m[h]) (X W_k)ᵀ / √D_s + 1·(X U)[:, h]ᵀ) X W_v[h]`.

    W_q, W_k [M, D_s] for all heads, with D_s = `score_features`; the mixing vectors m [H, D_s]
    weigh the features of the scores; W_v [M, H, D]; U [M, H] a bias of each key for each head,
    `key_bias/kernel`; W_o [H, D, M]. With m = 1 it is `mva`, but it needs H score matrices instead
    of one. With `num_groups` G, W_q and W_k are [M, G, D_s] and head h reads those of group ⌊hG/H⌋.

    The parameter is e = m - 1, `query_head_embedding`; it has no weight decay. With `rotary` the
    mixed queries and the key are rotated, and X U is not, as in `mva`.

    Parameters 2·G·M·D_s + 2·M² + MH + H·D_s. Cached numbers per token G·D_s + H·D + H.

    Source: Cordonnier, Loukas and Jaggi 2020, "Multi-Head Attention: Collaborate Instead of
    Concatenate", arXiv 2006.16362.

    Attributes beyond `MultiValueAttention` (but without its form 'shared'):
      head_embedding_init: of e, normal(0.5); the paper starts from a decomposed MHA.
    """

    head_embedding_init: Callable = nn.initializers.normal(0.5)

    kind: ClassVar[str] = "collaborative"
    nearest = Attention.nearest  # not as mva

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        width = self.scored_features(call.head_features)
        q = self._over_heads(self.project_groups("query", x, width), call)
        init = named(self.head_embedding_init, ("heads", "head_features"))
        shape = (self.num_heads, width)
        e = self.param("query_head_embedding", init, shape, self.param_dtype).astype(q.dtype)
        return self.normalized("query_ln", q * (1 + e)[None, None])

    def core(self, head_features: int) -> tuple[int, int, int]:
        H = self.num_heads
        return H * self.scored_features(head_features), H * head_features, 0

    def heads(self, params: Mapping[str, Any]) -> Heads:
        heads = super().heads(params)
        m = 1 + np.asarray(params["query_head_embedding"], np.float64)
        # Not the column of the bias, if there is one.
        m = np.pad(m, ((0, 0), (0, heads.query.shape[-1] - m.shape[1])), constant_values=1)
        return dataclasses.replace(heads, query=heads.query * m[:, None])
