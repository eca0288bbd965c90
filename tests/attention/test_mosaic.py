"""The engine for Hopper with its kernels emulated in plain JAX; and lowered, as no GPU runs it.

The kernels themselves: test_hopper_forward.py and test_hopper_backward.py.
"""

import dataclasses
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import kept_by_words, normal, parts
from test_shared import plain, wanted_of

from mhe_jax.attention import Mask, engines
from mhe_jax.attention.engines import Options, blocks
from mhe_jax.attention.engines.shared import mosaic, tpu, xla

hopper_forward = pytest.importorskip(
    "mhe_jax.attention.engines.shared.hopper_forward",
    reason="this JAX has no Mosaic GPU",
    exc_type=ImportError,
)
from mhe_jax.attention.engines.shared import hopper_backward  # noqa: E402

B, T, S, R, D, E = 2, 149, 293, 3, 11, 16
RATE, KEY = 0.3, jax.random.key(7)
MASKS = parts(T, S)


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(hopper_forward, "forward", emulated.forward)
    monkeypatch.setattr(hopper_backward, "products", emulated.products)


def arrays(heads=1, groups=1, spread=1.0):
    H = groups * R
    q, k = normal(1, B, T, groups, D), normal(2, B, S, groups, D)
    v, b = normal(4, B, S, heads, E), spread * normal(3, B, S, H)
    given = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    return *given, jnp.asarray(b, jnp.float32), jnp.asarray(normal(9, B, T, H, E), jnp.bfloat16)


def run(attend, mask, options, cotangents, *given):
    """Output, and gradients, of an engine."""
    attend = functools.partial(attend, mask=mask, options=options, scale=D**-0.5)

    def both(cotangents, *given):
        found, pull = jax.vjp(lambda *a: attend(*a)[: len(cotangents)], *given)
        return *found, *pull(cotangents)

    return rounded(both, cotangents, *given)


def rounded(f, *given):
    """As on a device with bfloat16 products: a CPU would leave roundings out."""
    return jax.jit(f).lower(*given).compile({"xla_allow_excess_precision": False})(*given)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("engine", "name", "heads", "groups", "pairs", "rate"),
    [
        (mosaic, "none", 1, 1, mosaic.PAIRS, RATE),
        (mosaic, "nothing of one", 6, 2, mosaic.PAIRS, RATE),
        (mosaic, "window, offset", 1, 1, 1, RATE),
        (mosaic, "segments of all", 3, 1, mosaic.PAIRS, 0.0),
        (mosaic, "all of them", 6, 2, 1, 0.0),
        (xla, "causal", 1, 1, None, 0.0),
        (xla, "padding", 6, 2, None, RATE),
    ],
)
def test_output_and_gradients(engine, name, heads, groups, pairs, rate, monkeypatch):
    """Errors against float64 are at most twice those of an ordinary softmax in bfloat16."""
    monkeypatch.setattr(mosaic, "PAIRS", pairs)
    *given, cotangent = arrays(heads, groups)
    mask, options = MASKS[name], Options(rate, KEY)
    allowed = mask.to_dense(T, S)
    allowed = np.ones((1, 1, 1, 1), bool) if allowed is None else np.asarray(allowed)
    kept = kept_by_words(KEY, rate, B, T, S)[:, None] / (1 - rate) if rate else 1.0
    wanted = wanted_of(given, cotangent, mask, kept)
    ours = run(engine.attend, mask, options, (cotangent,), *given)
    usual = rounded(functools.partial(plain, kept=kept), cotangent, *given, allowed)
    for got, ordinary, want in zip(ours, usual, wanted, strict=True):
        error, other = (np.sqrt(((np.float64(x) - want) ** 2).mean()) for x in (got, ordinary))
        assert error <= 2 * other, (error, other)
        assert np.isfinite(np.float64(got)).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("spread", [1.0, 1e3])
def test_weights_that_dropout_leaves(spread):
    """Their sum, and what its gradient does; within the bound and beyond."""
    *given, cotangent = arrays(3, spread=spread)
    cotangents = cotangent, jnp.asarray(normal(8, B, T, R, 1), jnp.bfloat16)
    options, mask = Options(RATE, KEY, broadcast_dropout="batch"), MASKS["causal"]
    got = run(mosaic.attend, mask, options, cotangents, *given)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (cotangents, *given))
    wanted = run(xla.attend, mask, options, *wide)
    for x, want in zip(got, wanted, strict=True):
        error = np.sqrt(((np.float64(x) - np.float64(want)) ** 2).mean())
        assert error <= 0.005 * np.sqrt((np.float64(want) ** 2).mean())


