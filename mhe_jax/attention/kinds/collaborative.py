"""Collaborative attention: one query and key projection, which each head mixes in its own way."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import numpy as np

from mhe_jax.attention.kinds.mva import MultiValueAttention
from mhe_jax.attention.module import Call
from mhe_jax.attention.nearest.factors import Cost, Factors, parafac, sharing
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import Scores
from mhe_jax.attention.projection import named


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

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        width = self.score_features or call.head_features
        q = self._over_heads(self.project_groups("query", x, width), call)
        init = named(self.head_embedding_init, ("heads", "head_features"))
        shape = (self.num_heads, width)
        e = self.param("query_head_embedding", init, shape, self.param_dtype).astype(q.dtype)
        return self.normalized("query_ln", q * (1 + e)[None, None])

    def core(self, head_features: int) -> tuple[int, int, int]:
        H = self.num_heads
        return H * (self.score_features or head_features), H * head_features, 0

    def heads(self, params: Mapping[str, Any]) -> Heads:
        heads = super().heads(params)
        m = 1 + np.asarray(params["query_head_embedding"], np.float64)
        m = np.pad(m, ((0, 0), (0, 1)), constant_values=1)  # not the column of the bias
        return dataclasses.replace(heads, query=heads.query * m[:, None])

    def common_cost(self, scores: Scores, rank: int) -> Cost:
        return sharing(scores.forms, rank)

    def common_forms(self, forms: np.ndarray, rank: int, width: int) -> Factors:
        """`A diag(m[h]) Kᵀ` by PARAFAC.

        Where there is room for every head's singular vectors, `width` per head, these are used,
        exactly.
        """
        u, d, vt = np.linalg.svd(forms, full_matrices=False)
        width = min(width, d.shape[1])
        chosen = np.argsort(-d[:, :width], None, kind="stable")[:rank]
        h, i = np.unravel_index(chosen, (len(forms), width))
        A = u[h, :, i].T * d[h, i]
        if rank < len(forms) * width:
            return parafac(forms, rank, [A])[:3]
        size = len(forms) ** 0.5  # m has mean square 1, as in `parafac`
        own = np.arange(len(forms))[:, None] == h
        return A / size, own * size, vt[h, i].T
