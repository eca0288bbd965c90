"""The one linear map that every attention kind projects through."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype


def named(init: Callable, names: tuple[str | None, ...]) -> Callable:
    """An initializer whose parameter carries the logical axes `names` where sharding rules are set.

    Under `flax.linen.logical_axis_rules` the parameter is boxed (`nn.LogicallyPartitioned`);
    elsewhere it is a plain array, so that a user's own model need not know about sharding.
    """
    return nn.with_logical_partitioning(init, names) if nn.get_logical_axis_rules() else init


def flat(init: Callable, in_axes: int) -> Callable:
    """`init` applied to the two-dimensional shape, as Flax does.

    An initializer that scales with the fan-in would take M·H for the fan-in of [M, H, D].
    """

    def init_flat(key, shape, dtype=jnp.float32):
        two_dimensional = (math.prod(shape[:in_axes]), math.prod(shape[in_axes:]))
        return init(key, two_dimensional, dtype).reshape(shape)

    return init_flat


class Projection(nn.Module):
    """`y[..., o] = Σ_i x[..., i] kernel[i, o] (+ bias[o])`, where i and o may be several axes.

    The shapes come with the call, because an attention module learns its width from its input. For
    products that are not of this form, `matrix` returns the kernel instead.
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
        init = named(flat_bias(self.bias_init), names[len(inputs) :])
        return kernel, self.param("bias", init, features, self.param_dtype)


def flat_bias(init: Callable) -> Callable:
    """`init` applied to the one-dimensional shape, as Flax does."""

    def init_flat(key, shape, dtype=jnp.float32):
        return init(key, (math.prod(shape),), dtype).reshape(shape)

    return init_flat
