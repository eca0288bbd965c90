"""The kernel for Hopper: emulated, interpreted and lowered; no GPU runs it."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import normal
from jax.experimental import pallas as pl
from test_shared import plain, reference, reference_gradients

from mhe_jax.attention import Mask, engines
from mhe_jax.attention.engines import Options
from mhe_jax.attention.engines.shared import mosaic, one_product

hopper = pytest.importorskip(
    "mhe_jax.attention.engines.shared.hopper",
    reason="this JAX has no Mosaic GPU",
    exc_type=ImportError,
)

# Whether this JAX has what the engine asks of it.
TRIED = jax.__version_info__[:2] < mosaic.UNTRIED_JAX
untried = pytest.mark.skipif(not TRIED, reason="the kernel is not for this JAX")

B, T, S, G, R, D, E = 2, 149, 293, 1, 3, 11, 13
MASKS = {
    "none": Mask(),
    "lengths": Mask.lengths(jnp.array([S - 9, 130])),
    "a row of no keys": Mask.lengths(jnp.array([0, 128])),
    "length of all": Mask.lengths(5),
}


def emulated(sizes, q, k, columns, weights, lengths):
    """`hopper.forward`, with its roundings and in its order, in plain JAX."""
    N, S, step = len(k), k.shape[1], hopper.BLOCK_KEYS
    m, unit = jnp.full((N, q.shape[1], 1), -jnp.inf), sizes.scale * math.log2(math.e)
    both = jnp.concatenate([columns, weights], -1)
    sums = jnp.zeros((N, q.shape[1], both.shape[2]))
    wide = {"preferred_element_type": jnp.float32}
    for start in range(0, S, step):
        keys = slice(start, start + step)
        s = jnp.einsum("ntd,nsd->nts", q, k[:, keys], **wide)
        seen = jnp.arange(start, start + step)[None, None] < lengths[:, None, None]
        s = jnp.where(seen, s, -jnp.inf) if sizes.masked else s
        higher = jnp.maximum(m, s.max(-1, keepdims=True))
        e = jnp.exp2((s - higher) * unit).astype(jnp.bfloat16)
        sums *= jnp.exp2((m - higher) * unit)
        sums += jnp.einsum("nts,nsx->ntx", e, both[:, keys], **wide)
        m = higher
    return jnp.split(sums, [columns.shape[2]], -1)


def arrays(heads, groups=G):
    H = groups * R
    q, k = normal(1, B, T, groups, D), normal(2, B, S, groups, D)
    v, b = normal(4, B, S, heads, E), normal(3, B, S, H)
    given = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    return *given, jnp.asarray(b, jnp.float32), jnp.asarray(normal(9, B, T, H, E), jnp.bfloat16)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (6, 2)])
def test_output_and_gradients(name, heads, groups, monkeypatch):
    """Errors against float64 are at most twice those of an ordinary softmax in bfloat16."""
    monkeypatch.setattr(hopper, "forward", emulated)
    monkeypatch.setattr(one_product, "takes", lambda static, q: True)
    *given, cotangent = arrays(heads, groups)
    mask = MASKS[name]
    allowed = mask.to_dense(T, S)
    allowed = np.ones((1, 1, 1, 1), bool) if allowed is None else np.asarray(allowed)

    def run(cotangent, *given):
        attend = functools.partial(mosaic.attend, mask=mask, options=Options(), scale=D**-0.5)
        output, pull = jax.vjp(lambda *a: attend(*a)[0], *given)
        return output, *pull(cotangent)

    exact = [np.float64(x) for x in given]
    wanted = (
        reference(*exact, allowed)[2],
        *reference_gradients(*exact, allowed, np.float64(cotangent)),
    )
    found = []
    for f, call in ((run, given), (plain, (*given, allowed))):
        # A CPU would leave roundings out, as no device with bfloat16 products does.
        compiled = jax.jit(f).lower(cotangent, *call)
        found.append(compiled.compile({"xla_allow_excess_precision": False})(cotangent, *call))
    for got, ordinary, want in zip(*found, wanted, strict=True):
        error, other = (np.sqrt(((np.float64(x) - want) ** 2).mean()) for x in (got, ordinary))
        assert error <= 2 * other, (error, other)
        assert np.isfinite(np.float64(got)).all()


class Accumulator:
    """Registers that products add up in."""

    def __init__(self, shape, dtype):
        self.value = jnp.zeros(shape, dtype)

    @classmethod
    def init(cls, value):
        made = cls((), value.dtype)
        made.value = value
        return made

    def __getitem__(self, index):
        return self.value


def interpretable(monkeypatch):
    """Stands in for what JAX's interpreter of Mosaic GPU has not: products and layouts."""

    def wgmma(accumulator, a, b):
        a, b = (x[...] if not isinstance(x, tuple) else x[0][...].T for x in (a, b))
        accumulator.value += jnp.dot(a, b, preferred_element_type=jnp.float32)

    def run_state(f):
        def run(accumulators):
            f(accumulators)
            return [each.value for each in accumulators]

        return run

    def patch(module, **others):
        own = {name: getattr(module, name) for name in dir(module)}
        return types.SimpleNamespace(**(own | others))

    gpu = patch(
        hopper.gpu,
        ACC=Accumulator,
        wgmma=wgmma,
        transpose_ref=lambda ref, axes: (ref,),
        layout_cast=lambda x, layout: x,
        broadcasted_iota=lambda *how, layout: jax.lax.broadcasted_iota(*how),
    )
    monkeypatch.setattr(hopper, "gpu", gpu)
    run_scoped = lambda f, accumulator: f(accumulator)  # noqa: E731
    monkeypatch.setattr(hopper, "pl", patch(pl, run_state=run_state, run_scoped=run_scoped))


