"""A stack of L layers, unrolled or scanned, and parameter trees from one form to the other.

unrolled    layer_0 .. layer_{L-1}
scanned     layers, every leaf with a leading axis of L, logical name `layers`
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mhe_jax.attention.engines import is_saved
from mhe_jax.config import ModelConfig, Role
from mhe_jax.model.layers import CacheMode, Layer, normalization

_METADATA = {nn.PARTITION_NAME: "layers"}
_LAYER = re.compile(r"layer_(\d+)")
ATTENTION = ("self_attention", "cross_attention")
_is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def _is_kept(primitive, *args, **params) -> bool:
    """Whether a scanned layer keeps the result of `primitive` for its backward pass.

    Products with parameters, what engines name and dropout masks are kept. Softmax, activations and
    norms are computed again, as XLA chooses where layers are unrolled.
    """
    return _is_product(primitive, *args, **params) or is_saved(primitive, *args, **params)


class Stack(nn.Module):
    """Layers of a role, with one more `norm` after them in pre-norm order."""

    config: ModelConfig
    num_layers: int
    role: Role = "encoder"
    cross: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        deterministic: bool = True,
        cache: CacheMode = "none",
        **seen: Any,
    ) -> jax.Array:
        """[B, T, M] to [B, T, M]; each layer gets `seen`, masks and what they are of, by name.

        `positions` [B, T] are for rows that do not count from 0.
        """
        c = self.config
        # Positions that are not rotary were added to the embeddings.
        seen["positions"] = positions if c.positions == "rotary" else None
        trains = cache == "none"
        fixed = {"deterministic": deterministic} | ({} if trains else {"cache": cache})

        def layer(name):
            return Layer(c, self.role, self.cross, name=name)

        def apply(layer, x, seen):
            return layer(x, **seen, **fixed), None

        if c.scan_layers:
            if trains:
                # Inside a scan nothing can be shared with the forward pass anyway.
                policy = None if c.remat else _is_kept
                apply = nn.remat(apply, policy=policy, prevent_cse=False)
            scan = nn.scan(
                apply,
                variable_axes={"params": 0, "cache": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                length=self.num_layers,
                metadata_params=_METADATA,
            )
            x, _ = scan(layer("layers"), x, seen)
        else:
            if c.remat and trains:
                apply = nn.remat(apply)
            for i in range(self.num_layers):
                x, _ = apply(layer(f"layer_{i}"), x, seen)
        if c.norm_position == "pre" and cache != "start":
            x = normalization(c, "norm")(x)
        return x


def unroll_layers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Split each `layers` of stacked leaves into `layer_0`, `layer_1`, ...; keep the rest as it is.

    Takes parameters (or a cache) of a whole model, boxed with logical names or plain, and returns
    what the same model has with `scan_layers=False`. The inverse is `stack_layers`.
    """
    result = {}
    for name, value in tree.items():
        if name == "layers":
            for i in range(len(jax.tree.leaves(value)[0])):
                one = jax.tree.map(lambda leaf, i=i: leaf[i], value)
                result[f"layer_{i}"] = nn.meta.remove_axis(one, 0, _METADATA)
        else:
            result[name] = unroll_layers(value) if isinstance(value, Mapping) else value
    return result


def stack_layers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Stack each run of `layer_0`, `layer_1`, ... into one `layers` of stacked leaves."""
    result, layers = {}, {}
    for name, value in tree.items():
        if match := _LAYER.fullmatch(name):
            layers[int(match[1])] = value
        else:
            result[name] = stack_layers(value) if isinstance(value, Mapping) else value
    if layers:
        ordered = [layers[i] for i in range(len(layers))]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)
        result["layers"] = nn.meta.add_axis(stacked, 0, _METADATA)
    return result


def role_of(parts: tuple[str, ...]) -> Role:
    """The role of the attention sublayer that a path of parameters leads to or through.

    >>> role_of(("decoder", "layer_0", "cross_attention", "key_head_embedding"))
    'cross'
    """
    if "cross_attention" in parts:
        return "cross"
    return "decoder" if "decoder" in parts else "encoder"


# Parameters that have a row for each piece of the vocabulary.
VOCABULARY = ("token", "output", "vocabulary_bias")


def count_parameters(params: Any, config: ModelConfig | None = None) -> dict[str, int]:
    """The number of parameters: `total`, and `attention` in the attention sublayers.

    With `config`, padding of the vocabulary is not counted.

    >>> count_parameters({"self_attention": {"query": jnp.ones((3, 2))}, "mlp": jnp.ones(5)})
    {'total': 11, 'attention': 6}
    """
    counts = {"total": 0, "attention": 0}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        size = math.prod(leaf.shape)
        if config is not None and getattr(path[-1], "key", None) in VOCABULARY:
            size = size // config.padded_vocabulary_size * config.vocabulary_size
        counts["total"] += size
        if any(getattr(key, "key", None) in ATTENTION for key in path):
            counts["attention"] += size
    return counts
