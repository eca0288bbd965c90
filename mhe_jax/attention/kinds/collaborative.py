"""Collaborative attention: one query and key projection, which each head mixes in its own way."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax

from mhe_jax.attention.cost import Widths
from mhe_jax.attention.kinds.mva import MultiValueAttention
from mhe_jax.attention.module import Call
from mhe_jax.attention.projection import named
from mhe_jax.config import FORMS_OF_KINDS


class CollaborativeAttention(MultiValueAttention):
    """Collaborative: `O_h = softmax((X W_q ⊙ m[h]) (X W_k)ᵀ / √D_s + 1·(X U)[:, h]ᵀ) X W_v[h]`.

    W_q, W_k [M, D_s] for all heads, with D_s = `score_features`; the mixing vectors m [H, D_s]
    weigh the features of the scores; W_v [M, H, D]; U [M, H] a bias of each key for each head,
    `key_bias/kernel`; W_o [H, D, M]. With m = 1 it is `mva`, but it needs H score matrices instead
    of one. With `num_groups` G, W_q and W_k are [M, G, D_s] and head h reads those of group ⌊hG/H⌋.

    The parameter is e = m - 1, `query_head_embedding`. Like that of MHE-Mul, it starts as
    normal(0.5), since heads with nearly the same mixing hardly diverge, and has no weight decay.

    X U is exactly what the query biases of an MHA add to its scores. With `rotary` the mixed
    queries and the key are rotated, and X U is not, as in `mva`.

    Parameters 2·G·M·D_s + 2·M² + MH + H·D_s. Cached numbers per token G·D_s + H·D + H. Engines take
    as many key heads as value heads, so the shared key is repeated as it is read.

    Source: Cordonnier, Loukas and Jaggi 2020, "Multi-Head Attention: Collaborate Instead of
    Concatenate", arXiv 2006.16362.

    Attributes beyond `MultiValueAttention` (but without its form 'shared'):
      head_embedding_init: initializer of e; the paper starts from a decomposed MHA.
    """

    head_embedding_init: Callable = nn.initializers.normal(0.5)

    kind: ClassVar[str] = "collaborative"
    forms: ClassVar[tuple[str, ...]] = FORMS_OF_KINDS["collaborative"]

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        width = self.score_features or call.head_features
        q = self._over_heads(self.project_groups("query", x, width), call)
        init = named(self.head_embedding_init, ("heads", "head_features"))
        shape = (self.num_heads, width)
        e = self.param("query_head_embedding", init, shape, self.param_dtype).astype(q.dtype)
        return self.normalized("query_ln", q * (1 + e)[None, None])

    def widths(self, head_features: int) -> Widths:
        scored = self.num_heads * (self.score_features or head_features)
        weighted = self.num_heads * head_features
        row = super().widths(head_features)
        return dataclasses.replace(row, scored=scored, weighted=weighted, tables=scored)
