"""The base of every attention kind: what a kind overrides, and the call of Flax's module."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from mhe_jax.attention import cache, engines
from mhe_jax.attention.fields import FlaxFields, check_shapes
from mhe_jax.attention.mask import Mask, as_mask
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import Moments, Parameters, shared_heads
from mhe_jax.attention.projection import Projection, named
from mhe_jax.attention.rotary import Rotary, rotate


@dataclass(frozen=True)
class Call:
    """One call of an attention module, with all that is known before anything is computed.

    `_run` makes it and passes it to every method that a kind overrides. A call that fills the cache
    of cross-attention has no queries: it knows only the widths.
    """

    head_features: int  # D
    out_features: int  # width of the output
    queries: int = 0  # T
    inputs: jax.Array | None = None  # what queries are made from [B, T, M]
    initializing: bool = False  # of `init`, which needs the parameters and is compiled for one use
    dtype: Any = jnp.float32  # of the computation
    mask: Mask = Mask()
    options: engines.Options = engines.Options()
    # Decided by `start`: the form, for a kind that has several, and tables of parameters.
    form: str = ""
    embeddings: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


class Attention(FlaxFields):
    """`Y = concat_h(softmax(Q_h K_hᵀ / √D) V_h) W_o`, with fields as Flax's attention module.

    A kind is a subclass with its name as `kind`. It overrides what differs: most of them only
    `queries`, `memory`, `expand` and `merge`. No method has the name of a parameter: in NNX the two
    would be one attribute.

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

    engine: str = "auto"
    projection: Callable[..., nn.Module] = Projection
    rotary: Rotary | None = None

    kind: ClassVar[str]

    # The four methods of a kind.

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        """[B, T, M] to queries [B, T, H, D] of the engine."""
        return self.normalized("query_ln", self.project_heads("query", x, self.num_heads, call))

    def memory(
        self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call
    ) -> cache.KeyValues:
        """Key and value inputs [B, S, M] to the arrays [B, S, ...] that the cache holds.

        `inputs_v` is None only for a kind with `one_source`, where the caller gave none.
        """
        assert inputs_v is not None
        key = self.project_heads("key", inputs_k, self.kv_heads, call)
        return {
            "key": self.normalized("key_ln", key),
            "value": self.project_heads("value", inputs_v, self.kv_heads, call),
        }

    def expand(self, memory: cache.KeyValues, call: Call) -> tuple[Any, Any]:
        """The arrays of the cache to keys [B, S, K, D] and values [B, S, K, E] of the engine.

        In the form 'factored', to those of `engines.attend_factored`.
        """
        return memory["key"], memory["value"]

    def merge(self, heads: jax.Array, weight_sum: jax.Array, call: Call) -> jax.Array:
        """The engine's [B, T, H, D] to the output [B, T, M].

        `weight_sum` [B, T, H, 1] is the sum of the attention weights that dropout leaves.
        """
        return self.project_out(heads, call)

    # What few kinds override.

    # Keys and values are one array unless `inputs_v` is given; a cache then takes `inputs_k` only.
    one_source: ClassVar[bool] = False
    # The array of `memory` that `rotary` rotates once, before it is cached; None: keys are rotated
    # each time `expand` makes them from the cache.
    turned: ClassVar[str | None] = "key"
    # The field, if not None, of the number of features that `rotary` rotates.
    turned_by: ClassVar[str] = "num_heads"
    # Why its heads are not linear maps of the inputs, where they are not.
    not_linear: ClassVar[str | None] = None
    # Why `heads` are not what it computes with `rotary`, where they are not.
    not_rotated: ClassVar[str | None] = None
    # Biases of heads that its parameters keep without `use_bias`.
    keeps_bias: ClassVar[tuple[str, ...]] = ()

    @property
    def kv_heads(self) -> int:
        """Heads of the key and value projections."""
        return self.num_heads

    def check(self, head_features: int, features: int) -> None:
        """Raises ValueError for fields that do not go together; its first word is a field.

        For heads of width D, whose keys are made from inputs `features` wide.
        """
        for field in ("num_kv_heads", "num_groups", "score_groups"):
            parts = getattr(self, field, None)
            if parts is not None and self.num_heads % parts:
                raise ValueError(f"{field}={parts} must divide num_heads={self.num_heads}")
        turned = self.turned_features(head_features)
        if self.rotary is not None and turned % 2:
            field = "num_heads" if getattr(self, self.turned_by) is None else self.turned_by
            raise ValueError(
                f"{field}={getattr(self, field)}: rotary positions turn an even number of features "
                f"of a head, not {turned}"
            )

    def score_bias(self, memory: cache.KeyValues, key: jax.Array, call: Call) -> jax.Array | None:
        """The bias [B, S, H] that each head adds to the scores of a key; None for no bias."""
        return None

    def start(self, call: Call) -> Call:
        """`call` with what the kind decides before anything is computed."""
        return call

    def turned_features(self, head_features: int) -> int:
        """How many features of a query, and of `turned`, are rotated: the last ones."""
        return head_features

    def scale(self, call: Call) -> float | None:
        """The factor of the scores; None for 1/√ of the width of queries."""
        return None

    def untrained(self) -> tuple[str, ...]:
        """Names of parameters that cannot change the output, and get no update in training."""
        return ()

    def core(self, head_features: int) -> tuple[int, int, int]:
        """Multiply-adds of a query and a key, for scores and for sums over values, in the cheapest
        form; and of a token, beyond one for each number of a kernel."""
        width = self.num_heads * head_features
        return width, width, 0

    def heads(self, params: Mapping[str, Any]) -> Heads:
        """What the module computes with `params`, as plain heads; unless it is `not_linear`."""
        return Heads.of(params)

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """The parameters, in float64, that come nearest to what K = H heads do.

        They may have parts that the module does not have, and leave out those that are 0, and the
        bias of the output. Here those of MHA, GQA and MQA.
        """
        return shared_heads(heads, moments, self.kv_heads, self.use_bias)

    # What a kind builds from.

    def project_heads(self, name: str, x: jax.Array, heads: int, call: Call) -> jax.Array:
        """`x W` with a kernel [M, heads, D]."""
        axis = "heads" if heads == self.num_heads else "kv_heads"
        axis = None if heads == 1 else axis  # one head cannot be split
        names = ("embed", axis, "head_features")
        return self._projection(name)(x, (heads, call.head_features), names)

    def project_both(
        self, name: str, inputs_k: jax.Array, inputs_v: jax.Array | None, heads: int, call: Call
    ) -> cache.KeyValues:
        """Keys and values by one `project_heads`: `name`, and 'value' where `inputs_v` is given."""
        if inputs_v is None:
            return {name: self.project_heads(name, inputs_k, heads, call)}
        both = jnp.concatenate([inputs_k, inputs_v], 1)
        key, value = jnp.split(self.project_heads(name, both, heads, call), 2, 1)
        return {name: key, "value": value}

    def project_out(self, heads: jax.Array, call: Call) -> jax.Array:
        """`concat_h(heads) W_o` with a kernel [H, D, M]."""
        names = ("heads", "head_features", "embed")
        out = self._projection("out", self.out_kernel_init, self.out_bias_init)
        return out(heads, (call.out_features,), names, in_axes=2)

    def normalized(self, name: str, x: jax.Array) -> jax.Array:
        """LayerNorm over each head's width where `normalize_qk` asks for it."""
        if not self.normalize_qk:
            return x
        return nn.LayerNorm(
            name=name, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
        )(x)

    def rms_norm(self, name: str, names: tuple[str, ...] = ("norm",)) -> nn.RMSNorm:
        """RMSNorm over the last axis, with a scale of as many axes as it has `names`."""
        return nn.RMSNorm(
            name=name,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            scale_init=named(nn.initializers.ones_init(), names),
            reduction_axes=-1,
            feature_axes=tuple(range(-len(names), 0)),
        )

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
            raise ValueError(
                "fill_cache needs decode=True, and is for cross-attention, which rotary does not "
                "turn"
            )
        self._run(None, inputs_k, inputs_v)

    @nn.compact
    def _run(
        self,
        inputs_q,
        inputs_k,
        inputs_v,
        mask=None,
        positions=None,
        dropout=(True, None),
        sow=False,
    ) -> Any:
        """Without `inputs_q` it fills the cache."""
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v is given without inputs_k")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        if inputs_v is None and not self.one_source:
            inputs_v = inputs_k
        check_shapes(inputs_q, inputs_k, inputs_v)
        if self.one_source and inputs_v is not None:
            if self.decode:
                raise ValueError(
                    f"{self.kind} keeps one array for keys and values in its cache: leave inputs_v "
                    "out"
                )
            if inputs_v.shape[-1] != inputs_k.shape[-1]:
                raise ValueError(
                    f"{self.kind} projects keys and values by one matrix: inputs_v is "
                    f"{inputs_v.shape[-1]} wide and must be as wide as inputs_k, "
                    f"{inputs_k.shape[-1]}"
                )
        asks = inputs_k if inputs_q is None else inputs_q
        batch, features = asks.shape[:-2], asks.shape[-1]
        width = self.width(features, fill=inputs_q is None)
        call = Call(width // self.num_heads, self.out_features or features)
        self.check(call.head_features, inputs_k.shape[-1])
        inputs_k = _flatten(inputs_k)
        inputs_v = None if inputs_v is None else _flatten(inputs_v)
        if inputs_q is None:
            cache.fill(self, self.memory(inputs_k, inputs_v, call))
            return None

        mask = as_mask(mask, batch)
        options = self.options(dropout, sow, batch)
        computed = self.dtype or jnp.result_type(inputs_q.dtype, self.param_dtype)
        call = dataclasses.replace(
            call,
            queries=inputs_q.shape[-2],
            inputs=_flatten(inputs_q),
            initializing=self.is_initializing(),
            dtype=jnp.dtype(computed),
            mask=mask,
            options=options,
        )
        call = self.start(call)
        mask = call.mask
        positions = self._positions(positions, batch, inputs_q.shape[-2], inputs_k.shape[-2])
        query = self._rotated(self.queries(_flatten(inputs_q), call), positions, call)
        overflow = None
        if self.decode and cache.is_filled_once(self):
            memory = cache.read(self)
        else:
            memory = self.memory(inputs_k, inputs_v, call)
            if self.turned is not None:
                memory[self.turned] = self._rotated(memory[self.turned], positions, call)
            if self.decode:
                memory, mask, overflow = cache.extend(self, memory, mask, call.queries)
        keys = next(iter(memory.values())).shape[1]
        key, value = self.expand(memory, call)
        if self.turned is None:
            of_cache = jnp.arange(keys)[None]
            key = self._rotated(key, of_cache if self.decode else positions, call)
        bias = self.score_bias(memory, key, call)
        arrays, as_they_were = jax.tree.flatten((query, key, value))
        arrays = promote_dtype(*arrays, dtype=self.dtype)
        query, key, value = jax.tree.unflatten(as_they_were, arrays)
        mask.check((*query.shape[:1], query.shape[2], query.shape[1], keys))
        if bias is not None:
            bias = nn.with_logical_constraint(bias, ("batch", "length", "activation_heads"))
        if call.form != "shared":
            query = nn.with_logical_constraint(query, ("batch", "length", "activation_heads", None))
        of_forms = {"shared": engines.attend_shared, "factored": engines.attend_factored}
        attend = of_forms.get(call.form, engines.attend)
        heads, weight_sum, engine = attend(
            query, key, value, bias, mask, options, self.engine, scale=self.scale(call)
        )
        if not call.initializing:
            engines.record_choice(self.kind, f"{call.form} on {engine}" if call.form else engine)
        output = self.merge(heads, weight_sum, call)
        if overflow is not None:
            output = jnp.where(overflow[:, None, None], jnp.nan, output)
        return output.reshape(*batch, *output.shape[1:])

    def _positions(self, given, batch, queries: int, keys: int) -> jax.Array | None:
        """Positions of the tokens, [B, T], or [1, T] if rows are alike; None without `rotary`."""
        if given is not None and (self.rotary is None or self.decode):
            raise ValueError(
                "positions are read by rotary alone, and counted by the cache with decode=True"
            )
        if self.rotary is None:
            return None
        if keys != queries:
            raise ValueError(
                f"rotary is for self-attention: there are {queries} queries and {keys} keys"
            )
        if given is None:
            return cache.positions(self, queries) if self.decode else jnp.arange(queries)[None]
        if given.shape != (*batch, queries):
            raise ValueError(f"positions have shape {given.shape}: must be {(*batch, queries)}")
        return given.reshape(-1, queries)

    def _rotated(self, x: jax.Array, positions: jax.Array | None, call: Call) -> jax.Array:
        """`x` with its last `turned_features` rotated."""
        if self.rotary is None or positions is None:
            return x
        still = x.shape[-1] - self.turned_features(call.head_features)
        turned = rotate(x[..., still:], positions, self.rotary)
        return jnp.concatenate([x[..., :still], turned], -1) if still else turned


def _flatten(x: jax.Array) -> jax.Array:
    """[..., T, M] to [B, T, M]."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
