"""The sublayers of a transformer, and the layer made of them.

    pre     x + dropout(sublayer(norm(x)))        and one norm after the stack
    post    norm(x + dropout(sublayer(x)))        and none after it

The norm is LayerNorm or RMSNorm. In `post`, the models that are an encoder also have one on their
embeddings, as in BERT; translation and language models have none there, as in Vaswani et al. 2017.
"""

import re
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax

from mhe_jax.attention import Attention, Mask, Rotary, make_attention
from mhe_jax.attention.projection import Dropout, Projection, named
from mhe_jax.config import FIELDS_OF_KINDS, Config, InputError, ModelConfig, Role
from mhe_jax.shapeshifter import KroneckerProjection

ACTIVATIONS = {
    "relu": nn.relu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
    "silu": nn.silu,
}
# What a call does with the cache: nothing, make an empty one, or append to it.
CacheMode = Literal["none", "start", "step"]


def normalization(config: ModelConfig, name: str | None = None) -> nn.LayerNorm | nn.RMSNorm:
    """LayerNorm or RMSNorm over the width of x [..., M], in float32 and cast at the end.

    layer    (x - mean) / √(variance + ε) · scale + bias        Ba et al. 2016
    rms      x / √(mean(x²) + ε) · scale                        Zhang & Sennrich 2019
    """
    epsilon, dtype = config.layer_norm_epsilon, config.dtype
    scale_init = named(nn.initializers.ones_init(), ("norm",))
    if config.norm == "rms":
        return nn.RMSNorm(epsilon=epsilon, dtype=dtype, scale_init=scale_init, name=name)
    bias_init = named(nn.initializers.zeros_init(), ("norm",))
    return nn.LayerNorm(
        epsilon=epsilon, dtype=dtype, scale_init=scale_init, bias_init=bias_init, name=name
    )


def projection(config: ModelConfig, rank: int | None) -> Callable[..., nn.Module]:
    """A factory of dense projections, or of projections of `rank` Kronecker products."""
    return Projection if rank is None else KroneckerProjection(rank, config.kronecker.apply)


def dense(config: ModelConfig, name: str | None, use_bias: bool = True) -> nn.Module:
    """A projection initialized like Flax's Dense."""
    return projection(config, config.kronecker.mlp)(
        kernel_init=nn.linear.default_kernel_init,
        bias_init=nn.initializers.zeros_init(),
        use_bias=use_bias,
        dtype=config.dtype,
        name=name,
    )


