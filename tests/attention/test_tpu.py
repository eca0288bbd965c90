"""The kernels for a TPU: interpreted here, and compiled for chips that are not here."""

import functools
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_shared import of_saturated_rows

from mhe_jax.attention import Mask
from mhe_jax.attention.engines import Options, is_saved
from mhe_jax.attention.engines.blocks import parts
from mhe_jax.attention.engines.shared import kernels, tpu

B, T, S, D, E, R = 2, 5, 7, 11, 13, 3
NAMES = "output", "query", "key", "value", "key bias"


def inputs(groups=1, values=None, lengths=(T, S), spread=2.0, heads=R, dtype=jnp.float32, width=E):
    """query, key, value, key bias, and a cotangent of the output."""
    rng = np.random.default_rng(sum(lengths) + groups)
    H, (T, S) = groups * heads, lengths
    of_values = B, S, values or groups, width
    shapes = (B, T, groups, D), (B, S, groups, D), of_values, (B, T, H, width)
    query, key, value, cotangent = (rng.normal(size=shape) for shape in shapes)
    key_bias = rng.uniform(0, 1, (B, S, H))
    # Both ends of the range are there.
    key_bias[:, :1], key_bias[:, 1:2] = 1, 0
    arrays = (jnp.asarray(x, dtype) for x in (query, key, value))
    return *arrays, jnp.asarray(spread * key_bias, jnp.float32), jnp.asarray(cotangent, dtype)


def reference(query, key, value, key_bias, cotangent, mask):
    """Output and gradients in float64, one head at a time."""
    query, key, value, key_bias, cotangent = (
        np.asarray(x, np.float64) for x in (query, key, value, key_bias, cotangent)
    )
    G, K, H = query.shape[2], value.shape[2], key_bias.shape[2]
    allowed = mask.to_dense(query.shape[1], key.shape[1])
    allowed = np.ones((1, 1, 1, 1), bool) if allowed is None else np.asarray(allowed)
    scale = query.shape[3] ** -0.5
    output = np.zeros(cotangent.shape)
    dq, dk, dv, db = (np.zeros_like(x) for x in (query, key, value, key_bias))
    for h in range(H):
        g, v = h * G // H, h * K // H
        logits = np.einsum("btd,bsd->bts", query[:, :, g], key[:, :, g]) * scale
        logits = np.where(allowed[:, 0], logits + key_bias[:, None, :, h], -np.inf)
        highest = logits.max(-1, keepdims=True)
        p = np.exp(logits - np.where(np.isfinite(highest), highest, 0))
        total = p.sum(-1, keepdims=True)
        p /= np.where(total > 0, total, 1)
        output[:, :, h] = p @ value[:, :, v]
        do = cotangent[:, :, h]
        dp = do @ value[:, :, v].swapaxes(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True))
        dq[:, :, g] += scale * ds @ key[:, :, g]
        dk[:, :, g] += scale * ds.swapaxes(1, 2) @ query[:, :, g]
        dv[:, :, v] += p.swapaxes(1, 2) @ do
        db[:, :, h] += ds.sum(1)
    return output, dq, dk, dv, db


@functools.partial(jax.jit, static_argnames="blocks")
def run(query, key, value, key_bias, cotangent, mask, blocks=None):
    """Output and gradients by the interpreted kernels; the sum of the weights."""

    def attend(*args):
        return tpu.attend(*args, mask, Options(), scale=D**-0.5, blocks=blocks, interpret=True)

    with jax.default_matmul_precision("highest"):
        output, pull, kept = jax.vjp(attend, query, key, value, key_bias, has_aux=True)
        return (output, *pull(cotangent)), kept


def check(given, mask=None, blocks=None, tolerance=1e-5):
    mask = Mask() if mask is None else mask
    got, kept = run(*given, mask, blocks)
    for name, x, y in zip(NAMES, got, reference(*given, mask), strict=True):
        x = np.asarray(x, np.float64)
        # Gradients that cancel to 0 are as exact as what cancels.
        np.testing.assert_allclose(
            x, y, rtol=0, atol=tolerance * max(1, abs(y).max()), err_msg=name
        )
    return got, kept


