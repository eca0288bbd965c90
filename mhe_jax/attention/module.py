"""The base of every attention kind: the call of Flax's attention module."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from mhe_jax.attention import cache, engines
from mhe_jax.attention.fields import check_shapes
from mhe_jax.attention.kind import AttentionKind, Call
from mhe_jax.attention.mask import Mask, as_mask
from mhe_jax.attention.rotary import rotate

__all__ = ["Attention", "Call"]


class Attention(AttentionKind):
    """`Y = concat_h(softmax(Q_h K_hᵀ / √D) V_h) W_o`, with fields as Flax's attention module.

    A kind is a subclass with its name as `kind`, which overrides methods of `AttentionKind`.

    Attributes beyond `flax.linen.MultiHeadDotProductAttention`:
      engine: which engine computes the softmax: 'auto', 'xla', 'blocked', 'cudnn', 'splash',
        'pallas' or 'mosaic' (see `engines`).
      projection: makes every projection: `Projection`, or anything that takes the same fields and
        calls.
      rotary: rotates queries and keys of self-attention by the positions of their tokens, after
        `normalize_qk` (see `rotary.rotate`); None for no rotation.
      broadcast_dropout: True (default) draws one dropout mask per example, shared by its heads;
        'batch' shares it over the batch too, as Flax's True does; False draws one per head.

    A query that sees no key gives 0 before the output projection.
    """

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | Mask | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of `inputs_q` [..., T, M] to `inputs_k` [..., S, M'], as in Flax.

        Args:
          inputs_q: what queries are made from.
          inputs_k: what keys are made from; None for `inputs_q` (self-attention).
          inputs_v: what values are made from; None for `inputs_k`.
          mask: boolean or 0/1 that broadcasts to [..., H, T, S], or a `Mask`.
          deterministic: True switches dropout off; here or as a field, not both.
          dropout_rng: key of the dropout; None takes the 'dropout' stream.
          sow_weights: put the weights [..., H, T, S] ([..., 1, T, S] for `sha`) into the
            'intermediates' collection.
          positions: of the tokens, [..., T], for `rotary`; None for 0 to T - 1. With `decode=True`
            the cache counts them, each row from its own `cache_index`, and passing them is refused.

        With `decode=True` a call is self-attention unless `fill_cache` has filled the cache: the
        first call, with `cache` mutable, makes an empty cache of its own length, and later calls
        append T ≥ 1 tokens and see all earlier ones. After `fill_cache` a call is cross-attention:
        it reads the filled cache, and takes nothing from `inputs_k`.

        Returns:
          [..., T, out_features].

        Raises:
          ValueError: a width that the heads do not divide, a mask of the wrong shape, a write past
            the end of the cache, a call that the requested engine or form cannot do.
        """
        dropout = deterministic, dropout_rng
        return self._run(inputs_q, inputs_k, inputs_v, mask, positions, dropout, sow_weights)

    def fill_cache(self, inputs_k: jax.Array, inputs_v: jax.Array | None = None) -> None:
        """Put the keys and values of cross-attention into the cache once; no output.

        Raises:
          ValueError: `decode` is False, the width of the queries is not known, the cache is one of
            self-attention, or `rotary` is set.
        """
        if not self.decode or self.rotary is not None:
            what = "is for cross-attention, which rotary does not turn"
            raise ValueError(f"fill_cache needs decode=True, and {what}")
        self._run(None, inputs_k, inputs_v)

    @nn.compact
    def _run(
        self, inputs_q, inputs_k, inputs_v, mask=None, places=None, dropout=(True, None), sow=False
    ) -> Any:
        """Without `inputs_q` it fills the cache."""
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v is given without inputs_k")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        if inputs_v is None and not self.one_source:
            inputs_v = inputs_k
        check_shapes(inputs_q, inputs_k, inputs_v)
        if self.one_source and inputs_v is not None:
            widths = inputs_k.shape[-1], inputs_v.shape[-1]
            if self.decode or widths[0] != widths[1]:
                raise ValueError(
                    f"{self.kind} has one array for keys and values: inputs_v, {widths[1]} wide, "
                    f"must be {widths[0]} wide as inputs_k, and left out with decode=True"
                )
        *batch, _, features = (inputs_k if inputs_q is None else inputs_q).shape
        width = self.width(features, fill=inputs_q is None)
        call = Call(width // self.num_heads, self.out_features or features)
        self.check(call.head_features, inputs_k.shape[-1])
        inputs_q, inputs_k, inputs_v = map(_flatten, (inputs_q, inputs_k, inputs_v))
        if inputs_q is None:
            return cache.fill(self, self.memory(inputs_k, inputs_v, call))

        T, dtype = inputs_q.shape[1], self.dtype or jnp.result_type(inputs_q, self.param_dtype)
        call = dataclasses.replace(
            call,
            queries=T,
            inputs=inputs_q,
            initializing=self.is_initializing(),
            dtype=jnp.dtype(dtype),
            mask=as_mask(mask, tuple(batch)),
            options=self.options(dropout, sow, batch),
        )
        call = self.start(call)
        mask, overflow = call.mask, None
        positions = self._positions(places, (*batch, T), inputs_k.shape[1])
        query = self._rotated(self.queries(inputs_q, call), positions, call)
        if self.decode and cache.is_filled_once(self):
            memory = cache.read(self)
        else:
            memory = self.memory(inputs_k, inputs_v, call)
            if self.turned is not None:
                memory[self.turned] = self._rotated(memory[self.turned], positions, call)
            if self.decode:
                memory, mask, overflow = cache.extend(self, memory, mask, T)
        keys = next(iter(memory.values())).shape[1]
        key, value = self.expand(memory, call)
        if self.turned is None:
            of_cache = jnp.arange(keys)[None]
            key = self._rotated(key, of_cache if self.decode else positions, call)
        bias = self.score_bias(memory, key, call)
        # The parts of keys and values are several in the form 'factored'.
        arrays, as_they_were = jax.tree.flatten((query, key, value))
        arrays = promote_dtype(*arrays, dtype=self.dtype)
        query, key, value = jax.tree.unflatten(as_they_were, arrays)
        mask.check((query.shape[0], query.shape[2], T, keys))
        if bias is not None:
            bias = nn.with_logical_constraint(bias, ("batch", "length", "activation_heads"))
        if call.form != "shared":
            query = nn.with_logical_constraint(query, ("batch", "length", "activation_heads", None))
        arrays, how = (query, key, value, bias), {"form": call.form, "scale": self.scale(call)}
        heads, weight_sum, engine = engines.attend(*arrays, mask, call.options, self.engine, **how)
        if not call.initializing:
            engines.record_choice(self.kind, f"{call.form} on {engine}" if call.form else engine)
        output = self.merge(heads, weight_sum, call)
        if overflow is not None:
            output = jnp.where(overflow[:, None, None], jnp.nan, output)
        return output.reshape(*batch, *output.shape[1:])

    def _positions(self, given, tokens: tuple[int, ...], keys: int) -> jax.Array | None:
        """Positions of the `tokens`, [B, T], or [1, T] if rows are alike; None without `rotary`."""
        if given is not None and (self.rotary is None or self.decode):
            raise ValueError(
                "positions are read by rotary alone, and counted by the cache with decode=True"
            )
        if self.rotary is None:
            return None
        T = tokens[-1]
        if keys != T:
            raise ValueError(f"rotary is for self-attention: there are {T} queries and {keys} keys")
        if given is None:
            return cache.positions(self, T) if self.decode else jnp.arange(T)[None]
        if given.shape != tokens:
            raise ValueError(f"positions have shape {given.shape}: must be {tokens}")
        return given.reshape(-1, T)

    def _rotated(self, x: jax.Array, positions: jax.Array | None, call: Call) -> jax.Array:
        """`x` with its last `turned_features` rotated."""
        if self.rotary is None or positions is None:
            return x
        still = x.shape[-1] - self.turned_features(call.head_features)
        turned = rotate(x[..., still:], positions, self.rotary)
        return jnp.concatenate([x[..., :still], turned], -1) if still else turned


def _flatten(x: jax.Array | None) -> Any:
    """[..., T, M] to [B, T, M]."""
    return None if x is None else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
