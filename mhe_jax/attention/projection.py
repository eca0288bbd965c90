"""The linear map that every attention kind projects through, and dropout of activations."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name

from mhe_jax.attention.engines.blocks import KEPT

# Probabilities of dropout are multiples of 1 / CHANCES.
CHANCES = 2**16


def named(init: Callable, names: tuple[str | None, ...]) -> Callable:
    """`init` of a parameter that `nn.logical_axis_rules`, if any are set, box with axes `names`."""
    return nn.with_logical_partitioning(init, names) if nn.get_logical_axis_rules() else init


def flat(init: Callable, in_axes: int) -> Callable:
    """`init` applied to the two-dimensional shape, or without `in_axes` to [N], as Flax does.

    An initializer that scales with the fan-in would take M·H for the fan-in of [M, H, D].
    """

    def init_flat(key, shape, dtype=jnp.float32):
        inputs = (math.prod(shape[:in_axes]),) if in_axes else ()
        return init(key, (*inputs, math.prod(shape[in_axes:])), dtype).reshape(shape)

    return init_flat


class Projection(nn.Module):
    """`y[..., o] = Σ_i x[..., i] kernel[i, o] (+ bias[o])`, where i and o may be several axes.

    The shapes come with the call. For products of another form, `matrix` returns the kernel.
    """

    kernel_init: Callable
    bias_init: Callable
    use_bias: bool
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None

    def __call__(
        self,
        x: jax.Array,
        features: tuple[int, ...],
        names: tuple[str | None, ...],
        in_axes: int = 1,
    ) -> jax.Array:
        """Contract the last `in_axes` axes of x [...] into `features`; `names` are the kernel's."""
        kernel, bias = self._parameters(x.shape[-in_axes:], features, names)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        contract = (tuple(range(x.ndim - in_axes, x.ndim)), tuple(range(in_axes)))
        y = jax.lax.dot_general(x, kernel, (contract, ((), ())), precision=self.precision)
        if bias is not None:
            y += bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y

    def matrix(
        self, inputs: tuple[int, ...], features: tuple[int, ...], names: tuple[str | None, ...]
    ) -> jax.Array:
        """The kernel [*inputs, *features] of such a call, in the type of the parameters."""
        return self._parameters(inputs, features, names)[0]

    @nn.compact
    def _parameters(self, inputs, features, names) -> tuple[jax.Array, jax.Array | None]:
        init = named(flat(self.kernel_init, len(inputs)), names)
        kernel = self.param("kernel", init, (*inputs, *features), self.param_dtype)
        if not self.use_bias:
            return kernel, None
        init = named(flat(self.bias_init, 0), names[len(inputs) :])
        return kernel, self.param("bias", init, features, self.param_dtype)


class Dropout(nn.Module):
    """`x k / keep`, k = 0 with probability `rate` and 1 with keep = 1 - rate: [..., N] to the same.

    Like `flax.linen.Dropout`, with 16 random bits per number: `rate` is rounded to a multiple of
    2^-16. k is a byte, which a scanned layer keeps. The random key is of the stream `dropout`.

    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from
    overfitting".
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        keep = CHANCES - round(CHANCES * self.rate)
        if deterministic or keep == CHANCES:
            return x
        *rows, N = x.shape
        words = jax.random.bits(self.make_rng("dropout"), (*rows, -(-N // 2)), jnp.uint32)
        halves = jnp.concatenate([words % CHANCES, words // CHANCES], axis=-1)[..., :N]
        kept = checkpoint_name(halves < keep, KEPT)
        return jnp.where(kept, x * jnp.asarray(CHANCES / max(keep, 1), x.dtype), 0)