def masks(queries, keys):
    """Each mask that the kernels take, and all together; some rows see no key."""
    rng = np.random.default_rng(3)
    valid = Mask.padding(jnp.asarray(rng.random((B, keys)) < 0.8))
    ids = (rng.integers(0, 2, (B, n)) for n in (queries, keys))
    segments = Mask.segments(*map(jnp.asarray, ids))
    one_for_all = Mask.segments(*(jnp.arange(n)[None] // 4 for n in (queries, keys)))
    return {
        "causal": Mask.causal(),
        "offset": Mask.causal(jnp.array([-2, 3])),
        "offset of all": Mask.causal(2) & valid,
        "window": Mask.local(5, 3),
        "window & causal": Mask.local(9, 2) & Mask.causal(),
        "window & offset": Mask.local(9, 2) & Mask.causal(jnp.array([-2, 3])),
        "window, offset": Mask.local(5, 1, jnp.array([4, -7])) & valid,
        "lengths": Mask.lengths(jnp.array([keys - 3, 1])),
        "lengths, of one nothing": Mask.lengths(jnp.array([0, 17])) & Mask.causal(),
        "length of all": Mask.lengths(5) & segments & Mask.local(30, 3),
        "valid": valid,
        "segments": segments,
        "segments of all": one_for_all & Mask.causal(),
        "everything": Mask.causal() & valid & segments,
        # One mark for the whole length.
        "valid [B, 1]": Mask.padding(jnp.array([[True], [False]])),
        "segments of queries [B, 1]": Mask.segments(jnp.ones((B, 1), int), segments.segment_ids[1]),
        "segments of keys [B, 1]": Mask.segments(segments.segment_ids[0], jnp.ones((B, 1), int)),
    }


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("own_values", [False, True])
def test_prime_sizes(groups, own_values):
    _, kept = check(inputs(groups, groups * R if own_values else None))
    assert kept.shape == (1, 1, 1, 1)
    assert kept == 1


@pytest.mark.parametrize("blocks", [(8, 16), (16, 8)])
@pytest.mark.parametrize("lengths", [(29, 43), (43, 29)])
def test_several_blocks(lengths, blocks):
    check(inputs(lengths=lengths), blocks=blocks)


@pytest.mark.parametrize("name", ["causal", "window, offset", "lengths", "valid"])
def test_forward_blocks_of_their_own(name):
    check(inputs(lengths=(29, 61)), masks(29, 61)[name], (8, 16, 32))


def test_saturated_queries_have_no_gradient():
    """But for sums of float32 that cancel: those of all heads and features at once."""
    attend = functools.partial(tpu.attend, interpret=True)
    mine, others = of_saturated_rows(attend, jnp.bfloat16, 3.0, 2)
    assert mine <= 16 * np.finfo(np.float32).eps * others


def test_calls_of_nothing():
    for lengths in ((0, S), (T, 0)):
        query, key, value, key_bias, cotangent = inputs(lengths=lengths, spread=0.0)
        attend = functools.partial(
            tpu.attend, mask=Mask(), options=Options(), scale=0.5, interpret=True
        )
        (output, _), pull = jax.vjp(attend, query, key, value, key_bias)
        np.testing.assert_array_equal(output, np.zeros(cotangent.shape))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", masks(T, S))
@pytest.mark.parametrize("blocks", [None, (8, 16)])
def test_masks(name, blocks):
    queries, keys = (T, S) if blocks is None else (29, 43)
    mask = masks(queries, keys)[name]
    _, kept = check(inputs(2, lengths=(queries, keys)), mask, blocks)
    np.testing.assert_array_equal(kept, mask.row_has_key(queries, keys, jnp.float32))


def test_more_keys_than_causal_queries():
    check(inputs(lengths=(9, 43)), Mask.causal(), (8, 8))
    check(inputs(lengths=(43, 9)), Mask.causal(), (16, 8))


def test_gradients_of_many_queries(monkeypatch):
    """Those of queries that do not stay on the chip together go one part after the other."""
    monkeypatch.setattr(kernels, "QUERIES_BYTES", 16 * 4 * tpu.LANES)
    jax.clear_caches()
    for mask in (Mask.causal(), masks(45, 43)["everything"], masks(45, 43)["offset"]):
        check(inputs(lengths=(45, 43)), mask, (8, 16))


def test_rows_without_a_key():
    """The output is 0, and no gradient is touched by it."""
    valid = jnp.ones((B, 43), bool).at[:, :20].set(False).at[1].set(False)
    mask = Mask.causal() & Mask.padding(valid)
    got, _ = check(inputs(lengths=(29, 43)), mask, (8, 16))
    assert not got[0][:, :20].any()
    assert not got[0][1].any()
    assert all(np.isfinite(x).all() for x in got)


def test_a_single_key():
    """The output is its value."""
    given = inputs(lengths=(T, 1))
    (output, *_), _ = run(*given, Mask())
    np.testing.assert_allclose(output, np.broadcast_to(given[2], output.shape), rtol=1e-6)


def test_equal_scores():
    """The output is the mean of the values."""
    query, key, value, key_bias, cotangent = inputs(lengths=(T, 43))
    given = query, jnp.ones_like(key), value, jnp.zeros_like(key_bias), cotangent
    check(given, blocks=(8, 16))
    (output, *_), _ = run(*given, Mask(), (8, 16))
    mean = np.broadcast_to(value.mean(1, keepdims=True), output.shape)
    np.testing.assert_allclose(output, mean, atol=1e-6)


@pytest.mark.parametrize("order", [1, -1])
def test_scores_far_apart(order):
    """Where the maximum moves with each block of keys, up or down, by more than float32 holds."""
    query, key, *rest = inputs(lengths=(29, 43))
    query = query.at[..., 0].set(40.0)
    key = key.at[..., 0].set(order * jnp.arange(43.0)[:, None])
    # A score of 500 has a rounding error of 3e-5.
    check((query, key, *rest), blocks=(8, 8), tolerance=3e-4)


@pytest.mark.parametrize("spread", [0, 10, 57, 1e3])
def test_spread_of_the_key_bias(spread, monkeypatch):
    """Beyond the bound the call goes head by head, forward and backward."""
    went = []
    for name in ("forward", "gradient"):
        plain = getattr(tpu.head_by_head, name)

        def spied(*args, name=name, plain=plain):
            jax.debug.callback(lambda: went.append(name))
            return plain(*args)

        monkeypatch.setattr(tpu.head_by_head, name, spied)
    jax.clear_caches()
    tolerance = 1e-4 if spread > 60 else 1e-5  # the rounding error of a logit of 1000 is 6e-5
    check(inputs(spread=spread, lengths=(29, 43)), blocks=(8, 16), tolerance=tolerance)
    jax.effects_barrier()
    assert set(went) == ({"forward", "gradient"} if spread > 60 else set())


@pytest.mark.parametrize("name", ["causal", "lengths"])
@pytest.mark.parametrize("width", [E, tpu.LANES])
def test_groups_of_heads(width, name, monkeypatch):
    """Heads that do not fit into one group go in several, the last one filled up.

    Those as wide as a tile are laid side by side in another way.
    """
    monkeypatch.setattr(tpu, "GROUP_WIDTH", 2 * width)
    given = inputs(2, 10, lengths=(9, 19), heads=5, width=width)
    jax.clear_caches()
    check(given, masks(9, 19)[name], (8, 16))


def test_blocks_are_wide_where_all_keys_are_seen():
    """And no dropout is drawn; those of the forward kernel the most, as far as memory goes."""

    def keys(mask=None, keep=1.0, length=2048, width=64, dtype=jnp.bfloat16):
        value = jax.ShapeDtypeStruct((1, length, 1, width), dtype)
        static, mask = tpu.Static(1.0, keep, None), mask or Mask()
        sizes = tpu._sizes(static, length, length, width, 12, value, mask, None, False)
        return sizes.block_keys, sizes.forward_keys

    plain = keys(keep=0.9)
    assert plain == keys(Mask.causal()) == keys(Mask.local(5, 5)) == (tpu.BLOCK, tpu.BLOCK)
    assert keys() == (tpu.WIDE_BLOCK, 2048)
    assert keys(length=3072) == (tpu.WIDE_BLOCK, 1024)
    assert keys(width=128)[0] < keys(width=128)[1]
    assert keys(dtype=jnp.float32)[1] == 1024
    assert keys(length=2560) == (tpu.BLOCK, tpu.BLOCK)


def test_a_scanned_layer_saves_what_the_kernel_gives():
    """The backward pass runs one kernel, and not that of the forward pass again."""
    query, _, _, key_bias, _ = inputs(lengths=(T, T))

    def layer(x, _):
        output, _ = tpu.attend(x, x, x, key_bias, Mask(), Options(), scale=0.4)
        return output[:, :, :1], None

    def kernels(policy):
        scanned = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        run = jax.jit(jax.grad(lambda x: jax.lax.scan(scanned, x, None, length=3)[0].sum()))
        traced = run.trace(query)
        return traced.lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call")

    assert (kernels(is_saved), kernels(None)) == (2, 3)


RATE = 0.3
DROPOUT = Options(dropout_rate=RATE, dropout_rng=jax.random.key(5))


def weights_of(queries, keys, blocks, options=DROPOUT, examples=B, spread=0.0):
    """A call whose values are the identity, so that its output is the weights: [B, T, H, S]."""
    query, key, _, key_bias, _ = inputs(lengths=(queries, keys), spread=spread)
    query, key, key_bias = (
        jnp.tile(x[:1], (examples, 1, 1, 1)[: x.ndim]) for x in (query, key, key_bias)
    )
    value = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (examples, keys, 1, keys))

    def attend(*args, options=options):
        return tpu.attend(*args, Mask(), options, scale=D**-0.5, blocks=blocks, interpret=True)

    return attend, (query, key, value, key_bias)


@pytest.mark.parametrize("broadcast", [True, "batch"])
def test_dropout_has_one_mask_in_both_passes(broadcast):
    """And for all heads: gradients are those of a softmax whose weights this mask takes out."""
    options = Options(RATE, jax.random.key(5), broadcast_dropout=broadcast)
    attend, (*given, key_bias) = weights_of(21, 43, (8, 16), options, spread=1.0)
    rng = np.random.default_rng(7)
    shapes = (*given[0].shape[:2], R, 43), (*given[0].shape[:2], R, 1)
    cotangents = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)

    def computed(attend):
        @jax.jit
        def run(*given):
            outputs, pull = jax.vjp(attend, *given)
            return outputs, pull(cotangents)

        with jax.default_matmul_precision("highest"):
            return jax.device_get(run(*given, key_bias))

    (weights, total), gradients = computed(attend)
    kept = weights > 0
    assert 0 < kept.mean() < 1
    assert (kept == kept[:, :, :1]).all()
    assert (kept[0] == kept[1]).all() == (broadcast == "batch")
    np.testing.assert_allclose(total[..., 0], weights.sum(-1), rtol=1e-5)

    def plain(q, k, v, b):
        scores = jnp.einsum("btgd,bsgd->bts", q, k)[:, :, None] * D**-0.5
        exact = jax.nn.softmax(scores + b.swapaxes(1, 2)[:, None])
        exact = exact * kept / (1 - RATE)
        return jnp.einsum("bths,bsge->bthe", exact, v), exact.sum(-1, keepdims=True)

    (wanted, _), wanted_gradients = computed(plain)
    np.testing.assert_allclose(weights, wanted, atol=1e-6)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def test_dropout_keeps_its_share():
    """Of 10⁶ weights, within four standard errors, as of pairs of queries or keys."""
    attend, given = weights_of(1000, 1000, None, examples=1)
    kept = np.asarray(jax.jit(lambda *args: attend(*args)[0])(*given))[0, :, 0] > 0
    keep = 1 - RATE
    for found, wanted in (
        (kept, keep),
        (kept[1:] & kept[:-1], keep**2),
        (kept[:, 1:] & kept[:, :-1], keep**2),
        # Queries and keys have words of their own.
        (kept & kept.T, keep**2),
        # What two rows and two columns share would show in a mask that only adds words up.
        (kept[1:, 1:] & kept[1:, :-1] & kept[:-1, 1:] & kept[:-1, :-1], keep**4),
    ):
        error = (wanted * (1 - wanted) / found.size) ** 0.5
        assert abs(found.mean() - wanted) < 4 * error * (1 if found is kept else 2)
    of_queries, of_keys = kept.mean(1), kept.mean(0)
    for share in (of_queries, of_keys):
        assert np.abs(share - keep).max() < 5 * (keep * RATE / 1000) ** 0.5


