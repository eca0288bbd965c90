"""The engine `splash`, interpreted; test_tpu.py compiles it for chips that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BATTERY, B, T, mask_for, normal, on_mesh, parts
from test_kinds import check

from mhe_jax.attention import Mask, engines
from mhe_jax.attention.engines import Options, splash, xla
from mhe_jax.attention.engines.blocks import BIAS_PARTS, with_bias_columns

# Heads that share keys, a key bias, one key head and narrower values.
CASES = [c for c in BATTERY if c.kind in ("collaborative", "mla") or c.kv_heads == 2]
CASES = [c for c in CASES if c.kind != "gta" and c.form != "materialized"]
SMALL = (128, 256, 128)


@pytest.fixture
def interpreted(monkeypatch):
    """The engine as a TPU takes it, with exact products."""
    monkeypatch.setattr(splash, "platform", lambda: "tpu")
    monkeypatch.setattr(splash, "attend", functools.partial(splash.attend, interpret=True))
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.usefixtures("interpreted")
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["segments", "an example empty"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kind_and_mask(case, name):
    """Output and gradients against the float64 reference."""
    mask, dense = mask_for(case, name, T, T)
    check(case, mask, dense, normal(1, B, T, case.width), engine="splash")


def call(T, S, dtype=jnp.float32, H=4, K=2, D=8, E=6):
    q, k, v = normal(1, B, T, H, D), normal(2, B, S, K, D), normal(3, B, S, K, E)
    query, key, value = (jnp.asarray(x, dtype) for x in (q, k, v))
    return query, key, value


def close(mask, bias, *qkv, tolerance=1e-5, blocks=SMALL):
    """Output, weight sum and gradients are those of the engine `xla` in float32."""

    def ours(q, k, v, bias):
        return splash.attend(
            q, k, v, bias, mask, Options(), scale=0.4, blocks=blocks, interpret=True
        )

    def plain(q, k, v, bias):
        return xla.attend(q, k, v, bias, mask, Options(float32_softmax=True), scale=0.4)

    @functools.partial(jax.jit, static_argnums=0)
    def computed(attend, cotangent, *given):
        (output, total), pull = jax.vjp(attend, *given)
        return output, total, pull((cotangent.astype(given[0].dtype), jnp.zeros_like(total)))

    query, _, value = qkv
    cotangent = normal(6, *query.shape[:3], value.shape[-1])
    wide = [x.astype(jnp.float32) for x in qkv]
    with jax.default_matmul_precision("highest"):
        output, total, got = computed(ours, cotangent, *qkv, bias)
        wanted, wanted_total, exact = computed(plain, cotangent, *wide, bias)
    np.testing.assert_array_equal(total.astype(jnp.float32), wanted_total)
    np.testing.assert_allclose(output.astype(jnp.float32), wanted, atol=tolerance)
    assert output.dtype == query.dtype
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        a = a.astype(jnp.float32)
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()))
    return output


# Ids at the end of their range: the hidden keys have one of their own.
LOWEST = jnp.full((1, 1), -(2**31) + 1)
LOWEST = {"lowest id": Mask.segments(LOWEST, LOWEST) & Mask.lengths(200)}


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((150, 300), "length of all"),
        ((1, 128), "nothing of one"),
        ((256, 256), "window & causal"),
        ((256, 256), "lowest id"),
        ((150, 300), "one mark of queries"),
        ((300, 150), "segments of all"),
        ((200, 150), "causal"),  # queries see none of the keys that fill the last block up
    ],
    ids=str,
)
def test_masks_and_lengths(name, sizes):
    """Over blocks that the lengths do not fill."""
    close((parts(*sizes) | LOWEST)[name], None, *call(*sizes))


def test_a_key_bias():
    """One for each head, held to float32's precision in columns of bfloat16."""
    H, K = 6, 2
    bias = 30 * jnp.asarray(normal(4, B, 140, H))
    q, k, v = call(130, 140, H=H, K=K)
    close(Mask.causal(), bias, 0.1 * q, 0.1 * k, v)
    columns = with_bias_columns(q, k, v, bias)[1][..., -BIAS_PARTS:]
    assert (columns.astype(jnp.bfloat16) == columns).all()
    np.testing.assert_allclose(columns.sum(-1), bias, rtol=2**-22)


def test_bfloat16():
    close(parts(150, 300)["window & causal"], None, *call(150, 300, jnp.bfloat16), tolerance=0.03)


@pytest.mark.parametrize("sizes", [(0, 5), (4, 0)], ids=str)
def test_calls_of_nothing(sizes):
    output, total = splash.attend(*call(*sizes), None, Mask(), Options(), scale=0.4, interpret=True)
    assert output.shape == (B, sizes[0], 4, 6)
    assert not output.any()
    assert not (total * jnp.ones((B, sizes[0], 4, 1))).any() or not sizes[0]


def test_on_a_mesh(monkeypatch):
    """Examples over `data`, heads over `tensor`: results are those of one device."""
    H, K = 8, 2
    q, k, v = (x.repeat(2, 0) for x in call(130, 130, H=H, K=K))
    bias = jnp.asarray(normal(4, 4, 130, H))
    valid = jnp.asarray(np.random.default_rng(5).random((4, 130)) < 0.8).at[:, 0].set(True)
    mask = Mask.causal() & Mask.padding(valid)
    local = []
    plain = splash._kernel

    def spied(mask, heads, *args):
        local.append(heads)
        return plain(mask, heads, *args)

    monkeypatch.setattr(splash, "_kernel", spied)

    def run(q, k, v, bias):
        return splash.attend(
            q, k, v, bias, mask, Options(), scale=0.4, blocks=SMALL, interpret=True
        )[0]

    cotangent = jnp.asarray(normal(6, 4, 130, H, 6))

    def both(*args):
        output, pull = jax.vjp(run, *args)
        return output, *pull(cotangent)

    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(both)(q, k, v, bias)
        jax.clear_caches()
        with on_mesh(2, 4):
            got = jax.jit(both)(q, k, v, bias)
    assert local == [H, H // 4]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.mark.usefixtures("interpreted")
def test_auto_takes_it_for_long_calls_only():
    """A step of decoding has few scores, and a block of the kernel is 128 queries."""
    names = []

    def run(*qkv, engine="auto"):
        names.append(engines.attend(*qkv, None, Mask(), Options(), engine)[2])

    for queries in (1, 127, 128):
        jax.eval_shape(run, *call(queries, 300))
    jax.eval_shape(functools.partial(run, engine="splash"), *call(1, 300))
    assert names == ["xla", "xla", "splash", "splash"]
