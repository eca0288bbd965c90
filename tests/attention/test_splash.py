"""The engine `splash`: interpreted here, and compiled for chips that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BATTERY, B, T, mask_for, normal, on_mesh, run_for_tpus
from test_kinds import check

from mhe_jax.attention import Mask, engines
from mhe_jax.attention.engines import Options, is_saved, splash, xla
from mhe_jax.attention.engines.blocks import BIAS_PARTS, with_bias_columns

# Those of the ladder for heads with scores and keys of their own.
CASES = [c for c in BATTERY if c.form not in engines.OF_FORMS]
# Heads that share keys, a key bias, one key head and narrower values.
CASES = [c for c in CASES if c.kind in ("gqa", "collaborative", "mla") and c.kv_heads != 1]
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


def parts(T, S):
    """Masks in parts; the last leaves a query, and a whole example, without a key."""
    rng = np.random.default_rng(3)
    valid = Mask.padding(jnp.asarray(rng.random((B, S)) < 0.8))
    ids = [jnp.asarray(np.sort(rng.integers(-1, 2, (B, n)), 1)) for n in (T, S)]
    none = jnp.ones((B, S), bool).at[0].set(False)
    few = Mask.segments(jnp.full((1, T), 5).at[:, 0].set(7), jnp.full((1, S), 5))
    return {
        "none": Mask(),
        "window": Mask.local(149, 30),
        "window & causal": Mask.local(200, 30) & Mask.causal() & valid,
        "lengths": Mask.lengths(jnp.array([S, S // 2 + 1])),
        "an example of no keys": Mask.lengths(jnp.array([0, S])) & Mask.causal(),
        "all": Mask.causal() & valid & Mask.segments(*ids),
        "empty rows": Mask.padding(none) & few,
        "one mark for all": Mask.padding(jnp.array([[True], [False]])),
        # Ids at the end of their range: the hidden keys have one of their own.
        "lowest id": Mask.segments(jnp.full((1, T), -(2**31) + 1), jnp.full((1, S), -(2**31) + 1)),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", parts(3, 3))
@pytest.mark.parametrize("sizes", [(150, 300), (300, 150), (1, 128), (256, 256)], ids=str)
def test_masks_and_lengths(name, sizes):
    """Over blocks that the lengths do not fill."""
    close(parts(*sizes)[name], None, *call(*sizes))


def test_causal_queries_beyond_the_keys():
    """They see none of the keys that fill the last block up."""
    close(Mask.causal(), None, *call(200, 150))


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
    close(parts(150, 300)["all"], None, *call(150, 300, jnp.bfloat16), tolerance=0.03)


def test_blocks_fit_the_length_and_the_width():
    assert splash._blocks(4096, 4096, 64) == (1024, 1024, 1024)
    sizes = [splash._blocks(4096, 4096, most) for most in splash.BLOCKS]
    assert sizes == list(splash.BLOCKS.values())
    assert [splash._blocks(4096, 4096, most + 1) for most in (128, 256, 512)] == sizes[1:]
    assert splash._blocks(5, 7, 64) == (128, 128, 128)
    for length in (1100, 640, 1700):
        queries, keys, step = splash._blocks(length, length, 64)
        assert queries <= 1024
        assert queries % 128 == keys % step == step % 128 == 0
        assert -length % queries < 128 * -(-length // queries)


@pytest.mark.parametrize(("D", "E"), [(8, 300), (300, 8)])
def test_blocks_are_those_of_the_widest_head(D, E, monkeypatch):
    """Of keys, with the columns of a bias, or of values: a chip has room for no larger ones."""
    plain, widths = splash._blocks, []

    def spied(T, S, width):
        widths.append(width)
        return plain(T, S, width)

    monkeypatch.setattr(splash, "_blocks", spied)
    for bias in (None, jnp.zeros((B, 7, 4))):
        attend = functools.partial(
            splash.attend, key_bias=bias, mask=Mask(), options=Options(), scale=0.4, interpret=True
        )
        jax.eval_shape(attend, *call(5, 7, D=D, E=E))
    assert widths == [300, 300 if E > D else 300 + BIAS_PARTS]


@pytest.mark.parametrize("sizes", [(0, 5), (4, 0)], ids=str)
def test_calls_of_nothing(sizes):
    output, total = splash.attend(*call(*sizes), None, Mask(), Options(), scale=0.4, interpret=True)
    assert output.shape == (B, sizes[0], 4, 6)
    assert not output.any()
    assert not (total * jnp.ones((B, sizes[0], 4, 1))).any() or not sizes[0]


def test_a_scanned_layer_saves_what_the_kernel_gives():
    """The backward pass runs one kernel, and not that of the forward pass again."""

    def layer(x, _):
        return splash.attend(x, x, x, None, Mask.causal(), Options(), scale=0.4)[0], None

    def kernels(policy):
        scanned = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        run = jax.jit(jax.grad(lambda x: jax.lax.scan(scanned, x, None, length=3)[0].sum()))
        traced = run.trace(jnp.ones((2, 128, 4, 8)))
        return traced.lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call")

    assert (kernels(is_saved), kernels(None)) == (2, 3)


@pytest.mark.parametrize(
    ("axes", "heads"),
    [((2, 2), (4, 4)), ((1, 4), (6, 2))],
    ids=str,
)
def test_on_a_mesh(axes, heads, monkeypatch):
    """Examples over `data`, heads over `tensor`: results are those of one device."""
    H, K = heads
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
        with on_mesh(*axes):
            got = jax.jit(both)(q, k, v, bias)
    assert local == [H, H // axes[1] if H % axes[1] == 0 else H]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))


REFUSALS = {
    "not float16": ({"dtype": jnp.float16}, {}, Mask()),
    "no wider than 1024, not 1025 and 6": ({"D": 1025}, {}, Mask()),
    "dropout is not 0": ({}, {"dropout_rate": 0.1}, Mask()),
    "no attention weights to sow": ({}, {"sow": print}, Mask()),
    "no precision setting": ({}, {"precision": "highest"}, Mask()),
    "not a dense array": ({}, {}, Mask.array(jnp.ones((5, 5)))),
    "a window without an offset": ({}, {}, Mask.local(1, 2, jnp.zeros(B, int))),
    "each query has a key in it": ({"T": 8}, {}, Mask.local(2)),
    "without an offset": ({}, {}, Mask.causal(jnp.zeros(B, int))),
}


def test_a_key_bias_counts_as_columns(monkeypatch):
    monkeypatch.setattr(splash, "platform", lambda: "tpu")
    for width, bias, refused in ((1022, True, True), (1021, True, False), (1022, False, False)):
        given = call(T=5, S=5, D=width)
        key_bias = jnp.zeros((*given[1].shape[:2], given[0].shape[2])) if bias else None
        reason = splash.refusal(*given, key_bias, Mask(), Options())
        assert (reason is not None) == refused
        assert reason is None or "not 1025 and 6" in reason


@pytest.mark.parametrize("phrase", REFUSALS)
def test_refusals(phrase, monkeypatch):
    fields, options, mask = REFUSALS[phrase]
    given = *call(**{"T": 5, "S": 5} | fields), None, mask, Options(**options)
    assert "this is cpu" in str(splash.refusal(*given))
    monkeypatch.setattr(splash, "platform", lambda: "tpu")
    assert phrase in str(splash.refusal(*given))


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


AHEAD_OF_TIME = """
import sys
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mhe_jax.attention import Mask
from mhe_jax.attention.engines import Options, splash