def test_dropout_does_not_depend_on_blocks_or_devices():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices, see tests/conftest.py")

    def run(blocks):
        attend, given = weights_of(45, 43, blocks, examples=4)
        return jax.jit(lambda *args: attend(*args)[0] > 0)(*given)

    wanted = run((8, 16))
    assert len({np.asarray(x).tobytes() for x in wanted[:, :, 0]}) == 4
    for blocks in ((16, 8), (128, 128)):
        np.testing.assert_array_equal(run(blocks), wanted)
    for axes in ((4, 1), (1, 3), (2, 2)):
        devices = np.array(jax.devices()[: axes[0] * axes[1]]).reshape(axes)
        mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
        rules = [("batch", "data"), ("activation_heads", "tensor")]
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            np.testing.assert_array_equal(run((8, 16)), wanted)


def test_dropout_beyond_the_bound():
    """The way out draws a mask too, the same in both passes."""
    attend, given = weights_of(9, 11, (8, 16), spread=1e3)
    (weights, total), pull = jax.vjp(attend, *given)
    np.testing.assert_allclose(total[..., 0], weights.sum(-1), rtol=1e-5)
    *_, dv, _ = pull((jnp.ones_like(weights), jnp.zeros_like(total)))
    np.testing.assert_allclose(dv[:, :, 0, 0], weights.sum((1, 2)), atol=1e-4)


