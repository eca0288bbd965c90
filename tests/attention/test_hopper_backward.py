"""The backward kernel for Hopper: emulated, on a made machine, and lowered."""

import functools

import emulated
import hopper_machine
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import normal

from mhe_jax.attention import Mask

hopper = pytest.importorskip(
    "mhe_jax.attention.engines.shared.hopper_backward",
    reason="this JAX has no Mosaic GPU",
    exc_type=ImportError,
)
from mhe_jax.attention.engines.shared import hopper_forward  # noqa: E402

N, T, S, D, X, VALUES, KEYS, SCALE = 2, 256, 384, 64, 192, 128, 128, 0.3
# In the second row bounds are 3 later, so that rows differ.
LATER = jnp.array([0, 3])
LENGTHS = [70, 130, 56], [41, 290, 53]
IDS = Mask.segments(*(np.repeat([[1, 2, 3]] * N, lengths, axis=1) for lengths in LENGTHS))
CAUSAL, WINDOW = Mask.causal(LATER), Mask.local(37, 5, LATER)
# The mask, and whether dropout keeps a part.
MASKS = {
    "none": (Mask(), False),
    "causal": (CAUSAL, False),
    "window": (WINDOW, False),
    "causal, no keys": (Mask.causal(jnp.array([-67, -200])), False),
    "ids": (IDS, False),
    "bits": (Mask(), True),
    "causal, ids": (CAUSAL & IDS, False),
    "window, ids, bits": (WINDOW & IDS, True),
}


def visible_of(name):
    mask, dropout = MASKS[name]
    return emulated.visible_of(mask, (N, T, S), dropout)


def arrays(name) -> list:
    """Quarters, whose products are exact in any order, and the maxima of the forward pass."""
    shapes, (seen, *_) = ((N, T, D), (N, S, D), (N, T, X), (N, S, X)), visible_of(name)
    quarters = [np.rint(4 * normal(i, *shape)) / 4 for i, shape in enumerate(shapes)]
    given = [jnp.asarray(x, jnp.bfloat16) for x in quarters]
    s = jnp.einsum("ntd,nsd->nts", *given[:2], preferred_element_type=jnp.float32)
    s = jnp.where(emulated.seen(seen, T, slice(0, S)), s, emulated.LEAST)
    return [*given, s.max(-1), seen]


@pytest.mark.parametrize("name", MASKS)
def test_emulated(name):
    """E and dS to their rounding to bfloat16."""
    given = arrays(name)
    q, k, dsums, columns, m = (np.asarray(x, np.float64) for x in given[:5])
    _, sees, kept = visible_of(name)
    e = np.exp(SCALE * np.where(sees, np.einsum("ntd,nsd->nts", q, k) - m[..., None], -np.inf))
    of_values, of_others = (
        np.einsum("ntx,nsx->nts", dsums[..., part], columns[..., part])
        for part in (slice(VALUES), slice(VALUES, X))
    )
    found = emulated.products(hopper.Sizes(SCALE, VALUES), *given)
    for got, want in zip(found, (e, e * (kept * of_values + of_others)), strict=True):
        np.testing.assert_allclose(np.float64(got), want, rtol=2**-7, atol=1e-30)


def check(name, cluster, slots, monkeypatch):
    """`slots` are fewer than the steps, so that each is used again."""
    room = 2 * 128 * KEYS + slots * 2 * (128 + KEYS) * 64
    monkeypatch.setattr(hopper, "SHARED_BYTES", room)
    sizes = hopper.Sizes(SCALE, VALUES, KEYS, cluster)
    given = arrays(name)
    found = hopper.products(sizes, *given)
    for got, want in zip(found, emulated.products(sizes, *given), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(want))


@pytest.mark.parametrize(
    ("name", "cluster", "slots"),
    [
        *((name, 2, 2) for name in ("causal, no keys", "causal, ids", "window, ids, bits")),
        ("none", 1, 3),
        ("ids", 1, 2),
        ("bits", 2, 3),
    ],
)
def test_on_a_machine(name, cluster, slots, monkeypatch):
    """In an order that is drawn of what may happen in any order; tiles that are seen are loaded."""
    machine = hopper_machine.install(monkeypatch, hopper, hopper_forward, seed=slots)
    check(name, cluster, slots, monkeypatch)
    visible, *_ = visible_of(name)
    first, end = np.zeros((N, T // 128)), np.full((N, T // 128), S)
    if visible.ranges is not None:
        first, end = np.asarray(visible.ranges)[..., :2].swapaxes(0, 2).swapaxes(1, 2)
    first, end = first.reshape(N, -1, cluster).min(2), end.reshape(N, -1, cluster).max(2)
    tiles = (np.ceil(end / KEYS) - first // KEYS).sum()
    assert machine.loaded == tiles * (D + X) * 2 * (128 * cluster + KEYS)


def test_one_slot_is_too_few(monkeypatch):
    hopper_machine.install(monkeypatch, hopper, hopper_forward, seed=0)
    with pytest.raises(hopper_machine.Fault, match="nothing can go on"):
        check("none", 2, 1, monkeypatch)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("D", "X", "keys"), [(64, 832, 256), (128, 1088, 256), (320, 512, 128)])
@pytest.mark.parametrize("name", ["none", "window, ids, bits"])
def test_it_lowers(name, D, X, keys, cluster):
    """As far as a program for a GPU can be made where neither a GPU nor its plug-in is."""
    (seen, *_), S = visible_of(name), 512
    if seen.bits is not None:
        seen = seen._replace(bits=jnp.zeros((N, S // 32, T), jnp.int32))
        seen = seen._replace(ids=(seen.ids[0], jnp.zeros((N, S), jnp.int32)))
    shapes = (N, T, D), (N, S, D), (N, T, X), (N, S, X)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    given += [jax.ShapeDtypeStruct((N, T), jnp.float32), seen]
    run = functools.partial(hopper.products, hopper.Sizes(SCALE, X - 64, keys, cluster))
    text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