@untried
@pytest.mark.parametrize("masked", [False, True])
def test_interpreted(masked, monkeypatch):
    """Who waits for whom, and what is read where; three blocks of keys take each slot in turn."""
    params = pytest.importorskip(
        "jax._src.pallas.mosaic_gpu.interpret.params", reason="this JAX has no such interpreter"
    )
    interpretable(monkeypatch)
    N, queries, keys, V, W = 1 + masked, 128, 384, 64, 16
    sizes = hopper.Sizes(0.3, 2, V, W, masked)
    shapes = (N, queries, 64), (N, keys, 64), (N, keys, 2 * V), (N, keys, 2 * W)
    # Quarters, whose products are exact: weights that differ in a bit round to others.
    quarters = [np.rint(4 * normal(i, *shape)) / 4 for i, shape in enumerate(shapes)]
    given = [jnp.asarray(x, jnp.bfloat16) for x in quarters]
    given.append(jnp.array([300, 1] if masked else [keys], jnp.int32))
    found = hopper.forward(sizes, *given, interpret=params.InterpretGPUParams(detect_races=True))
    for got, want in zip(found, emulated(sizes, *given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@untried
@pytest.mark.parametrize("name", ["none", "lengths"])
def test_it_lowers(name):
    """As far as a program for a GPU can be made where neither a GPU nor its plug-in is."""
    *given, cotangent = arrays(1)

    def run(*given):
        attend = functools.partial(mosaic.attend, mask=MASKS[name], options=Options(), scale=0.3)
        return jax.vjp(lambda *a: attend(*a)[0], *given)[1](cotangent)

    text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(mosaic, "platform", lambda: "gpu")
    monkeypatch.setattr(mosaic, "gpu_capability", lambda: 9.0)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


def refusal(mask=None, options=None, dtype=jnp.bfloat16, width=D):
    *given, b, _ = arrays(1)
    q, k, v = (x.astype(dtype) for x in given)
    q, k = (jnp.zeros((*x.shape[:3], width), dtype) for x in (q, k))
    return mosaic.refusal(q, k, v, b, mask or Mask(), options or Options())


def test_device():
    assert refusal() == "needs an NVIDIA GPU, this is cpu"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("mask", [Mask(), Mask.lengths(3), Mask.lengths(jnp.array([3, 0]))])
@pytest.mark.parametrize("width", [1, 64, 128])
def test_calls_it_takes(mask, width):
    assert refusal(mask, width=width) is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"dtype": jnp.float32}, "needs bfloat16, not float32"),
        ({"width": 129}, "needs queries no wider than 128, not 129"),
        ({"options": Options(dropout_rate=0.1)}, "draws no dropout mask"),
        ({"options": Options(precision="highest")}, "has no precision setting"),
        ({"mask": Mask.causal()}, "takes no mask but lengths of keys"),
        ({"mask": Mask.local(3)}, "takes no mask but lengths of keys"),
        ({"mask": Mask.lengths(3) & Mask.causal()}, "takes no mask but lengths of keys"),
        ({"mask": Mask.padding(jnp.ones((B, S), bool))}, "takes no mask but lengths of keys"),
        ({"mask": Mask.segments(jnp.ones((B, S)))}, "takes no mask but lengths of keys"),
        ({"mask": Mask.array(jnp.ones((1, 1, 1, S)))}, "takes no mask but lengths of keys"),
    ],
)
def test_calls_it_refuses(call, reason):
    assert refusal(**call).startswith(reason)


@pytest.mark.usefixtures("gpu")
def test_machines_it_refuses(monkeypatch):
    for capability in (8.0, 10.0):
        monkeypatch.setattr(mosaic, "gpu_capability", lambda c=capability: c)
        assert refusal() == f"needs a GPU of compute capability 9.0 (Hopper), not {capability}"
    monkeypatch.setattr(mosaic, "gpu_capability", lambda: None)
    assert refusal() is None
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert refusal().startswith("needs jax before 0.12, not ")


@pytest.mark.usefixtures("gpu")
def test_it_is_taken_where_it_is_asked_for_alone(monkeypatch):
    monkeypatch.setattr(hopper, "forward", emulated)
    *given, _ = arrays(1)
    assert engines.attend_shared(*given, Mask(), Options())[2] == "xla"
    assert engines.attend_shared(*given, Mask(), Options(), "mosaic")[2] == "mosaic"


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("heads", "features"), [(12, 64), (8, 128), (3, 13), (48, 16), (64, 4)])
def test_chunks(heads, features, width):
    """All columns have a place, and a program what it has room for."""
    X, Y = heads * features, one_product.OF_WEIGHTS * heads
    chunks, V, W = mosaic._chunks(X, Y, width)
    assert chunks * V >= X
    assert chunks * W >= Y
    assert V % 64 == W % 16 == 0
    shared = hopper.COMPUTING * hopper.QUERIES * width
    shared += hopper.SLOTS * hopper.BLOCK_KEYS * (width + V + W)
    assert 2 * shared + 1024 <= 232448
    assert V <= 256
    assert V + W <= 272
