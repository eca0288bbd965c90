"""What a kind of attention overrides, and what it builds from; `module.Attention` calls it."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention import engines
from mhe_jax.attention.cache import KeyValues
from mhe_jax.attention.fields import FlaxFields
from mhe_jax.attention.mask import Mask
from mhe_jax.attention.nearest import Heads, Moments, Parameters
from mhe_jax.attention.projection import Projection, named
from mhe_jax.attention.rotary import Rotary
from mhe_jax.config import InputError


@dataclass(frozen=True)
class Call:
    """One call of an attention module, with all that is known before anything is computed.

    One that fills the cache of cross-attention knows only the widths.
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


class AttentionKind(FlaxFields):
    """The methods of a kind. It overrides what differs: mostly only the first four.

    No method has the name of a parameter: in NNX the two would be one attribute.
    """

    engine: str = "auto"
    projection: Callable[..., nn.Module] = Projection
    rotary: Rotary | None = None

    kind: ClassVar[str]

    # The four methods of a kind.

    def queries(self, x: jax.Array, call: Call) -> jax.Array:
        """[B, T, M] to queries [B, T, H, D] of the engine."""
        width = self.scored_features(call.head_features)
        return self.normalized("query_ln", self.project_heads("query", x, self.num_heads, width))

    def memory(self, inputs_k: jax.Array, inputs_v: jax.Array | None, call: Call) -> KeyValues:
        """Key and value inputs [B, S, M] to the arrays [B, S, ...] that the cache holds.

        `inputs_v` is None only for a kind with `one_source`, where the caller gave none.
        """
        assert inputs_v is not None
        D = call.head_features
        key = self.project_heads("key", inputs_k, self.kv_heads, self.scored_features(D))
        return {
            "key": self.normalized("key_ln", key),
            "value": self.project_heads("value", inputs_v, self.kv_heads, D),
        }

    def expand(self, memory: KeyValues, call: Call) -> tuple[Any, Any]:
        """The arrays of the cache to keys [B, S, K, D] and values [B, S, K, E] of the engine.

        In the form 'factored', to those that `engines.attend` takes in that form.
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
        return getattr(self, "num_kv_heads", self.num_heads)

    def check(self, head_features: int, features: int) -> None:
        """Raises ValueError for fields that do not go together; its first word is a field.

        For heads of width D, whose keys are made from inputs `features` wide.
        """
        if self.kv_heads is None:
            raise ValueError(f"num_kv_heads is not set: a divisor of num_heads={self.num_heads}")
        for field in ("num_kv_heads", "num_groups", "score_groups"):
            parts = getattr(self, field, None)
            if parts is not None and self.num_heads % parts:
                raise ValueError(f"{field}={parts} must divide num_heads={self.num_heads}")
        turned = self.turned_features(head_features)
        if self.rotary is not None and turned % 2:
            field = self.turned_by if getattr(self, self.turned_by) else "num_heads"
            even = f"an even number of features of a head, not {turned}"
            raise ValueError(f"{field}={getattr(self, field)}: rotary positions turn {even}")

    def score_bias(self, memory: KeyValues, key: jax.Array, call: Call) -> jax.Array | None:
        """The bias [B, S, H] that each head adds to the scores of a key; None for no bias."""
        return None

    def start(self, call: Call) -> Call:
        """`call` with what the kind decides before anything is computed."""
        return call

    def scored_features(self, head_features: int) -> int:
        """Width of a query, and of what `project_heads` makes of keys."""
        return head_features

    def turned_features(self, head_features: int) -> int:
        """How many features of a query, and of `turned`, are rotated: the last ones."""
        return self.scored_features(head_features)

    def scale(self, call: Call) -> float | None:
        """The factor of the scores; None for 1/√ of the width of queries."""
        return None

    def untrained(self) -> tuple[str, ...]:
        """Names of parameters that cannot change the output, and get no update in training."""
        return ()

    def core(self, head_features: int) -> tuple[int, int, int]:
        """Multiply-adds of a query and a key, for scores and for sums over values, in the cheapest
        form; and of a token, beyond one for each number of a kernel."""
        H = self.num_heads
        return H * self.scored_features(head_features), H * head_features, 0

    def heads(self, params: Mapping[str, Any]) -> Heads:
        """What the module computes with `params`; unless it is `not_linear`."""
        return Heads.of(params)

    def nearest(self, heads: Heads, moments: Moments) -> Parameters:
        """The parameters, in float64, that come nearest to what K = H heads do.

        Those that are 0, and the output's bias, may be left out; what the module lacks is ignored.
        """
        raise InputError(f"{self.kind} is not made from other attention")

    # What a kind builds from.

    def project_heads(self, name: str, x: jax.Array, heads: int, width: int) -> jax.Array:
        """`x W` with a kernel [M, heads, width]."""
        axis = "heads" if heads == self.num_heads else "kv_heads"
        axis = None if heads == 1 else axis  # one head cannot be split
        names = ("embed", axis, "head_features")
        return self._projection(name)(x, (heads, width), names)

    def project_both(
        self, name: str, inputs_k: jax.Array, inputs_v: jax.Array | None, heads: int, call: Call
    ) -> KeyValues:
        """Keys and values by one `project_heads`: `name`, and 'value' where `inputs_v` is given."""
        if inputs_v is None:
            return {name: self.project_heads(name, inputs_k, heads, call.head_features)}
        both = jnp.concatenate([inputs_k, inputs_v], 1)
        key, value = jnp.split(self.project_heads(name, both, heads, call.head_features), 2, 1)
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
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        return nn.LayerNorm(name=name, use_bias=False, **types)(x)

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
