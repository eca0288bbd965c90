"""MFA: many wide query heads from one low-rank product, over one key and one value head."""

from typing import ClassVar

import flax.linen as nn
import jax
import numpy as np

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.kinds.mqa import MultiQueryAttention
from mhe_jax.attention.module import Call
from mhe_jax.attention.nearest.factors import common_factor
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import (
    Joint,
    Moments,
    Parameters,
    Scores,
    last,
    shared_values,
    widened,
)
from mhe_jax.attention.projection import named
from mhe_jax.config import InputError

# The constant of a latent is at least this many times √E‖u‖²: its size then holds to about 1e-6.
CONSTANT = 1000


class MultiMatrixFactorizationAttention(MultiQueryAttention):
    """MFA: `Q_h = norm(X W_dq) W_uq[h]`, `K = X W_k`, `V = X W_v`, one key and one value head.

    W_dq [M, r], `query_latent`, r = `query_rank`; norm is RMSNorm with a scale [r],
    `query_latent_norm`; W_uq [r, H, C], `query`; W_k, W_v [M, 1, C]; W_o [H, C, M]. C is the width
    of a head, `qkv_features` / H: heads are meant to be many and wide, H·C above M. `use_bias`
    applies to W_dq, W_k, W_v and W_o; W_uq, which makes heads, has no bias.

    MFA-KR, with `reuse_keys`: `V = K + α ⊙ (K N)`, N [C, C], `key_to_value`, α [C], `value_scale`.
    Only keys are cached. The weighted sum of values is linear in them, so α and N are applied to
    the output of each head, and values of cached keys are never made. N starts at 0, where values
    are the keys, and α at 1: if it were 0 too, neither would have a gradient. Where `inputs_v` is
    given, values are made from its projection by W_k; with `decode`, whose cache has one array for
    both, `inputs_v` is refused. With `normalize_qk` and `rotary` values are made from keys before
    norm and rotation, so keys get both as they are read from the cache.

    Parameters M(r + 2C) + rHC + HCM, for MFA-KR M(r + C) + C² + C + rHC + HCM, without biases and
    scales. Cached numbers per token 2C, for MFA-KR C.

    Source: Hu et al. 2024, "Multi-matrix Factorization Attention", arXiv 2412.19255.

    Attributes beyond `Attention`:
      query_rank: r; None for C.
      reuse_keys: MFA-KR.

    Raises:
      ValueError: `query_rank` is below 1.
    """

    query_rank: int | None = None
    reuse_keys: bool = False

    kind: ClassVar[str] = "mfa"
    not_linear: ClassVar[str | None] = "a norm lies between its inputs and its queries"

    @property
    def one_source(self) -> bool:
        return self.reuse_keys

    @property
    def turned(self) -> str | None:
        return None if self.reuse_keys else "key"

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        rank = self._rank(call.head_features)
        latent = self._projection("query_latent")(x, (rank,), ("embed", None))
        latent = self.rms_norm("query_latent_norm")(latent)
        names = ("embed", "heads", "head_features")
        up = self._projection("query", use_bias=False)
        return self.normalized("query_ln", up(latent, (self.num_heads, call.head_features), names))

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        if not self.reuse_keys:
            return super().memory(inputs_k, inputs_v, call)
        return self.project_both("key", inputs_k, inputs_v, 1, call)

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        if not self.reuse_keys:
            return super().expand(memory, call)
        key = memory["key"]
        return self.normalized("key_ln", key), memory.get("value", key)

    def merge(self, heads: jax.Array, weight_sum: jax.Array, call: Call) -> jax.Array:
        if self.reuse_keys:
            zeros, width = nn.initializers.zeros_init(), (call.head_features,)
            to_value = self._projection("key_to_value", kernel_init=zeros, use_bias=False)
            rest = to_value(heads, width, (None, "head_features"))
            init = named(nn.initializers.ones_init(), ("head_features",))
            alpha = self.param("value_scale", init, width, self.param_dtype)
            heads = heads + rest * alpha.astype(rest.dtype)[None, None, None]
        return self.project_out(heads, call)

    def core(self, head_features: int) -> tuple[int, int, int]:
        scored, weighted, _ = super().core(head_features)
        # N multiplies the output of each head.
        return scored, weighted, (self.num_heads - 1) * head_features**2 * self.reuse_keys

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """Keys and values as in `mqa`, with `reuse_keys` one for both, like the latent of `mla`.

        With `reuse_keys` values are the keys, since W_o can hold any map of them.
        """
        C = heads.out.shape[1]
        both, scores = Joint(heads, moments, True), Scores(heads, moments, True)
        if self.reuse_keys:
            U = common_factor(both.rows, C)
            basis, upper = np.linalg.qr(scores.key @ both.key_inverse @ U)
            out = upper @ U.T @ both.maps
            out = np.pad(out, ((0, 0), (0, C - out.shape[1]), (0, 0)))
            params = {"value_scale": np.ones(C), "out": {"kernel": out}}
        else:
            basis = common_factor(scores.forms * both.sizes[:, None, None], C)
            params = shared_values(scores, 1, C)
        bases = np.broadcast_to(basis, (len(heads.out), *basis.shape))
        latent, query = from_latent(scores, both.sizes, bases, self._rank(C), moments)
        key = widened(scores.key_inverse @ basis, C)
        query = np.pad(query, ((0, 0), (0, 0), (0, C - query.shape[-1])))
        made = {"query": {"kernel": last(query) * C**0.5}, "key": {"kernel": key}}
        return params | latent | made

    def _rank(self, C: int) -> int:
        """r."""
        return C if self.query_rank is None else self.query_rank


