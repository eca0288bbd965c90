"""The forward kernel for Hopper: emulated, on a made machine, and lowered; no GPU runs it."""

import emulated
import hopper_machine
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import normal

from mhe_jax.attention import Mask

hopper = pytest.importorskip(
    "mhe_jax.attention.engines.shared.hopper_forward",
    reason="this JAX has no Mosaic GPU",
    exc_type=ImportError,
)

N, T, S, D = 2, 256, 384, 64


def masks(n, T, S):
    """Of n rows, which differ."""
    query, key = np.arange(T)[None], np.arange(S)[None]
    return {
        "none": Mask(),
        "lengths": Mask.lengths([S - 84, 0][:n]),
        "causal": Mask.causal(),
        "offsets": Mask.causal(jnp.array([120, 131][:n])),
        "window": Mask.local(37, 3),
        "wide window": Mask.local(211, 3),
        "padding": Mask.padding(key % 7 != 3),
        "segments": Mask.segments(query // 61, key // 61),
        "causal segments": Mask.segments(query // 61, key // 61) & Mask.causal(),
        "queries without keys": Mask.causal(jnp.array([-5, -70][:n])),
        "holes": Mask.segments(np.where(query % 3, 0, 9), 0 * key),
    }


def visible_of(mask: str, dropout: bool = False, shape=(N, T, S)):
    return emulated.visible_of(masks(*shape)[mask], shape, dropout)


def sizes_for(blocks, dropout=False, chunks=1, heads=2, width=32):
    return hopper.Sizes(0.3, chunks, heads, width, 16, 0.5 if dropout else 1.0, *blocks)


def arrays(sizes, shape=(N, T, S), grid=None):
    """q, k, and columns and weights of values and exponentiated biases, as `mosaic` lays them."""
    C, H, E, W = sizes.chunks, sizes.heads, sizes.width, sizes.weights
    n, T, S = shape
    q, k, v, b = (
        normal(1, n, T, D),
        normal(2, n, S, D),
        normal(3, n, S, C, H, E),
        normal(4, n, S, C, H),
    )
    w = np.exp(b - 2)
    if grid:  # products are exact: weights that differ in a bit round to others
        q, k, v, w = (np.rint(grid * x) / grid for x in (q, k, v, w + 0.5))
        w += 2**-12  # their second parts
    high = np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32)
    parts = np.concatenate([high, w - high], -1)
    parts = np.pad(parts, ((0, 0),) * 3 + ((0, W - 2 * H),))
    columns = (w[..., None] * v).reshape(n, S, -1)
    given = q, k, columns, parts.reshape(n, S, -1)
    powers = jnp.exp2(jnp.asarray(np.rint(normal(5, n, C * H * E)), jnp.float32))
    return [*(jnp.asarray(x, jnp.bfloat16) for x in given), powers]


def reference(sizes, q, k, columns, weights, powers, seen, kept):
    """In float64; m as the greatest score that is seen."""
    q, k, columns, weights, powers = (
        np.float64(np.asarray(x, np.float32)) for x in (q, k, columns, weights, powers)
    )
    n, C, H = len(q), sizes.chunks, sizes.heads
    s = np.where(seen, np.einsum("ntd,nsd->nts", q, k), -np.inf)
    m = np.maximum(s.max(-1), hopper.LEAST)
    e = np.exp(sizes.scale * (s - m[..., None]))
    parts = weights.reshape(n, S, C, -1)[..., : 2 * H].reshape(n, S, C, 2, H)
    first, w = (x.reshape(n, S, C * H) for x in (parts[:, :, :, 0], parts.sum(3)))
    d = np.einsum("nts,nsh->nth", e, w)
    d = np.where(d > 0, d, 1)
    output = np.einsum("nts,nsx->ntx", e * kept, columns).reshape(n, T, C * H, -1)
    output = (output / (sizes.keep * d)[..., None]).reshape(n, T, -1) * powers[:, None]
    left = np.einsum("nts,nsh->nht", e * kept, first) / (sizes.keep * d.swapaxes(1, 2))
    return output, d.swapaxes(1, 2), m, left


@pytest.mark.covering(1)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("mask", masks(N, T, S))
def test_numbers(mask, dropout):
    """The kernel's arithmetic against float64: E is rounded to bfloat16, and nothing else."""
    visible, seen, kept = visible_of(mask, dropout)
    sizes = sizes_for((64, 2, 2), dropout, chunks=2)
    given = arrays(sizes)
    high, low, d, m, *left = emulated.forward(sizes, *given, visible)
    output, *wanted, left_wanted = reference(sizes, *given, seen, kept)
    got = np.float64(high) + np.float64(low)
    assert np.abs(got - output).max() <= 2**-7 * np.abs(output).max()
    assert np.abs(got - output).mean() <= 2**-10 * np.abs(output).max()
    np.testing.assert_allclose(d, wanted[0], rtol=2**-8)
    np.testing.assert_allclose(m, wanted[1], rtol=1e-6, atol=1e-5)
    assert len(left) == dropout
    for x in left:
        np.testing.assert_allclose(x, left_wanted, rtol=2**-7, atol=2**-10)
    none = ~seen.any(-1)
    assert (got[none] == 0).all()
    assert (m[none] == hopper.LEAST).all()
    assert (np.asarray(d).swapaxes(1, 2)[none] == 1).all()


def check(mask, blocks, shape, dropout, **more):
    visible, *_ = visible_of(mask, dropout, shape)
    sizes = sizes_for(blocks, dropout, **more)
    given = arrays(sizes, shape, grid=4)
    found = hopper.forward(sizes, *given, visible)
    sizes = sizes._replace(keys=64) if visible.ids else sizes  # as it takes them
    high, low, *rest = emulated.forward(sizes, *given, visible)
    np.testing.assert_allclose(
        np.float64(found[0]) + np.float64(found[1]),
        np.float64(high) + np.float64(low),
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(found[0], np.float32(high), rtol=2**-7, atol=1e-6)
    assert len(found) == 2 + len(rest)
    for got, want in zip(found[2:], rest, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "dropout", "blocks", "shape", "more"),
    [
        ("none", False, (64, 2, 1), (2, 128, 192), {"chunks": 2}),
        # Parts of the output that begin inside a head.
        ("none", True, (64, 2, 2), (1, 128, 192), {"heads": 4, "width": 48}),
        ("causal", False, (64, 3, 3), (1, 256, 384), {}),
        ("wide window", True, (64, 2, 1), (1, 256, 384), {}),
        ("lengths", False, (128, 2, 2), (2, 128, 384), {}),
        ("offsets", True, (64, 3, 3), (2, 128, 384), {}),
        ("causal segments", False, (128, 2, 2), (1, 256, 384), {}),
        ("queries without keys", False, (64, 2, 2), (1, 256, 256), {}),
        ("holes", True, (64, 2, 2), (1, 128, 192), {}),
    ],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2))])
