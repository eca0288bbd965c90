"""Rotary positions: queries and keys are rotated by the positions of their tokens."""

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

Pairs = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """Which features of a query or key are rotated together, and how fast.

    Attributes:
      base: pair i of D/2 is rotated by `base^(-2i/D)` per position: the first by 1, the last by
        about 1 / base.
      pairs: 'half' takes features i and i + D/2 for pair i (Llama, GPT-NeoX), 'interleaved' 2i and
        2i + 1 (RoFormer, GPT-J). Both are the same up to the order of the features.
      scaling: positions are divided by it (position interpolation, Chen et al. 2023, arXiv
        2306.15595): with 4, a text four times as long is rotated as far as one in training.
    """

    base: float = 10000.0
    pairs: Pairs = "half"
    scaling: float = 1.0

    def __post_init__(self):
        if self.pairs not in get_args(Pairs):
            raise ValueError(f"pairs={self.pairs!r} is not one of {', '.join(get_args(Pairs))}")


def rotate(x: jax.Array, positions: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotate each pair i of features, [a, b], by p ω_i: to `[a cos - b sin, b cos + a sin]`.

    `ω_i = base^(-2i/D) / scaling`, i < D/2. The product of a query at p and a key at s then depends
    on their positions only through p - s.

    Args:
      x: queries or keys [B, T, N, D], D even.
      positions: p [B, T] or [1, T], whole numbers or not.
      rotary: base, pairs and scaling.

    Returns:
      [B, T, N, D] in x's type; angles and products are float32.

    Source: Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.2.2.

    >>> turned = rotate(jnp.array([[[[1.0, 0.0]]]]), jnp.array([[np.pi / 2]]), Rotary())
    >>> [round(float(y), 4) for y in turned.ravel()]
    [-0.0, 1.0]
    """
    D = x.shape[-1]
    rates = rotary.base ** (-2 * np.arange(D // 2) / D) / rotary.scaling
    angles = positions[:, :, None, None] * jnp.asarray(rates[None, None, None], jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    axis, shape = (-2, (2, D // 2)) if rotary.pairs == "half" else (-1, (D // 2, 2))
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], *shape)
    a, b = jnp.moveaxis(pairs, axis, 0)
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
    return turned.reshape(x.shape).astype(x.dtype)