@pytest.mark.usefixtures("kernels")
def test_gradients_of_queries_with_one_key():
    """Their weight does not depend on scores, nor does the weight that dropout leaves."""
    q, k, v, b, cotangent = arrays(3)
    given = q, k[:, :T], v[:, :T], b[:, :T]
    cotangents = cotangent, jnp.asarray(normal(8, B, T, R, 1), jnp.bfloat16)
    *_, dq, dk, _, db = run(mosaic.attend, Mask.local(0), Options(RATE, KEY), cotangents, *given)
    for x in (dq, dk, db):
        assert np.abs(np.float32(x)).max() < 1e-3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("broadcast", [True, "batch"])
def test_every_engine_draws_the_same_mask(broadcast):
    """Bit for bit: values are the identity, so that the output is the weights."""
    keys = 48
    q, k = normal(1, B, T, 1, D), normal(2, B, keys, 1, D)
    v = np.broadcast_to(np.eye(keys)[None, :, None], (B, keys, 1, keys))
    given = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    given.append(jnp.asarray(normal(3, B, keys, R), jnp.float32))
    options = Options(RATE, KEY, broadcast_dropout=broadcast)
    rows = 1 if broadcast == "batch" else B
    wanted = kept_by_words(KEY, RATE, rows, T, keys)[:, :, None]
    for attend in (mosaic.attend, xla.attend, functools.partial(tpu.attend, interpret=True)):
        attend = functools.partial(attend, mask=Mask(), options=options, scale=D**-0.5)
        weights, _ = jax.jit(attend)(*given)
        np.testing.assert_array_equal(weights > 0, np.broadcast_to(wanted, weights.shape))


@pytest.mark.parametrize("name", MASKS)
def test_what_kernels_skip(name):
    """No query sees keys outside of its ranges; bounds let through all of those within."""
    mask = MASKS[name]
    shown = mosaic.visible(blocks.Seen(mask), 1.0, (B, T, S), 256, 512)
    allowed = mask.to_dense(T, S)
    allowed = np.broadcast_to(True if allowed is None else allowed[:, 0], (B, T, S))
    bounded = dataclasses.replace(mask, key_valid=None, segment_ids=None)
    within = bounded.to_dense(T, S)
    within = np.broadcast_to(True if within is None else within[:, 0], (B, T, S))
    for n, group in np.ndindex(B, 2):
        first, end, of_all, of_all_end = np.asarray(shown.ranges[n, group])
        rows = slice(128 * group, 128 * group + 128)
        assert 0 <= first < end <= S
        assert not np.delete(allowed[n, rows], np.s_[first:end], 1).any()
        assert within[n, rows, of_all:of_all_end].all()
        # No more than there is; segments and positions together would need a look at all pairs.
        seen = np.flatnonzero(allowed[n, rows].any(0))
        if (mask.segment_ids is None or name in ("segments", "one mark of keys")) and seen.size:
            assert (first, end) == (seen[0], seen[-1] + 1)


@pytest.mark.usefixtures("kernels")
def test_it_is_taken_where_it_is_asked_for_alone(monkeypatch):
    monkeypatch.setattr(mosaic, "platform", lambda: "gpu")
    monkeypatch.setattr(mosaic, "gpu_capability", lambda: 9.0)
    *given, _ = arrays(1)
    assert engines.attend(*given, Mask(), Options(), form="shared")[2] == "xla"
    assert engines.attend(*given, Mask(), Options(), "mosaic", form="shared")[2] == "mosaic"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("rows", "queries", "keys"), [(B, 1, S), (0, T, S), (B, T, 0)])
def test_calls_without_work_for_a_kernel(rows, queries, keys):
    """One query, as in decoding, and no rows or keys: as `xla`."""
    q, k, v, b, _ = arrays(3)
    given = q[:rows, :queries], k[:rows, :keys], v[:rows, :keys], b[:rows, :keys]
    got, wanted = (e.attend(*given, Mask(), Options(), scale=0.3) for e in (mosaic, xla))
    for x, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(x, want)


def test_it_lowers():
    """As far as a program for a GPU can be made where neither a GPU nor its plug-in is."""
    *given, cotangent = arrays(1)

    def both(cotangent, *given):
        attend = functools.partial(
            mosaic.attend, mask=MASKS["all of them"], options=Options(RATE, KEY)
        )
        output, pull = jax.vjp(lambda *a: attend(*a, scale=0.3)[0], *given)
        return output, pull(cotangent)

    traced = jax.jit(both).trace(cotangent, *given)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