def test_bfloat16():
    given = inputs(2, lengths=(29, 43), dtype=jnp.bfloat16)
    (output, *gradients), _ = check(given, Mask.causal(), (16, 16), tolerance=0.02)
    assert output.dtype == jnp.bfloat16
    assert [x.dtype for x in gradients] == [x.dtype for x in given[:4]]


def test_denominators_are_wider_than_bfloat16():
    """With values of 1 the output is 1, to within the rounding of w."""
    query, key, value, key_bias, cotangent = inputs(dtype=jnp.bfloat16, lengths=(29, 43), spread=3)
    first, second = parts(key_bias, 2)
    assert (first == first.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert (first + second == key_bias).all()
    given = query, key, jnp.ones_like(value), key_bias, cotangent
    (output, *_), _ = run(*given, Mask(), (16, 16))
    np.testing.assert_allclose(output.astype(jnp.float32), 1, atol=2**-8)


def call(dtype=jnp.float32, width=D, mask=None, **options):
    query, key, value, key_bias, _ = inputs()
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    query, key = (jnp.zeros((*x.shape[:3], width), dtype) for x in (query, key))
    return query, key, value, key_bias, mask or Mask(), Options(**options)


REFUSALS = {
    "not float16": {"dtype": jnp.float16},
    "no wider than 1024, not 1031": {"width": 1031},
    "no precision setting": {"precision": "highest"},
    "not a dense array": {"mask": Mask.array(np.ones((T, S)))},
}


@pytest.mark.parametrize("phrase", REFUSALS)
def test_refusals(phrase, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert phrase in str(tpu.refusal(*call(**REFUSALS[phrase])))


def test_the_column_of_dropout_is_part_of_the_width(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    query, key, _, *rest, _ = call()
    value = jnp.zeros((B, S, 1, 1024), query.dtype)
    assert tpu.refusal(query, key, value, *rest, Options()) is None
    given = query, key, value, *rest, Options(dropout_rate=0.1)
    assert "no wider than 1024" in str(tpu.refusal(*given))


def test_refuses_float64_and_mixed_types(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    query, *rest = call()
    with jax.enable_x64(True):
        assert "float64" in str(tpu.refusal(query.astype(jnp.float64), *rest))
    assert "bfloat16, float32" in str(tpu.refusal(query.astype(jnp.bfloat16), *rest))


def test_takes_the_rest(monkeypatch):
    assert tpu.refusal(*call()) == f"needs a TPU, this is {jax.default_backend()}"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for mask in (Mask(), *masks(T, S).values()):
        for dtype in (jnp.bfloat16, jnp.float32):
            assert tpu.refusal(*call(dtype, mask=mask)) is None


def test_on_a_mesh():
    """Inside `shard_map`, examples and heads apart: results are those of one device."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices, see tests/conftest.py")
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    given, mask = inputs(heads=4), Mask.causal()
    rows, heads = P("data"), P("data", None, "tensor")
    specs = (rows, rows, rows, heads)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    def attend(*args):
        return tpu.attend(*args, mask, Options(), scale=D**-0.5, blocks=(8, 16), interpret=True)[0]

    with jax.default_matmul_precision("highest"):
        output, pull = jax.vjp(attend, *given[:4])
        got = output, *pull(given[4])
    for name, x, y in zip(NAMES, got, reference(*given, mask), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * abs(y).max(), err_msg=name)


AHEAD_OF_TIME = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from mhe_jax.attention import Mask
from mhe_jax.attention.engines import Options
from mhe_jax.attention.engines.shared import tpu

AXES = "data", "fsdp", "tensor"
name, where, dtype, T, H, D = *sys.argv[1:4], *map(int, sys.argv[4:])
topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
devices = np.array(topology.devices[: 8 if where == "mesh" else 1])
mesh = Mesh(devices.reshape((2, 2, 2) if where == "mesh" else (1, 1, 1)), AXES)
rows, heads = P(("data", "fsdp")), P(("data", "fsdp"), None, "tensor")
specs = rows, rows, rows, heads, rows, rows

def attend(query, key, value, key_bias, valid, segments):
    mask = Mask.causal() & Mask.padding(valid) & Mask.segments(segments)
    if where == "lengths":
        mask = Mask.local(150, 9) & Mask.lengths(segments[:, 0])
    if where == "whole":
        mask = Mask.padding(valid) & Mask.segments(segments)
    return tpu.attend(query, key, value, key_bias, mask, Options(), scale=0.1)[0]

if where == "mesh":
    attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)

def loss(*args):
    output = attend(*args)
    return (output.astype(jnp.float32) ** 2).sum(), output

shapes = *[(4, T, 1, D)] * 3, (4, T, H), (4, T), (4, T)
dtypes = *[jnp.dtype(dtype)] * 3, jnp.float32, jnp.bool_, jnp.int32
args = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    for shape, dtype, spec in zip(shapes, dtypes, specs)
]
gradient = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
compiled = jax.jit(gradient).lower(*args).compile()
print("kernels", compiled.as_text().count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.parametrize(
    "command",
    [
        "v5e:2x2 one float32 1024 12 64",
        "v5e:2x4 mesh bfloat16 200 6 24",
        "v5p:2x2x1 one bfloat16 200 6 24",
        "v6e:2x2 one bfloat16 200 6 24",
        "v5e:2x2 lengths bfloat16 1024 12 64",
        "v5e:2x2 whole bfloat16 2048 12 64",
        "v5e:2x2 whole bfloat16 2048 8 128",
        "v6e:2x2 whole bfloat16 1024 6 128",
    ],
)
@pytest.mark.libtpu
def test_compiles_ahead_of_time(command):
    """The forward and the backward kernel compile for chips that are not here."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5e-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", AHEAD_OF_TIME, *command.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "kernels 2" in done.stdout, done.stdout + done.stderr[-3000:]