# RMSNorm divides a latent u = x W by its size `√(mean u²)`, which differs from token to token. No
# other kind does that. So one feature of u is a constant B, set by a bias: beside it the others are
# so small that the size is the same for all tokens, up to a part of about `(‖u‖² - E‖u‖²) / 2B²`,
# and the norm is a constant factor, which its scale undoes. That feature is 1 after the norm, and
# what is made from it is the bias that projections of a latent do not have.


def from_latent(
    scores: Scores, sizes: np.ndarray, bases: np.ndarray, rank: int, moments: Moments
) -> tuple[Parameters, np.ndarray]:
    """A latent of queries, with its norm, and the map [H, rank, R] from it to queries.

    `bases` [H, N, R] are the keys of each head, orthonormal in the coordinates of `scores`.
    """
    check_room("query_rank", rank, 2)
    rest = scores.rest @ bases
    U = common_factor(rest.swapaxes(1, 2) * sizes[:, None, None], rank - 1)
    kernel = widened(scores.queries_about_mean(U), rank - 1)
    kernel, bias, scale = held(kernel, moments.query, -scores.mu @ kernel)
    latent = {
        "query_latent": {"kernel": kernel, "bias": bias},
        "query_latent_norm": {"scale": scale},
    }
    up = rows_up_to(last(U.T @ rest), rank)
    up[-1] = np.einsum("hn,hnr->hr", scores.mean, bases)
    return latent, last(up)


def held(
    kernel: np.ndarray, second: np.ndarray, bias: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kernel, bias and norm scale of u = x W + b [n] and the constant, [n+1].

    `second` has the moments of x, about its mean where b subtracts that.
    """
    size = np.trace(kernel.T @ second @ kernel)
    # A power of two, which narrow types hold exactly.
    constant = 2.0 ** np.ceil(np.log2(CONSTANT * max(size, 1.0) ** 0.5))
    n = kernel.shape[1]
    scale = np.full(n + 1, ((constant**2 + size) / (n + 1)) ** 0.5)
    scale[-1] /= constant
    return np.pad(kernel, ((0, 0), (0, 1))), np.append(np.zeros(n) + bias, constant), scale


def rows_up_to(kernel: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(kernel, ((0, rows - len(kernel)), (0, 0), (0, 0)))


def check_room(field: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(
            f"{field} is {value}: takes {least} or more, for one feature of a latent holds its norm"
        )