name, where, dtype, T, H, K, D, E = *sys.argv[1:4], *map(int, sys.argv[4:])
devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
shape = (2, 2) if where == "mesh" else (1, 1)
devices = np.array(devices[: np.prod(shape)]).reshape(shape)
mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
rules = [("batch", "data"), ("activation_heads", "tensor")]

def loss(query, key, value, key_bias, valid, segments):
    mask = Mask.causal() & Mask.padding(valid) & Mask.segments(segments)
    call = query, key, value, key_bias, mask, Options()
    assert splash.refusal(*call) is None, splash.refusal(*call)
    return (splash.attend(*call, scale=0.1)[0].astype(jnp.float32) ** 2).sum()

shapes = (4, T, H, D), (4, T, K, D), (4, T, K, E), (4, T, H), (4, T), (4, T)
dtypes = *[jnp.dtype(dtype)] * 3, jnp.float32, jnp.bool_, jnp.int32
rows = NamedSharding(mesh, P("data"))
args = [jax.ShapeDtypeStruct(s, d, sharding=rows) for s, d in zip(shapes, dtypes)]
with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*args).compile()
print("kernels", compiled.as_text().count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.parametrize(
    "command",
    [
        "v5e:2x2 one bfloat16 2048 12 12 64 64",
        "v5e:2x2 one float32 1024 4 1 256 256",
        "v5e:2x2 one bfloat16 700 2 2 1021 1024",
        "v5e:2x2 mesh bfloat16 200 6 2 24 40",
        "v5p:2x2x1 mesh bfloat16 1024 8 4 128 128",
        "v6e:2x2 one bfloat16 2048 2 2 400 512",
    ],
)
@pytest.mark.libtpu
def test_compiles_ahead_of_time(command):
    """The forward kernel and the one backward kernel, for chips that are not here."""
    done = run_for_tpus(AHEAD_OF_TIME, *command.split())
    assert "kernels 2" in done.stdout, done.stdout + done.stderr[-3000:]
