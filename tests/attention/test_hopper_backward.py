"""The backward kernel for Hopper: emulated, interpreted, on a made machine, and lowered."""

import functools

import emulated
import hopper_machine
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import normal

hopper = pytest.importorskip(
    "mhe_jax.attention.engines.shared.hopper_backward",
    reason="this JAX has no Mosaic GPU",
    exc_type=ImportError,
)
from mhe_jax.attention.engines.shared import hopper_blocks  # noqa: E402

N, T, S, D, X, VALUES, KEYS, SCALE = 2, 256, 384, 64, 192, 128, 128, 0.3
MASKS = [
    "none", "causal", "window", "causal, no keys", "ids", "bits", "causal, ids",
    "window, ids, bits",
]  # fmt: skip


def visible(name):
    """In the second row bounds are 3 later, so that rows differ."""
    parts, query, later = set(name.split(", ")), np.arange(T), 3 * np.arange(N)[:, None]
    first, last = np.zeros((N, T), int), np.full((N, T), S - 1)
    if "causal" in parts:
        last = later + query
    if "window" in parts:
        first, last = later + query - 37, later + query + 5
    if "no keys" in parts:
        none = query % 128 < 67
        first, last = np.where(none, S, first), np.where(none, -1, last)
    bounded = bool(parts & {"causal", "window", "no keys"})
    ids = [
        np.repeat([[1, 2, 3]] * N, lengths, axis=1) for lengths in ([70, 130, 56], [41, 290, 53])
    ]
    key, seen = np.arange(S), np.ones((N, T, S), bool)
    if bounded:
        seen &= (first[..., None] <= key) & (key <= last[..., None])
    if "ids" in parts:
        seen &= ids[0][..., None] == ids[1][:, None]
    blocks = np.any(seen.reshape(N, T // 128, 128, S), axis=2)
    least, most = (x.reshape(N, T // 128, 128) for x in (first, last))
    ranges = blocks.argmax(-1), S - blocks[..., ::-1].argmax(-1), least.max(-1), most.min(-1) + 1
    bits = np.random.default_rng(7).integers(-(2**31), 2**31, (N, S // 32, T))
    given = (
        np.stack([first, last], 1) if bounded else None,
        ids if "ids" in parts else None,
        np.stack(ranges, -1) if bounded or "ids" in parts else None,
        bits if "bits" in parts else None,
    )
    bounds, ids, ranges, bits = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), given)
    return hopper_blocks.Visible(bounds, ids, ranges, bits)


def arrays(name) -> list:
    """Quarters, whose products are exact in any order, and the maxima of the forward pass."""
    shapes, seen = ((N, T, D), (N, S, D), (N, T, X), (N, S, X)), visible(name)
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
    seen = given[5]
    sees = np.asarray(emulated.seen(seen, T, slice(0, S))) & np.ones((N, T, S), bool)
    s = np.where(sees, np.einsum("ntd,nsd->nts", q, k) - m[..., None], -np.inf)
    e, kept = np.exp(SCALE * s), np.ones((N, T, S))
    if seen.bits is not None:
        words = np.ascontiguousarray(np.asarray(seen.bits).swapaxes(1, 2))
        kept = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    of_values, of_others = (
        np.einsum("ntx,nsx->nts", dsums[..., part], columns[..., part])
        for part in (slice(VALUES), slice(VALUES, X))
    )
    found = emulated.products(hopper.Sizes(SCALE, VALUES), *given)
    for got, want in zip(found, (e, e * (kept * of_values + of_others)), strict=True):
        np.testing.assert_allclose(np.float64(got), want, rtol=2**-7, atol=1e-30)


def check(name, cluster, slots, monkeypatch, rows=N, **how):
    """`slots` are fewer than the steps, so that each is used again."""
    room = 2 * 128 * KEYS + slots * 2 * (128 + KEYS) * 64
    monkeypatch.setattr(hopper, "SHARED_BYTES", room)
    sizes = hopper.Sizes(SCALE, VALUES, KEYS, cluster)
    given = jax.tree.map(lambda x: x[:rows], arrays(name))
    found = hopper.products(sizes, *given, **how)
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
    machine = hopper_machine.install(monkeypatch, hopper, hopper_blocks, seed=slots)
    check(name, cluster, slots, monkeypatch)
    seen = emulated.seen(visible(name), T, slice(0, S)) & np.ones((N, T, S), bool)
    tiles = seen.reshape(N, -1, 128 * cluster, S // KEYS, KEYS).any((2, 4)).sum()
    assert machine.loaded == tiles * (D + X) * 2 * (128 * cluster + KEYS)


def test_one_slot_is_too_few(monkeypatch):
    hopper_machine.install(monkeypatch, hopper, hopper_blocks, seed=0)
    with pytest.raises(hopper_machine.Fault, match="nothing can go on"):
        check("none", 2, 1, monkeypatch)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("D", "X", "keys"), [(64, 832, 256), (128, 1088, 256), (320, 512, 128)])
@pytest.mark.parametrize("name", ["none", "window, ids, bits"])
def test_it_lowers(name, D, X, keys, cluster):
    """As far as a program for a GPU can be made where neither a GPU nor its plug-in is."""
    seen, S = visible(name), 512
    if seen.bits is not None:
        seen = seen._replace(bits=jnp.zeros((N, S // 32, T), jnp.int32))
        seen = seen._replace(ids=(seen.ids[0], jnp.zeros((N, S), jnp.int32)))
    shapes = (N, T, D), (N, S, D), (N, T, X), (N, S, X)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    given += [jax.ShapeDtypeStruct((N, T), jnp.float32), seen]
    run = functools.partial(hopper.products, hopper.Sizes(SCALE, X - 64, keys, cluster))
    text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
