"""What every attention kind shares: the fields and the call of Flax's attention module."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from mhe_jax.attention import cache, engines
from mhe_jax.attention.mask import Mask, as_mask
from mhe_jax.attention.projection import Projection

_REFUSED = {
    "attention_fn": "the softmax is computed by an engine; choose it by `engine`",
    "qkv_dot_general": "deprecated in Flax",
    "out_dot_general": "deprecated in Flax",
    "qkv_dot_general_cls": "projections go through `Projection`",
    "out_dot_general_cls": "projections go through `Projection`",
    "qk_attn_weights_einsum_cls": "the softmax is computed by an engine",
    "attn_weights_value_einsum_cls": "the softmax is computed by an engine",
}


class Attention(nn.Module):
    """`Y = concat_h(softmax(Q_h K_hᵀ / √D) V_h) W_o`, with fields as Flax's attention module.

    A kind overrides how inputs become queries (`queries`), what is kept of a key token (`memory`),
    how that becomes keys and values (`expand`), and how heads become the output (`merge`).

    Attributes beyond `flax.linen.MultiHeadDotProductAttention`:
      engine: what computes the softmax: 'auto', 'xla', 'cudnn' or 'pallas'
        (see `engines`).
      projection: makes every projection: `Projection`, or what takes its fields and its call.
      broadcast_dropout: True (default) draws one dropout mask an example, shared by its heads;
        'batch' shares it over the batch too, which is what Flax's True does; False one each head.

    A query without any key to see gives 0 before the output projection.
    """

    num_heads: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool | str = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Any = None
    kernel_init: Callable = nn.linear.default_kernel_init
    out_kernel_init: Callable | None = None
    bias_init: Callable = nn.initializers.zeros_init()
    out_bias_init: Callable | None = None
    use_bias: bool = True
    attention_fn: Any = None
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    qkv_dot_general: Any = None
    out_dot_general: Any = None
    qkv_dot_general_cls: Any = None
    out_dot_general_cls: Any = None
    qk_attn_weights_einsum_cls: Any = None
    attn_weights_value_einsum_cls: Any = None
    engine: str = "auto"
    projection: Callable[..., nn.Module] = Projection

    kind: ClassVar[str]
    # Keys and values are one array unless `inputs_v` is given; a cache then takes `inputs_k` only.
    one_source: ClassVar[bool] = False

    def __post_init__(self):
        for field, reason in _REFUSED.items():
            if getattr(self, field) is not None:
                raise ValueError(f"{type(self).__name__}: {field} is refused: {reason}")
        if self.broadcast_dropout not in (True, False, "batch"):
            raise ValueError(
                f"broadcast_dropout={self.broadcast_dropout!r} is not one of True, False, 'batch'"
            )
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"dropout_rate={self.dropout_rate} is not in [0, 1)")
        super().__post_init__()

    # What a kind overrides.

    def queries(self, x: jax.Array) -> jax.Array:
        """[B, T, M] to queries [B, T, H, D] of the engine."""
        return self.normalized("query_ln", self.project_heads("query", x, self.num_heads))

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None) -> cache.Memory:
        """Key and value inputs [B, S, M] to the arrays [B, S, ...] that a cache keeps.

        `inputs_v` is None only for a kind with `one_source`, where the caller gave none.
        """
        assert inputs_v is not None
        return {
            "key": self.normalized("key_ln", self.project_heads("key", inputs_k, self.kv_heads)),
            "value": self.project_heads("value", inputs_v, self.kv_heads),
        }

    def expand(self, memory: cache.Memory) -> tuple[jax.Array, jax.Array]:
        """What the cache keeps to keys [B, S, K, D] and values [B, S, K, E] of the engine."""
        return memory["key"], memory["value"]

    def merge(self, heads: jax.Array, kept: jax.Array, features: int) -> jax.Array:
        """The engine's [B, T, H, D] to the output [B, T, M].

        `kept` [B, T, H, 1] is the sum of the attention weights left by dropout.
        """
        return self.project_out(heads, features)

    def key_bias(self, memory: cache.Memory, key: jax.Array) -> jax.Array | None:
        """[B, S, H] where the scores of heads differ by a bias on the keys alone, else None."""
        return None

    def start(self, queries: int, dtype, mask: Mask, options: engines.Options) -> None:
        """What a kind decides of a call before it is computed."""

    # What a kind builds from.

    @property
    def kv_heads(self) -> int:
        """Heads of the key and value projections."""
        return self.num_heads

    @property
    def head_features(self) -> int:
        """D, as the present call's input and `qkv_features` give it."""
        return self._width // self.num_heads

    def project_heads(self, name: str, x: jax.Array, heads: int) -> jax.Array:
        """`x W` with a kernel [M, heads, D]."""
        axis = "heads" if heads == self.num_heads else "kv_heads"
        axis = None if heads == 1 else axis  # one head cannot be split
        names = ("embed", axis, "head_features")
        return self._projection(name)(x, (heads, self.head_features), names)

    def project_shared(self, name: str, x: jax.Array) -> jax.Array:
        """`x W` with one kernel [M, D] for all heads."""
        return self._projection(name)(x, (self.head_features,), ("embed", "head_features"))

    def project_out(self, heads: jax.Array, features: int) -> jax.Array:
        """`concat_h(heads) W_o` with a kernel [H, D, M]."""
        names = ("heads", "head_features", "embed")
        out = self._projection(
            "out",
            kernel_init=self.out_kernel_init,
            bias_init=self.out_bias_init,
        )
        return out(heads, (features,), names, in_axes=2)

    def normalized(self, name: str, x: jax.Array) -> jax.Array:
        """LayerNorm over each head's width where `normalize_qk` asks for it."""
        if not self.normalize_qk:
            return x
        return nn.LayerNorm(
            name=name, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
        )(x)

    def _projection(
        self, name: str, kernel_init=None, bias_init=None, use_bias: bool | None = None
    ) -> nn.Module:
        return self.projection(
            name=name,
            kernel_init=kernel_init or self.kernel_init,
            bias_init=bias_init or self.bias_init,
            use_bias=self.use_bias if use_bias is None else use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )

    # The call.

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: None = None,
        mask: jax.Array | Mask | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Attention of `inputs_q` [..., T, M] to `inputs_k` [..., S, M'], as in Flax.

        Args:
          inputs_q: what asks.
          inputs_k: what keys are made of; None for `inputs_q` (self-attention).
          inputs_v: what values are made of; None for `inputs_k`.
          inputs_kv: refused; deprecated in Flax.
          mask: boolean or 0/1 that broadcasts to [..., H, T, S], or a `Mask`.
          deterministic: True switches dropout off; here or as a field, not both.
          dropout_rng: key of the dropout; None takes the 'dropout' stream.
          sow_weights: put the weights [..., H, T, S], of `sha` [..., 1, T, S], into the
            'intermediates' collection.

        With `decode=True` a call is self-attention unless `fill_cache` has filled the cache: the
        first call, with `cache` mutable, makes an empty cache of its own length, and later calls
        append T ≥ 1 tokens and see all that came before. After `fill_cache` a call is
        cross-attention: it reads what that put down, and takes nothing from `inputs_k`.

        Returns:
          [..., T, out_features].

        Raises:
          ValueError: a width that the heads do not divide, a mask of the wrong shape, a write past
            the end of the cache, a call that the engine or form asked for cannot do.
        """
        if inputs_kv is not None:
            raise ValueError("inputs_kv is refused, deprecated in Flax: pass inputs_k and inputs_v")
        return self._run(
            inputs_q, inputs_k, inputs_v, mask, deterministic, dropout_rng, sow_weights, False
        )

    def fill_cache(self, inputs_k: jax.Array, inputs_v: jax.Array | None = None) -> None:
        """Put the keys and values of cross-attention into the cache once; no output.

        Raises:
          ValueError: `decode` is False, nothing tells the width of the queries, or the cache is
            one of self-attention.
        """
        self._run(None, inputs_k, inputs_v, None, True, None, False, True)

    @nn.compact
    def _run(
        self, inputs_q, inputs_k, inputs_v, mask, deterministic, dropout_rng, sow, fill
    ) -> Any:
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v is given without inputs_k")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        if self.one_source and self.decode and inputs_v is not None:
            raise ValueError(
                f"{self.kind} keeps one array for keys and values in its cache: leave inputs_v out"
            )
        if inputs_v is None and not self.one_source:
            inputs_v = inputs_k
        asks = inputs_k if fill else inputs_q
        batch, features = asks.shape[:-2], asks.shape[-1]
        for name, array in (("inputs_k", inputs_k), ("inputs_v", inputs_v)):
            if array is None:
                continue
            if array.shape[:-2] != batch or array.shape[-2] != inputs_k.shape[-2]:
                by_name = "; a mask is passed as mask=..." if name == "inputs_v" else ""
                raise ValueError(
                    f"{name} has shape {array.shape}: its batch axes must be {batch}, as those of "
                    f"inputs_q, and its length {inputs_k.shape[-2]}, as that of inputs_k{by_name}"
                )
        self._set_width(features, fill)
        inputs_k = _flatten(inputs_k)
        inputs_v = None if inputs_v is None else _flatten(inputs_v)
        if fill:
            if not self.decode:
                raise ValueError("fill_cache needs decode=True: nothing reads its cache otherwise")
            cache.fill(self, self.memory(inputs_k, inputs_v))
            return None

        mask = as_mask(mask, batch)
        options = self._options(deterministic, dropout_rng, sow, batch)
        computed = self.dtype or jnp.result_type(inputs_q.dtype, self.param_dtype)
        self.start(inputs_q.shape[-2], jnp.dtype(computed), mask, options)
        query = self.queries(_flatten(inputs_q))
        overflow = None
        if self.decode and cache.is_filled_once(self):
            memory = cache.read(self)
        else:
            memory = self.memory(inputs_k, inputs_v)
            if self.decode and cache.exists(self):
                memory, offset, overflow = cache.append(self, memory)
                if mask.is_causal and mask.offset is None:
                    # The caller says it too; a place is counted from the start of the row.
                    mask = dataclasses.replace(mask, is_causal=False)
                mask = mask & Mask.causal(offset)
            elif self.decode:
                cache.create(self, memory)
        key, value = self.expand(memory)
        bias = self.key_bias(memory, key)

        query, key, value = promote_dtype(query, key, value, dtype=self.dtype)
        _check_mask(mask, query, key)
        if bias is None:
            query = nn.with_logical_constraint(query, ("batch", "length", "activation_heads", None))
            heads, kept, engine = engines.attend(query, key, value, mask, options, self.engine)
        else:
            bias = nn.with_logical_constraint(bias, ("batch", "length", "activation_heads"))
            heads, kept, engine = engines.attend_shared(
                query, key, value, bias, mask, options, self.engine
            )
        engines.record_choice(self.kind, self.describe(engine))
        output = self.merge(heads, kept, self.out_features or features)
        if overflow is not None:
            output = jnp.where(overflow[:, None, None], jnp.nan, output)
        return output.reshape(*batch, *output.shape[1:])

    def describe(self, engine: str) -> str:
        """What a call runs as, for the log."""
        return engine

    def _set_width(self, features: int, fill: bool) -> None:
        width = self.qkv_features or features
        if fill and not self.qkv_features and "out" in self.variables.get("params", {}):
            # The width of the queries, which are not here, as `out` [H, D, M] has kept it.
            out = self.variables["params"]["out"]
            if "kernel" not in out:
                raise ValueError(
                    "fill_cache needs qkv_features where the projections have no kernels: "
                    f"`out` has only {', '.join(out)}, which do not tell the width of the queries"
                )
            width = self.num_heads * nn.meta.unbox(out["kernel"]).shape[-2]
        if width % self.num_heads:
            raise ValueError(
                f"qkv_features={width} must be a multiple of num_heads={self.num_heads}"
            )
        object.__setattr__(self, "_width", width)

    def _options(self, deterministic, dropout_rng, sow, batch) -> engines.Options:
        rate = self.dropout_rate
        if rate > 0 and nn.merge_param("deterministic", self.deterministic, deterministic):
            rate = 0.0
        if rate > 0 and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")

        shared = self.broadcast_dropout

        def sow_weights(weights):
            weights = weights.reshape(*batch, *weights.shape[1:])
            self.sow("intermediates", "attention_weights", weights)

        return engines.Options(
            dropout_rate=rate,
            dropout_rng=dropout_rng,
            # 0 and a boolean of numpy pass for False, but are not it.
            broadcast_dropout="batch" if shared == "batch" else bool(shared),
            precision=self.precision,
            float32_softmax=self.force_fp32_for_softmax,
            sow=sow_weights if sow else None,
        )


def _flatten(x: jax.Array) -> jax.Array:
    """[..., T, M] to [B, T, M]."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _check_mask(mask: Mask, query: jax.Array, key: jax.Array) -> None:
    B, T, H, _ = query.shape
    misfit = mask.misfit((B, H, T, key.shape[1]))
    if misfit is not None:
        raise ValueError(f"mask: {misfit}")