def test_on_a_machine(mask, dropout, blocks, shape, more, seed, monkeypatch):
    """In an order that is drawn of what may happen in any order."""
    hopper_machine.install(monkeypatch, hopper, seed=seed)
    check(mask, blocks, shape, dropout, **more)


def test_small_denominators_of_large_values(monkeypatch):
    """Neither of the output's factors, 1 / d and a power of two, overflows before the other."""
    hopper_machine.install(monkeypatch, hopper, seed=0)
    sizes = sizes_for((64, 2, 2))
    shape = 1, 128, 128
    q, k, columns, weights, powers = arrays(sizes, shape, grid=4)
    small = jnp.asarray(2.0**-80, jnp.bfloat16)
    given = q, k, columns * small, weights * small, powers * 2.0**100
    output = hopper.forward(sizes, *given, visible_of("none", shape=shape)[0])[0]
    assert np.isfinite(np.float32(output)).all()


# D, heads and width; columns and programs, keys of a block, slots of k and columns.
SHAPES = {
    (64, 12, 64): (256, 3, 128, 2, 2),
    (64, 16, 64): (256, 4, 128, 2, 2),
    (64, 8, 64): (256, 2, 128, 2, 2),
    (64, 16, 16): (128, 2, 128, 2, 2),
    (64, 12, 32): (192, 2, 128, 2, 2),
    (64, 3, 48): (144, 1, 128, 2, 2),
    (64, 5, 48): (240, 1, 128, 2, 2),
    (64, 1, 256): (256, 1, 128, 2, 2),
    (64, 3, 240): (240, 3, 128, 2, 2),
    (128, 8, 128): (256, 4, 64, 3, 3),
    (192, 8, 32): (256, 1, 64, 3, 3),
    (320, 12, 32): (192, 2, 64, 2, 2),
    (320, 8, 48): (192, 2, 64, 2, 2),
    (384, 8, 64): (256, 2, 64, 2, 1),
    (384, 16, 32): (256, 2, 64, 2, 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes(shape):
    """They fit; a program has whole heads, and its registers and shared memory have room."""
    D, heads, width = shape
    sizes = hopper.sizes_of(0.3, 1.0, D, heads, width)
    columns = sizes.heads * width
    assert (columns, sizes.chunks, *sizes[-3:]) == SHAPES[shape]
    assert sizes.chunks * sizes.heads >= heads
    assert sizes.weights % 16 == 0
    assert 2 * sizes.heads <= sizes.weights <= 272 - columns
    for keep in (1.0, 0.9):
        sizes = hopper.sizes_of(0.3, keep, D, heads, width)
        columns = sizes.heads * width
        blocks = sizes.key_slots * D + sizes.column_slots * (columns + sizes.weights)
        assert 2 * (128 * D + sizes.keys * blocks) + 200 <= 232448
        assert sizes.keys == 64 or keep == 1


@pytest.mark.parametrize(
    "shape", [(64, 1, 8), (64, 3, 272), (64, 3, 40), (512, 8, 64), (448, 4, 64)]
)
def test_sizes_that_do_not_fit(shape):
    assert hopper.sizes_of(0.3, 1.0, *shape) is None


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("mask", "dropout"), [("none", False), ("causal", False), ("causal segments", True)]
)
def test_it_lowers(mask, dropout, shape):
    """As far as a program for a GPU can be made where neither a GPU nor its plug-in is."""
    D, heads, width = shape
    sizes = hopper.sizes_of(0.3, 0.9 if dropout else 1.0, D, heads, width)
    shapes = (D, D, sizes.chunks * sizes.heads * width, sizes.chunks * sizes.weights)
    given = [
        jax.ShapeDtypeStruct((N, T if i == 0 else S, n), jnp.bfloat16) for i, n in enumerate(shapes)
    ]
    given.append(jax.ShapeDtypeStruct((N, shapes[2]), jnp.float32))
    run = jax.jit(lambda *a: hopper.forward(sizes, *a))
    traced = run.trace(*given, visible_of(mask, dropout)[0])
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
