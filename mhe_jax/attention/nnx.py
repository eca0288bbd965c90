"""Attention kinds as NNX modules, with the fields and the call of `flax.nnx.MultiHeadAttention`.

>>> import jax.numpy as jnp
>>> from flax import nnx
>>> from mhe_jax.attention.nnx import make_attention
>>> attention = make_attention("mva", num_heads=4, in_features=32, rngs=nnx.Rngs(0))
>>> attention(jnp.ones((2, 5, 32)), is_causal=True).shape
(2, 5, 32)
>>> attention.value.kernel.shape
(32, 4, 8)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from mhe_jax.attention.kinds import KINDS
from mhe_jax.attention.kinds import make_attention as make_linen
from mhe_jax.attention.mask import Mask, as_mask

# The parameters, by these names, take metadata: `kernel_metadata` and so on, as in Flax.
_METADATA = ("kernel", "out_kernel", "bias", "out_bias", "query_ln_scale", "key_ln_scale")


class Attention(nnx.Module):
    """A kind as an NNX module, which computes what its Linen module does with the same parameters.

    Args:
      num_heads: H; with fewer `num_kv_heads`, `mha` is `gqa`, as in Flax.
      in_features: width of the inputs; `in_kv_features` that of keys and values where it differs.
      decode: True reads and extends the cache that `init_cache` or `fill_cache` made.
      deterministic: True switches dropout off, as `eval()` does; False, as `train()` does.
      keep_rngs: whether the module keeps a stream for its dropout.
      rngs: makes the parameters, and the stream of the dropout.
      fields: those of the Linen module, such as `use_bias` and `engine`; and Flax's metadata of
        parameters, such as `kernel_metadata` and `out_kernel_metadata`.

    Parameters are `nnx.Param`s with the names and shapes of the Linen module. Made under
    `flax.linen.logical_axis_rules` they have their logical axes as `out_sharding`.

    Raises:
      ValueError: a field that the kind does not have, or that does not go with the others.
    """

    kind: ClassVar[str]
    dtype: Any
    dropout_rate: float

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        decode: bool | None = None,
        deterministic: bool | None = None,
        keep_rngs: bool = True,
        rngs: nnx.Rngs,
        **fields: Any,
    ):
        if not isinstance(in_features, int) or in_features < 1:
            raise ValueError(f"in_features={in_features!r} must be a whole number of 1 or more")
        metadata = {name: fields.pop(f"{name}_metadata", None) for name in _METADATA}
        kind = self.kind
        if num_kv_heads is not None:
            fields["num_kv_heads"] = num_kv_heads
            kind = "gqa" if kind == "mha" else kind  # as in Flax, whose one class is both
        widths = {"qkv_features": qkv_features, "out_features": out_features}
        fields |= {name: width or in_features for name, width in widths.items()}
        module = make_linen(kind, num_heads=num_heads, **fields)
        self.linen_class = type(module)
        names = {field.name for field in dataclasses.fields(module) if field.init}
        self.linen_fields = tuple(sorted(names - {"name", "parent"}))
        for name in self.linen_fields:
            setattr(self, name, getattr(module, name))
        self.in_features, self.in_kv_features = in_features, in_kv_features or in_features
        self.decode, self.deterministic = decode, deterministic
        # A kind that makes keys and values of one input is given one.
        inputs = [in_features, in_kv_features] if in_kv_features else [in_features]
        arrays = [jnp.zeros((1, 1, width), self.dtype or jnp.float32) for width in inputs]
        made = module.init(rngs.params(), *arrays, deterministic=True)["params"]
        for name, value in _as_params(made, metadata).items():
            setattr(self, name, value)
        self.rngs = rngs.dropout.fork() if keep_rngs and self.dropout_rate > 0 else None

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | Mask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of `inputs_q` [..., T, M] to `inputs_k` [..., S, M'], as in Flax.

        Args:
          inputs_q: as of the Linen module, like `inputs_k`, `inputs_v`, `mask` and `positions`.
          deterministic: None for the field of that name, and so is `decode`.
          rngs: whose 'dropout' stream is drawn from; None for the module's own.
          sow_weights: sow the weights [..., H, T, S] as an `nnx.Intermediate`.
          is_causal: query t sees keys up to t, besides what `mask` says.

        Returns:
          [..., T, out_features].

        Raises:
          ValueError: `decode` without a cache, dropout without `deterministic` or a stream, and
            what the Linen module raises.
        """
        decode = bool(self.decode if decode is None else decode)
        if decode and not self._cache():
            raise ValueError("decode=True needs a cache: call init_cache or fill_cache first")
        if is_causal:
            mask = as_mask(mask, inputs_q.shape[:-2]) & Mask.causal()
        key = None
        if self.dropout_rate > 0:
            stream = self.rngs if rngs is None else rngs
            needs = "dropout needs deterministic=True or False, here or as a field"
            if not nnx.module.first_from(deterministic, self.deterministic, error_msg=needs):
                if stream is None:
                    raise ValueError("dropout needs rngs: the module keeps none (keep_rngs=False)")
                key = (stream.dropout if isinstance(stream, nnx.Rngs) else stream)()
        y, changed = self._apply(
            decode,
            inputs_q,
            inputs_k,
            inputs_v,
            mask=mask,
            deterministic=key is None,
            dropout_rng=key,
            sow_weights=sow_weights,
            positions=positions,
        )
        for weights in changed.get("intermediates", {}).get("attention_weights", ()):
            self.sow(nnx.Intermediate, "attention_weights", weights)
        self._keep(changed)
        return y

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        """Make an empty cache of self-attention for inputs of `input_shape` [..., S, M].

        Its arrays are `nnx.Cache`s of what the kind caches; `cache_index` [B] counts the tokens of
        each row.
        """
        for name in self._cache():
            delattr(self, name)
        x = jax.ShapeDtypeStruct((*input_shape[:-1], self.in_features), self.dtype or dtype)
        made = jax.eval_shape(lambda x: self._apply(True, x)[1]["cache"], x)
        for name, leaf in made.items():
            kept = dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
            setattr(self, name, nnx.Cache(jnp.zeros(leaf.shape, kept)))

    def fill_cache(self, inputs_k: jax.Array, inputs_v: jax.Array | None = None) -> None:
        """Put the keys and values of cross-attention into the cache; calls with `decode` read them.

        Raises:
          ValueError: the cache is one of self-attention, or `rotary` is set.
        """
        self._keep(self._apply(True, inputs_k, inputs_v, method="fill_cache")[1])

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Of `nnx.view`: sets fields, and makes a cache of that size where `decode` has none."""
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode
        if decode and not self._cache():
            if batch_size is None or max_length is None:
                raise TypeError("decode=True needs batch_size and max_length, to make a cache")
            rows = (batch_size,) if isinstance(batch_size, int) else batch_size
            self.init_cache((*rows, max_length, self.in_features), self.dtype or jnp.float32)

    def _apply(self, decode: bool, *inputs: Any, **how: Any) -> Any:
        """The Linen module of the fields as they are now, applied: its output and what changed."""
        fields = {name: getattr(self, name) for name in self.linen_fields}
        module = self.linen_class(**fields | {"decode": decode, "deterministic": None})
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        mutable = ["intermediates", "cache"] if decode else ["intermediates"]
        return module.apply(
            {"params": params, "cache": self._cache()}, *inputs, mutable=mutable, **how
        )

    def _cache(self) -> dict[str, jax.Array]:
        return {k: leaf[...] for k, leaf in vars(self).items() if isinstance(leaf, nnx.Cache)}

    def _keep(self, changed: Mapping[str, Any]) -> None:
        for name, leaf in changed.get("cache", {}).items():
            if hasattr(self, name):
                getattr(self, name)[...] = leaf
            else:
                setattr(self, name, nnx.Cache(leaf))


def _as_params(made: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Linen's parameters as `nnx.Param`s with `metadata`, or else their logical axes."""
    rules = dict(nn.get_logical_axis_rules())

    def convert(leaf, *path: str):
        if isinstance(leaf, Mapping):
            return nnx.Dict({name: convert(part, *path, name) for name, part in leaf.items()})
        given = metadata.get("_".join(path)) or metadata.get(path[-1]) or {}
        if isinstance(leaf, nn.LogicallyPartitioned):
            # An axis that no rule names is not split.
            axes = tuple(name if name in rules else None for name in leaf.names)
            given, leaf = {"out_sharding": axes, **given}, leaf.value
        return nnx.Param(leaf, **given)

    return {name: convert(leaf, name) for name, leaf in made.items()}


CLASSES: dict[str, type[Attention]] = {
    kind: type(cls.__name__, (Attention,), {"kind": kind, "__doc__": cls.__doc__})
    for kind, cls in KINDS.items()
}


def __getattr__(name: str) -> type[Attention]:
    """The class of a kind, such as `MultiValueAttention`."""
    found = [cls for cls in CLASSES.values() if cls.__name__ == name]
    if not found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found[0]


def make_attention(
    kind: str, num_heads: int, in_features: int, *, rngs: nnx.Rngs, **fields: Any
) -> Attention:
    """The NNX module of `kind`, with `fields` as in `flax.nnx.MultiHeadAttention`."""
    if kind not in CLASSES:
        make_linen(kind)  # raises, with the kinds that there are
    return CLASSES[kind](num_heads, in_features, rngs=rngs, **fields)
