"""Which keys a query may see, as a value that engines can read part by part."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


@flax.struct.dataclass
class Mask:
    """The conjunction of the parts that are present; a query sees a key where all of them allow it.

    - `is_causal`: key j is allowed for query t where `j <= t + offset[b]`; `offset` [B] is the
      position of the first query among the keys, None for 0.
    - `window`, (left, right): key j is allowed for query t where `p - left <= j <= p + right`, and
      `p = t + window_offset[b]` is the position of the query; `window_offset` [B] is None for 0.
    - `key_lengths` [B]: key j exists where `j < key_lengths[b]`, as with padding on the right.
    - `key_valid` [B, S]: key j exists.
    - `segment_ids`, a pair of [B, T] and [B, S]: query and key carry the same number.
    - `allowed`: anything that broadcasts to [B, H, T, S].

    `&` combines two masks. The parts stay apart, so that an engine may skip blocks.

    Examples:
      >>> import jax.numpy as jnp
      >>> mask = Mask.causal() & Mask.padding(jnp.array([[True, True, False]]))
      >>> mask.to_dense(3, 3)[0, 0].astype(int)
      Array([[1, 0, 0],
             [1, 1, 0],
             [1, 1, 0]], dtype=int32)
    """

    is_causal: bool = flax.struct.field(pytree_node=False, default=False)
    offset: jax.Array | None = None
    window: tuple[int, int] | None = flax.struct.field(pytree_node=False, default=None)
    window_offset: jax.Array | None = None
    key_lengths: jax.Array | None = None
    key_valid: jax.Array | None = None
    segment_ids: tuple[jax.Array, jax.Array] | None = None
    allowed: jax.Array | None = None

    @classmethod
    def causal(cls, offset: jax.Array | int | None = None) -> "Mask":
        """A query sees the keys up to its own position; the first one's is `offset`, [B] or one."""
        return cls(is_causal=True, offset=_per_example(offset))

    @classmethod
    def local(cls, left: int, right: int = 0, offset: jax.Array | int | None = None) -> "Mask":
        """A query sees its own position, `left` keys before it and `right` after it.

        `offset` is the position of the first query, [B] or one number; a cache sets it.

        Raises:
          ValueError: `left` or `right` is not a whole number of at least 0.
        """
        if not all(isinstance(size, int) and size >= 0 for size in (left, right)):
            raise ValueError(f"mask: a window of {left!r} and {right!r}: takes whole numbers >= 0")
        return cls(window=(left, right), window_offset=_per_example(offset))

    @classmethod
    def lengths(cls, key_lengths: jax.Array | int) -> "Mask":
        """Only the first `key_lengths` keys, [B] or one number; engines may skip the others."""
        return cls(key_lengths=_per_example(key_lengths))

    @classmethod
    def padding(cls, key_valid: jax.Array) -> "Mask":
        """Only the keys where `key_valid` [B, S] holds."""
        return cls(key_valid=_booleans(key_valid))

    @classmethod
    def segments(cls, queries: jax.Array, keys: jax.Array | None = None) -> "Mask":
        """Only keys of the query's own segment; `queries` [B, T], `keys` [B, S] or the same."""
        queries = jnp.asarray(queries)
        return cls(segment_ids=(queries, queries if keys is None else jnp.asarray(keys)))

    @classmethod
    def array(cls, allowed: jax.Array) -> "Mask":
        """`allowed`, boolean or 0/1 of any dtype, broadcasts to [B, H, T, S]."""
        allowed = _booleans(allowed)
        return cls(allowed=allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape))

    def __and__(self, other: "Mask | jax.Array") -> "Mask":
        if not isinstance(other, Mask):
            other = Mask.array(other)
        offset, causal = None, [mask.offset for mask in (self, other) if mask.is_causal]
        if any(at is not None for at in causal):
            offsets = [jnp.zeros(1, int) if at is None else at for at in causal]
            offset = functools.reduce(jnp.minimum, offsets)
        window_offset = _both(self.window_offset, other.window_offset)
        if window_offset is not None and None not in (self.window, other.window):
            raise ValueError("mask: of two windows together, neither may have an offset")
        allowed = _both(_of_rank_4(self.allowed), _of_rank_4(other.allowed))
        if self.segment_ids is not None and other.segment_ids is not None:
            allowed = _both(allowed, _same(*other.segment_ids))
        return Mask(
            is_causal=bool(causal),
            offset=offset,
            window=_both(self.window, other.window, lambda a, b: tuple(map(min, a, b))),
            window_offset=window_offset,
            key_lengths=_both(self.key_lengths, other.key_lengths, jnp.minimum),
            key_valid=_both(self.key_valid, other.key_valid),
            segment_ids=other.segment_ids if self.segment_ids is None else self.segment_ids,
            allowed=allowed,
        )

    __rand__ = __and__
    __array_ufunc__ = None  # NumPy leaves `array & mask` to it

    @property
    def may_empty_a_row(self) -> bool:
        """Whether a query may have no key at all, as far as the static parts tell."""
        return self.window is not None or bool(jax.tree.leaves(self))

    def row_has_key(self, queries: int, keys: int, dtype) -> jax.Array:
        """1 where a query may see a key, else 0; broadcasts to [B, T, H, 1]."""
        allowed = self.to_dense(queries, keys) if self.may_empty_a_row else None
        if allowed is None:
            return jnp.full((1, 1, 1, 1), keys != 0, dtype)
        return jnp.swapaxes(allowed.any(-1, keepdims=True), 1, 2).astype(dtype)

    def key_is_seen(self, queries: int, keys: int) -> jax.Array:
        """Whether any query, of any head, sees the key: [B, S], or [1, S] for all examples."""
        allowed = self.to_dense(queries, keys)
        if allowed is None:
            return jnp.ones((1, keys), bool)
        return jnp.broadcast_to(allowed, (*allowed.shape[:3], keys)).any((1, 2))

    def block(self, start: int | jax.Array, size: int, keys: int, first_key: int = 0) -> "Mask":
        """The mask of `size` queries from `start` on, over the keys [first_key, keys)."""

        def moved(offset):
            if isinstance(start, int) and start == first_key:
                return offset
            return (0 if offset is None else offset) + jnp.full(1, start - first_key)

        def of_keys(x, axis=1):
            return _cut(x, axis, first_key, keys - first_key)

        segments, allowed = self.segment_ids, self.allowed
        return Mask(
            is_causal=self.is_causal,
            offset=moved(self.offset) if self.is_causal else None,
            window=self.window,
            window_offset=None if self.window is None else moved(self.window_offset),
            key_lengths=None if self.key_lengths is None else self.key_lengths - first_key,
            key_valid=None if self.key_valid is None else of_keys(self.key_valid),
            segment_ids=segments and (_cut(segments[0], 1, start, size), of_keys(segments[1])),
            allowed=None if allowed is None else of_keys(_cut(allowed, 2, start, size), 3),
        )

    def static_bounds(self) -> tuple[int | None, int | None]:
        """Query t sees keys in `[t - before, t + after]`, whatever the arrays; None: no bound."""
        window = self.window if self.window_offset is None else None
        left, right = window or (None, None)
        if self.is_causal and self.offset is None:
            right = 0
        return left, right

    def query_bounds(self, queries: int, static: bool = False) -> tuple[Any, Any]:
        """First and last key [B or 1, T] of each query by what has an offset; None: no bound.

        With `static` also by what has none.
        """
        before, after = self.static_bounds() if static else (None, None)
        at = jnp.arange(queries)[None]
        first, last = None if before is None else at - before, None if after is None else at + after
        if self.is_causal and self.offset is not None:
            last = _both(last, at + self.offset[:, None], jnp.minimum)
        if self.window is not None and self.window_offset is not None:
            (left, right), at = self.window, at + self.window_offset[:, None]
            first, last = at - left, _both(last, at + right, jnp.minimum)
        return first, last

    def check(self, heads: tuple[int, int, int, int]) -> None:
        """Raises ValueError where a part of the mask does not broadcast to [B, H, T, S]."""
        B, _, T, S = heads
        of_queries, of_keys = self.segment_ids or (None, None)
        for part, array, wanted in (
            ("offset", self.offset, (B,)),
            ("offset of the window", self.window_offset, (B,)),
            ("key_lengths", self.key_lengths, (B,)),
            ("key_valid", self.key_valid, (B, S)),
            ("segments of queries", of_queries, (B, T)),
            ("segments of keys", of_keys, (B, S)),
            ("the array [batch, heads, queries, keys]", self.allowed, heads),
        ):
            shape = wanted if array is None else array.shape
            fits = len(shape) == len(wanted)
            if not fits or any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
                raise ValueError(f"mask: {part} has shape {shape}, does not broadcast to {wanted}")

    def to_dense(self, queries: int, keys: int) -> jax.Array | None:
        """Booleans of rank 4 that broadcast to [B, H, T, S]; None where all is allowed."""
        allowed = self.allowed
        key = jnp.arange(keys)[None, None, :]
        first, last = self.query_bounds(queries, static=True)
        if first is not None:
            allowed = _both(allowed, (key >= first[:, :, None])[:, None])
        if last is not None:
            allowed = _both(allowed, (key <= last[:, :, None])[:, None])
        if self.key_lengths is not None:
            allowed = _both(allowed, (key < self.key_lengths[:, None, None])[:, None])
        if self.key_valid is not None:
            allowed = _both(allowed, self.key_valid[:, None, None, :])
        if self.segment_ids is not None:
            allowed = _both(allowed, _same(*self.segment_ids))
        return allowed