def attention_module(
    config: ModelConfig, role: Role, name: str | None = None, *, decode: bool = False
) -> Attention:
    """The attention sublayer that `config` asks for in `role`; cross-attention is never rotated.

    InputError, with the dotted name of a field, if its fields do not go together.
    """
    c, fields = config.attention_for(role), {}
    if config.positions == "rotary" and role != "cross":
        fields["rotary"] = Rotary(config.rotary_base, config.rotary_pairs, config.rotary_scaling)
    for field, kinds in FIELDS_OF_KINDS.items():
        value = getattr(c, field)
        if c.kind not in kinds or value is None:
            continue
        if field.endswith("_stddev"):
            field, value = field.replace("_stddev", "_init"), nn.initializers.normal(value)
        fields[field] = value
    # Set explicitly: a cache is filled before any query tells the width.
    width = c.qkv_features or config.features
    module = make_attention(
        c.kind,
        num_heads=c.num_heads,
        qkv_features=width,
        engine=c.engine,
        projection=projection(config, config.kronecker.attention),
        dropout_rate=c.dropout_rate,
        use_bias=c.use_bias,
        normalize_qk=c.normalize_qk,
        force_fp32_for_softmax=True,
        dtype=config.dtype,
        decode=decode,
        name=name,
        **fields,
    )
    try:
        module.check(width // c.num_heads, config.features)
    except ValueError as error:
        field = re.split(r"\W", str(error))[0]
        where = config.attention_field(role, field).removesuffix(field)
        raise InputError(f"{where}{error}") from None
    return module


def check_attention(config: Config) -> None:
    """Raises InputError where fields of an attention do not go together, as its class says."""
    for role in config.facts.roles:
        attention_module(config.model, role)


class MLP(nn.Module):
    """`down(activation(up(x)))`, or gated `down(activation(gate(x)) · up(x))`: [B, T, M] to itself.

    `up(x) = x W_up + b_up`, W_up [M, F], and likewise `gate`; W_down [F, M]; without
    `mlp_bias` there are no biases. Gated, it has 3MF numbers (and 2F + M biases), plain 2MF: with
    two thirds of F, gated is as large. Source of the gate: Shazeer 2020, "GLU Variants Improve
    Transformer".
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        activation, names = ACTIVATIONS[c.activation], ("embed", "mlp")
        y = dense(c, "up", c.mlp_bias)(x, (c.mlp_features,), names)
        if c.mlp == "gated":
            y *= activation(dense(c, "gate", c.mlp_bias)(x, (c.mlp_features,), names))
        else:
            y = activation(y)
        y = nn.with_logical_constraint(y, ("batch", "length", "activation_mlp"))
        return dense(c, "down", c.mlp_bias)(y, (c.features,), ("mlp", "embed"))


class Layer(nn.Module):
    """Self-attention of a role, attention to `encoded` (role `cross`), then the MLP.

    As `decoder` its self-attention is causal. With `cross` off there is no second sublayer: so are
    the layers of an encoder and of a language model.

    Beside what attention caches, the cache holds which positions of `encoded` are not padding, as
    the part of its mask that tells: `encoded_lengths` [B] or `encoded_valid` [B, S]. Each layer has
    them, so that every leaf of the cache has its rows on the same axis.
    """

    config: ModelConfig
    role: Role = "encoder"
    cross: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        mask: Mask | None = None,
        encoded: jax.Array | None = None,
        encoded_mask: Mask | None = None,
        positions: jax.Array | None = None,
        *,
        deterministic: bool = True,
        cache: CacheMode = "none",
    ) -> jax.Array:
        """x [B, T, M] and `encoded` [B, S, M], seen where `encoded_mask` allows, to [B, T, M].

        `positions` [B, T] are for rotary positions, and None otherwise. With cache='start', x gives
        only the shape of the self-attention's cache and is returned unchanged, and only the padding
        of `encoded_mask` is kept; with 'step', what attention sees is in the cache, and all
        arguments but x are None.
        """
        c, decode = self.config, cache != "none"
        self_attention = attention_module(c, self.role, "self_attention", decode=decode)
        cross_attention: Any = None
        if self.cross:
            cross_attention = attention_module(c, "cross", "cross_attention", decode=decode)

        if cache == "start":
            self_attention(x, deterministic=True)
            if self.cross:
                assert encoded_mask is not None
                cross_attention.fill_cache(encoded)
                for part in ("lengths", "valid"):
                    if (kept := getattr(encoded_mask, f"key_{part}")) is not None:
                        self.variable("cache", f"encoded_{part}", lambda kept=kept: kept)
            return x
        if cache == "step":
            # The cache adds its own causal mask, with the position of each row.
            if self.cross:
                encoded_mask = Mask(
                    key_lengths=self.get_variable("cache", "encoded_lengths"),
                    key_valid=self.get_variable("cache", "encoded_valid"),
                )
        elif self.role == "decoder":
            mask = Mask.causal() if mask is None else Mask.causal() & mask

        fixed: dict[str, Any] = {"deterministic": deterministic}
        sublayers: dict[str, Callable] = {
            "self_attention": lambda y: self_attention(y, mask=mask, positions=positions, **fixed)
        }
        if self.cross:
            sublayers["cross_attention"] = lambda y: cross_attention(
                y, encoded, mask=encoded_mask, **fixed
            )
        sublayers["mlp"] = MLP(c, name="mlp")
        for name, sublayer in sublayers.items():
            norm = normalization(c, f"{name}_norm")
            dropout = Dropout(c.dropout_rate, name=f"{name}_dropout")
            if c.norm_position == "pre":
                x = x + dropout(sublayer(norm(x)), **fixed)
            else:
                x = norm(x + dropout(sublayer(x), **fixed))
            x = nn.with_logical_constraint(x, ("batch", "length", "activation_embed"))
        return x
