"""Masks as values: what they say of rows, keys and blocks is what their booleans say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.attention import Mask, make_attention

B, T, S, H = 2, 5, 7, 3
RNG = np.random.default_rng(0)
SEGMENTS = jnp.array([[1, 1, 2, 2, 3], [4, 1, 1, 2, 2]]), jnp.array([[1, 2] * 3 + [1], [1] * 7])
PARTS = {
    "causal": Mask.causal(),
    "offset": Mask.causal(jnp.array([2, -3])),
    "window": Mask.local(1, 2),
    "other window": Mask.local(2, 1),
    "window, offset": Mask.local(2, 0, jnp.array([1, -4])),
    "lengths": Mask.lengths(jnp.array([3, 0])),
    "other lengths": Mask.lengths(jnp.array([2, 5], jnp.uint8)),
    "padding": Mask.padding(jnp.array([[1, 0, 1, 1, 0, 0, 1], [0] * 7])),
    "segments": Mask.segments(*SEGMENTS),
    "other segments": Mask.segments(
        jnp.array([[1, 2] * 2 + [1]] * B), jnp.array([[1] * 4 + [2] * 3] * B)
    ),
    "heads": Mask.array(jnp.asarray(RNG.random((B, H, T, S)) < 0.3)),
    "one for all": Mask.array(jnp.asarray(RNG.random((T, S)) < 0.3)),
}
MASKS = PARTS | {
    "two": PARTS["offset"] & PARTS["segments"],
    "all": PARTS["offset"] & PARTS["padding"] & PARTS["segments"] & PARTS["heads"],
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def dense(mask):
    return np.broadcast_to(np.asarray(mask.to_dense(T, S)), (B, H, T, S))


@every_mask
def test_booleans_are_those_of_the_definition(mask):
    mask = jax.tree.map(np.asarray, mask)
    b, _, t, j = np.indices((B, H, T, S))
    wanted = np.broadcast_to(True if mask.allowed is None else mask.allowed, b.shape)
    if mask.is_causal:
        wanted = wanted & (j <= t + (0 if mask.offset is None else mask.offset[b]))
    if mask.window is not None:
        p = t + (0 if mask.window_offset is None else mask.window_offset[b])
        wanted = wanted & (p - mask.window[0] <= j) & (j <= p + mask.window[1])
    if mask.key_lengths is not None:
        wanted = wanted & (j < mask.key_lengths[b])
    if mask.key_valid is not None:
        wanted = wanted & mask.key_valid[b, j]
    if mask.segment_ids is not None:
        wanted = wanted & (mask.segment_ids[0][b, t] == mask.segment_ids[1][b, j])
    np.testing.assert_array_equal(dense(mask), wanted)


@every_mask
def test_rows_that_have_a_key(mask):
    rows = np.broadcast_to(mask.row_has_key(T, S, jnp.float32), (B, T, H, 1))
    np.testing.assert_array_equal(rows[..., 0], dense(mask).any(-1).swapaxes(1, 2))
    assert not np.any(Mask().row_has_key(T, 0, jnp.float32))


@every_mask
def test_keys_that_are_seen(mask):
    keys = np.broadcast_to(mask.key_is_seen(T, S), (B, S))
    np.testing.assert_array_equal(keys, dense(mask).any((1, 2)))


@every_mask
@pytest.mark.parametrize(("start", "size", "keys"), [(0, 2, 7), (2, 3, 5), (1, 1, 7)])
def test_blocks(mask, start, size, keys):
    for begin in (start, jnp.asarray(start)):
        for first in (0, start, keys - 1):
            block = mask.block(begin, size, keys, first).to_dense(size, keys - first)
            found = np.broadcast_to(block, (B, H, size, keys - first))
            wanted = dense(mask)[:, :, start : start + size, first:keys]
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("one", PARTS)
@pytest.mark.parametrize("other", PARTS)
def test_both_at_once(one, other):
    if "window" in one and "window" in other and "window, offset" in (one, other):
        with pytest.raises(ValueError, match="of two windows together, neither may have"):
            PARTS[one] & PARTS[other]
        return
    both = PARTS[one] & PARTS[other]
    np.testing.assert_array_equal(dense(both), dense(PARTS[one]) & dense(PARTS[other]))


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_an_array_before_a_mask(kind):
    """As behind it; NumPy would make an array of masks."""
    array, mask = kind(PARTS["heads"].allowed), PARTS["offset"]
    for found in (array & mask, mask & array):
        assert isinstance(found, Mask)
        np.testing.assert_array_equal(dense(found), np.asarray(array) & dense(mask))


def test_who_may_have_rows_without_a_key():
    assert not Mask().may_empty_a_row
    assert {name for name, mask in PARTS.items() if not mask.may_empty_a_row} == {"causal"}


def test_sizes_of_a_window():
    for size in (-1, 2.0):
        for sides in ((size,), (1, size)):
            with pytest.raises(ValueError, match=f"a window of .*{size}.* takes whole numbers"):
                Mask.local(*sides)


@pytest.mark.parametrize("value", [-1e9, np.nan, 0.5, 255])
def test_values_that_are_neither_0_nor_1(value):
    """Those of a mask that is added to scores would mean the opposite."""
    kept = np.tril(np.ones((T, T)))
    wrong = (255 * kept).astype(np.uint8) if value == 255 else np.where(kept, 0.0, value)
    module, x = make_attention("mha", num_heads=2), jnp.ones((B, T, 4))
    params = module.init(jax.random.key(0), x)
    call = functools.partial(module.apply, params, x)
    for made in (
        lambda: call(mask=jnp.asarray(wrong)),
        lambda: jax.jit(functools.partial(module.apply, mask=wrong))(params, x),
        lambda: call(mask=Mask(allowed=jnp.asarray(wrong)[None, None])),
        lambda: call(mask=Mask(key_valid=jnp.asarray(wrong[:B]))),
        lambda: Mask.array(wrong),
        lambda: Mask.causal() & wrong,
        lambda: Mask.padding(wrong[:B]),
    ):
        with pytest.raises(ValueError, match=f"mask: .*{jnp.asarray(wrong).dtype.type(value)}"):
            made()
