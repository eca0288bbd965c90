"""Multi-head latent attention: keys and values of all heads are made from one narrow latent."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.forms import AttentionOverCache
from mhe_jax.attention.module import Call

# Logical names of the kernels that make heads; a latent takes the place of the model's width.
OF_HEADS = ("embed", "heads", "head_features")


class MultiHeadLatentAttention(AttentionOverCache):
    """MLA: `K_h = [c W_uk[h], ρ(X W_kr)]`, `V_h = c W_uv[h]` with `c = norm(X W_dkv)`, and
    `Q_h = [c' W_uq[h], ρ(c' W_qr[h])]` with `c' = norm(X W_dq)`; scores over `√(D + R)`.

    ρ is the rotation by rotary positions, norm is RMSNorm with a scale. With r = `latent_features`,
    R = `rotary_features` and d_q = `query_rank`, the matrices, with the names of their parameters,
    are: W_dkv `latent` [M, r], W_kr `rotary_key` [M, R] for all heads, W_uk `key` and W_uv `value`
    [r, H, D], W_dq `query_latent` [M, d_q], W_uq and W_qr `query` [d_q, H, D + R], W_o [H, D, M];
    the scales are `latent_norm` [r] and `query_latent_norm` [d_q]. Without `query_rank` c' is X.
    Without `rotary` R is 0. `use_bias` applies to W_dkv, W_kr, W_dq and W_o; the matrices that make
    heads have no bias.

    Parameters `M·d_q + d_q·H(D+R) + M(r+R) + 2rHD + HDM`, without biases and scales. Cached numbers
    per token r + R: c and ρ(X W_kr).

    With `latent_groups` G (grouped latent attention, GLA, has 2) c is G latents of width r/G, each
    with its own norm, and head h is made from latent ⌊hG/H⌋ by W_uk and W_uv [r/G, H, D].

    Absorbed: `q·(c W_uk[h]) = (q W_uk[h]ᵀ)·c`, and `Σ_j w_j (c_j W_uv[h]) = (Σ_j w_j c_j) W_uv[h]`.
    So the latents themselves are keys and values, with one key head for each latent. This is exact,
    and takes fewer operations for few queries over a cache.

    Where `inputs_v` is given, its latent gives the values; with `decode`, whose cache has one
    latent for both, `inputs_v` is refused. `normalize_qk` applies to the D features that are not
    rotated.

    Attributes beyond `AttentionOverCache`:
      form: 'materialized' computes the equations as written; 'absorbed', as above, needs W_uk and
        W_uv as matrices: Kronecker products are multiplied out.
      latent_features: r; None for 4D.
      rotary_features: R with `rotary`; None for D/2.
      latent_groups: G.
      query_rank: d_q; None for no W_dq.

    Raises:
      ValueError: `latent_groups` does not divide r or the heads; a width below 1; 'absorbed' with
        `normalize_qk`, whose LayerNorm of keys differs from head to head.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. GLA: Zadouri, Strauss and Dao 2025, arXiv
    2505.21487.
    """

    latent_features: int | None = None
    rotary_features: int | None = None
    latent_groups: int = 1
    query_rank: int | None = None

    kind: ClassVar[str] = "mla"
    one_source: ClassVar[bool] = True
    # [c, X W_kr], of which `turned_features` are rotated: all that the cache holds.
    turned: ClassVar[str | None] = "latent"
    turned_by: ClassVar[str] = "rotary_features"
    not_linear: ClassVar[str | None] = "a norm lies between its inputs and its keys and values"

    def check(self, head_features: int, features: int) -> None:
        super().check(head_features, features)
        G, r = self.latent_groups, self.latent_features or 4 * head_features
        for name, whole in (("latent_features", r), ("num_heads", self._readers)):
            if whole % G:
                raise ValueError(f"latent_groups={G} must divide {name}={whole}")

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        H, D = self.num_heads, call.head_features
        if self.query_rank is not None:
            c = self._projection("query_latent")(x, (self.query_rank,), ("embed", None))
            x = self._calibrated(self.rms_norm("query_latent_norm")(c), x.shape[-1])
        width = D + self.turned_features(D)
        query = self._projection("query", use_bias=False)(x, (H, width), OF_HEADS)
        query = jnp.tile(query, (1, 1, self._readers // H, 1))
        still, turns = jnp.split(query, [D], -1)
        still = self.normalized("query_ln", still)
        if call.form == "absorbed":
            still = self._absorbed("btgkd,igkd->btgki", still, "key", call)
        return jnp.concatenate([still, turns], -1)

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        (G, width), R = self._latents(call.head_features), self.turned_features(call.head_features)
        groups, names = ((G, width), ("groups", "norm")) if G > 1 else ((width,), ("norm",))
        latent, norm = self._projection("latent"), self.rms_norm("latent_norm", names)

        def latent_of(x):
            """[B, S, 1, r]."""
            c = latent(x, (G * width,), ("embed", None))
            c = self._calibrated(norm(c.reshape(*c.shape[:2], *groups)), x.shape[-1])
            return c.reshape(*c.shape[:2], 1, G * width)

        found = latent_of(inputs_k)
        if R:
            turns = self._projection("rotary_key")(inputs_k, (R,), ("embed", None))
            found = jnp.concatenate([found, turns[:, :, None]], -1)
        values = {} if inputs_v is None else {"value": latent_of(inputs_v)}
        return {"latent": found, **values}

    def expand(self, memory: KeyValues, call: Call) -> tuple[jax.Array, jax.Array]:
        key = memory["latent"]
        (B, S), (G, width) = key.shape[:2], self._latents(call.head_features)
        if call.form == "absorbed" and G == 1:
            # These values have R features that `merge` leaves out: slicing would make a copy.
            return key, memory.get("value", key)
        c, turns = jnp.split(key, [G * width], -1)
        value = memory.get("value", c).reshape(B, S, G, width)
        key = c.reshape(B, S, G, width)
        if call.form != "absorbed":
            key = self.normalized("key_ln", self._up("key", key, call))
            value = self._up("value", value, call)
        turns = jnp.broadcast_to(turns, (*key.shape[:3], turns.shape[-1]))
        return jnp.concatenate([key, turns], -1), value

    def merge(self, heads: jax.Array, weight_sum: jax.Array, call: Call) -> jax.Array:
        if call.form == "absorbed":
            latents = heads[..., : self._latents(call.head_features)[1]]
            heads = self._absorbed("btgki,igkd->btgkd", latents, "value", call)
        return self.project_out(heads, call)

    def turned_features(self, head_features: int) -> int:
        """R."""
        if self.rotary is None:
            return 0
        return head_features // 2 if self.rotary_features is None else self.rotary_features

    def scale(self, call: Call) -> float:
        return (call.head_features + self.turned_features(call.head_features)) ** -0.5

    def core_of(self, form: str, head_features: int) -> tuple[int, int, int]:
        H, D = self._readers, head_features
        (G, width), R = self._latents(D), self.turned_features(D)
        if form == "absorbed":
            return H * (width + R), H * (width + (R if G == 1 else 0)), 0
        return H * (D + R), H * D, 2 * width * H * D

    @property
    def _readers(self) -> int:
        """Query heads of the engine, each of which reads one latent."""
        return self.num_heads

    def _calibrated(self, c: jax.Array, inputs: int) -> jax.Array:
        """A normed latent [..., rank] of inputs of that width."""
        return c

    def _latents(self, D: int) -> tuple[int, int]:
        """G, and the width of each latent."""
        return self.latent_groups, (self.latent_features or 4 * D) // self.latent_groups

    def _up(self, name: str, c: jax.Array, call: Call) -> jax.Array:
        """Latents [B, S, G, r/G] to heads [B, S, H, D] by W_uk or W_uv."""
        H, D = self._readers, call.head_features
        if c.shape[2] == 1:
            return self._projection(name, use_bias=False)(c[:, :, 0], (H, D), OF_HEADS)
        return self._by_matrix("bsgi,igkd->bsgkd", c, name, call)

    def _absorbed(self, equation: str, heads: jax.Array, name: str, call: Call) -> jax.Array:
        """[B, T, H, ·] times W_uk or W_uv, [B, T, H, ·]."""
        B, T, H, width = heads.shape
        groups = heads.reshape(B, T, self.latent_groups, H // self.latent_groups, width)
        return self._by_matrix(equation, groups, name, call)

    def _by_matrix(self, equation: str, x: jax.Array, name: str, call: Call) -> jax.Array:
        """The product of `x` and W_uk or W_uv [r/G, G, H/G, D]: [B, T, H, ·]."""
        (G, width), H, D = self._latents(call.head_features), self._readers, call.head_features
        kernel = self._projection(name, use_bias=False).matrix((width,), (H, D), OF_HEADS)
        kernel = kernel.reshape(width, G, H // G, D).astype(x.dtype)
        made = jnp.einsum(equation, x, kernel, precision=self.precision)
        return made.reshape(*made.shape[:2], H, made.shape[-1])