def _booleans(values) -> jax.Array:
    """Booleans, from 0 and 1 of any dtype; values of a traced array are not known, nor checked.

    Raises:
      ValueError: another value, such as those of a mask that is added to scores.
    """
    try:
        found = jnp.asarray(values)
    except (TypeError, ValueError):
        raise ValueError(f"mask: {type(values).__name__} is not an array or a Mask") from None
    if found.dtype != bool and not isinstance(values, Tracer):
        numbers = np.asarray(values)
        if (wrong := numbers[(numbers != 0) & (numbers != 1)]).size:
            raise ValueError(
                f"mask: has a value {wrong.flat[0]}: takes booleans, or 1 where a query may see a "
                "key and else 0; one that is added to scores is `mask == 0` here"
            )
    return found.astype(bool)


def _per_example(number) -> jax.Array | None:
    # Unsigned lengths would wrap around where a block counts from its own first key.
    return None if number is None else jnp.atleast_1d(jnp.asarray(number).astype(int))


def _of_rank_4(allowed: jax.Array | None) -> jax.Array | None:
    return None if allowed is None else Mask.array(allowed).allowed


def _both(a: Any, b: Any, both: Callable = jnp.logical_and) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return both(a, b)


def _cut(x: jax.Array, axis: int, start: int | jax.Array, size: int) -> jax.Array:
    """`size` positions of an axis, or the only one of an axis that is broadcast."""
    if x.shape[axis] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _same(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def as_mask(mask: "Mask | jax.Array | None", batch: tuple[int, ...]) -> Mask:
    """Any mask that a caller may pass as a `Mask`, over the flattened leading axes `batch`.

    Raises:
      ValueError: an array that does not broadcast to [*batch, H, T, S], or holds other numbers.
    """
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        valid = None if mask.key_valid is None else _booleans(mask.key_valid)
        return dataclasses.replace(mask, allowed=_of_rank_4(mask.allowed), key_valid=valid)
    allowed = _booleans(mask)
    if allowed.ndim > 3 and (len(batch) != 1 or allowed.ndim > 4):
        tail = allowed.shape[-3:]
        try:
            allowed = jnp.broadcast_to(allowed, batch + tail).reshape(-1, *tail)
        except ValueError:
            shape = allowed.shape
            raise ValueError(f"mask {shape}: must broadcast to [*{batch}, H, T, S]") from None
    return Mask.array(allowed)
