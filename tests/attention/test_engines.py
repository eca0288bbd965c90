"""The ladder of engines and its support table, row by row; `cudnn` without a GPU."""

import dataclasses
import functools
import logging
import types
from typing import get_args

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import B, every_kind, normal, on_mesh, parts, random_parameters

from mhe_jax.attention import Mask, choices, engines, make_attention
from mhe_jax.attention.engines import Options, cudnn, xla
from mhe_jax.attention.engines.shared import mosaic
from mhe_jax.config import FORMS_OF_KINDS
from mhe_jax.config.values import Engine

PARTS = parts(8, 8).values()
ENGINES = engines.LADDER | engines.SHARED | {"xla": xla}
PLATFORMS = {"cudnn": "gpu", "mosaic": "gpu", "splash": "tpu", "pallas": "tpu", "blocked": "cpu"}


@pytest.fixture
def device(monkeypatch):
    """Sets the platform, and for a GPU its compute capability."""

    def set_to(platform, capability=9.0):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(cudnn, "missing", lambda *a: None)
        for engine in (cudnn, mosaic):
            monkeypatch.setattr(engine, "gpu_capability", lambda: capability)

    return set_to


@pytest.fixture
def gpu(device):
    device("gpu")


def arrays(T=8, S=8, H=4, K=4, D=64, E=64, dtype=jnp.bfloat16):
    return tuple(jnp.zeros((B, *shape), dtype) for shape in ((T, H, D), (S, K, D), (S, K, E)))


def refusal(name="cudnn", *, mask=None, biased=False, key_dtype=None, options=None, **sizes):
    """Engines of shared scores get one group of heads."""
    shared = name in engines.SHARED and name != "xla"
    query, key, value = arrays(**sizes)
    bias = jnp.zeros((B, key.shape[1], query.shape[2])) if biased or shared else None
    if shared:
        query, key = query[:, :, :1], key[:, :, :1]
    key = key.astype(key_dtype or key.dtype)
    return ENGINES[name].refusal(query, key, value, bias, mask or Mask(), Options(**options or {}))


DENSE = Mask.array(jnp.ones((B, 4, 8, 8), bool))
DROPOUT, SOWING, PRECISION = {"dropout_rate": 0.1}, {"sow": print}, {"precision": "highest"}
OFFSET = jnp.zeros(B, int)
TAKEN = [
    ("cudnn", {"dtype": jnp.float16}),
    ("cudnn", {"D": 256, "E": 256}),
    ("cudnn", {"K": 2, "mask": Mask.causal(OFFSET)}),
    ("cudnn", {"mask": DENSE}),
    ("cudnn", {"biased": True, "D": 253, "K": 1}),  # a key bias is columns of the keys
    ("cudnn", {"T": 7, "S": 7, "mask": Mask.lengths(jnp.full(B, 5))}),
    ("splash", {"biased": True, "D": 1021, "K": 2}),
    ("splash", {"T": 8, "mask": Mask.local(0)}),
    *(("pallas", {"mask": m, "dtype": d}) for m in PARTS for d in (jnp.bfloat16, jnp.float32)),
    ("pallas", {"D": 1024, "E": 1023, "options": DROPOUT}),
    *(("mosaic", {"mask": mask, "options": o}) for mask in PARTS for o in ({}, DROPOUT)),
    *(("mosaic", {"D": width, "E": 16, "options": DROPOUT}) for width in (1, 128, 288)),
    ("blocked", {"options": DROPOUT | PRECISION}),
]
REFUSED = [
    ("cudnn", {"dtype": jnp.float32}, "float16 or bfloat16, not float32"),
    ("cudnn", {"D": 257, "E": 257}, "256 on this GPU, not 257 and 257"),
    ("cudnn", {"E": 264}, "256 on this GPU, not 64 and 264"),
    ("cudnn", {"biased": True, "D": 254}, "not 257 and 64"),
    ("cudnn", {"T": 7, "mask": Mask.causal(OFFSET)}, "even lengths"),
    ("cudnn", {"S": 7, "mask": Mask.causal(OFFSET)}, "even lengths"),
    ("splash", {"dtype": jnp.float16}, "not float16"),
    ("splash", {"D": 1022, "biased": True}, "no wider than 1024, not 1025 and 64"),
    ("splash", {"mask": Mask.local(1, 2, OFFSET)}, "without an offset"),
    ("splash", {"mask": Mask.causal(OFFSET)}, "without an offset"),
    ("splash", {"S": 5, "mask": Mask.local(2)}, "each query has a key in it"),
    ("pallas", {"dtype": jnp.float16}, "not float16"),
    ("pallas", {"key_dtype": "float32"}, "not bfloat16, float32"),
    ("pallas", {"D": 1031}, "no wider than 1024, not 1031"),
    ("pallas", {"E": 1024, "options": DROPOUT}, "not 64 and 1025"),
    ("mosaic", {"key_dtype": "float32"}, "bfloat16, not float32"),
    ("mosaic", {"E": 24}, "not values 24 and queries 64 wide"),
    ("mosaic", {"E": 272}, "not values 272 and queries 64 wide"),
    ("mosaic", {"D": 1024}, "not values 64 and queries 1024 wide"),
    *((name, {"options": DROPOUT}, "dropout") for name in ("cudnn", "splash")),
    *((name, {"options": SOWING}, "weights to sow") for name in ("cudnn", "splash", "blocked")),
    *((name, {"options": PRECISION}, "precision") for name in PLATFORMS if name != "blocked"),
    *((name, {"mask": DENSE}, "dense array") for name in ("splash", "pallas", "mosaic")),
]


def test_what_engines_take(device):
    """Docstring of `engines`, row by row."""
    for name, call in TAKEN:
        device(PLATFORMS[name])
        assert refusal(name, **call) is None, (name, call)


def test_what_engines_refuse(device):
    for name, call, reason in REFUSED:
        device(PLATFORMS[name])
        assert reason in str(refusal(name, **call)), (name, call)
    for name in PLATFORMS.keys() - {"blocked"}:
        device("cpu")
        assert "this is cpu" in refusal(name)
    for name, platform in (("pallas", "tpu"), ("mosaic", "gpu")):
        device(platform)
        with jax.enable_x64(True):
            assert "64" in refusal(name, dtype=jnp.float64)


def test_gpus_that_engines_refuse(device):
    for capability in (8.9, None):
        device("gpu", capability)
        assert refusal(D=128, E=128) is None
        assert "128 on this GPU, not 136 and 64" in refusal(D=136)
    assert refusal("mosaic") is None
    for capability in (8.0, 10.0):
        device("gpu", capability)
        assert f"9.0 (Hopper), not {capability}" in refusal("mosaic")


@pytest.mark.usefixtures("gpu")
def test_heads_that_a_mesh_splits(monkeypatch):
    monkeypatch.setattr(cudnn, "platform", lambda: "gpu")
    with on_mesh(1, 2):
        assert refusal() is None
        assert "not 4 query and 2 key heads" in refusal(K=2)
        assert "not 1 query and 1 key heads" in refusal(H=1, K=1)
        assert engines.attend(*arrays(K=2), None, Mask(), Options())[2] == "xla"
        with nn.logical_axis_rules([("batch", "data")]):
            assert refusal(K=2) is None


@pytest.mark.usefixtures("gpu")
def test_auto_takes_cudnn_first_and_xla_where_that_refuses(monkeypatch):
    taken = object(), object()
    monkeypatch.setattr(cudnn, "attend", lambda *a, scale: taken)
    assert engines.attend(*arrays(), None, Mask(), Options()) == (*taken, "cudnn")
    of_float32 = arrays(dtype=jnp.float32)
    assert engines.attend(*of_float32, None, Mask(), Options())[2] == "xla"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["mha", "mhe_add"])
def test_cudnn_decodes_one_token_over_an_odd_number_of_keys(kind, monkeypatch):
    """Its mask is lengths; that of two tokens is a bias, as is a window."""
    asked = []

    def stand_in(*call, scale):
        asked.append(call[4].key_lengths)
        return xla.attend(*call, scale=scale)

    monkeypatch.setattr(cudnn, "attend", stand_in)
    fields = {"num_heads": 3, "dtype": jnp.bfloat16, "decode": True}
    module, x = make_attention(kind, **fields), normal(1, B, 7, 24)
    params = {"params": random_parameters(module, x)}
    _, state = module.apply(params, x, mutable=["cache"])
    state["cache"]["cache_index"] = jnp.array([0, 4])
    asked.clear()  # of the call that makes the cache
    for mask, tokens, engine in ((None, 1, "cudnn"), (None, 2, "xla"), (Mask.local(2), 1, "xla")):
        with engines.recording():
            module.apply(params | state, x[:, :tokens], mask=mask, mutable=["cache"])
            assert choices()[kind].split()[-1] == engine
    np.testing.assert_array_equal(asked, [[1, 5]])


def test_what_cudnn_needs_beside_a_gpu(monkeypatch):
    assert "needs an NVIDIA GPU, this is cpu" in refusal()
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **how: q)
    device = types.SimpleNamespace(compute_capability="8.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda **how: [device])
    assert refusal() is None
    device.compute_capability = "7.5"
    assert refusal() == "needs a GPU of compute capability 8.0 or more, not 7.5"

    def absent(*args, **how):
        raise RuntimeError("cuDNN is not detected.")

    device.compute_capability = "9.0"
    monkeypatch.setattr(jax.nn, "dot_product_attention", absent)
    assert refusal() == "cannot run here: cuDNN is not detected."
    assert engines.attend(*arrays(), None, Mask(), Options())[2] == "xla"


MASKS = parts(8, 8) | {
    "lengths beyond the keys": Mask.lengths(jnp.array([-1, 11])),
    "lengths & causal": Mask.lengths(6) & Mask.causal() & Mask.local(3),
    "window beyond the lengths": Mask.lengths(2) & Mask.causal() & Mask.local(3),
    "an example empty": Mask.padding(jnp.ones((B, 8), bool).at[0].set(False)),
    "[B, 1, 1, S]": Mask.array(normal(3, B, 1, 1, 8) > -0.5),
    "[B, H, T, S]": Mask.array(normal(3, B, 4, 8, 8) > -0.5),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", MASKS)
def test_what_cudnn_is_asked_to_compute(monkeypatch, name, biased):
    """With jax's own kernel in cuDNN's place: xla's result, and a mask that cuDNN takes."""
    real = jax.nn.dot_product_attention

    def stand_in(q, k, v, *, mask, implementation, **how):
        assert implementation == "cudnn"
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 24
        lengths, window = how["key_value_seq_lengths"], how["local_window_size"]
        assert lengths is None or (lengths.shape, lengths.dtype) == ((B,), jnp.int32)
        assert lengths is None or ((lengths >= 1) & (lengths <= k.shape[1])).all()
        assert window is None or (window[1] == 0 and how["is_causal"])
        assert mask is None or (mask.ndim, mask.dtype) == (4, bool)
        assert mask is None or mask.shape[2:] == (q.shape[1], k.shape[1])
        # Without a key its gradients are NaN, those of such a query and of the whole call.
        told = Mask.lengths(k.shape[1] if lengths is None else lengths)
        told &= Mask.causal() if how["is_causal"] else Mask()
        told &= Mask() if window is None else Mask.local(window[0])
        assert (
            (told.to_dense(q.shape[1], k.shape[1]) & (True if mask is None else mask)).any(-1).all()
        )
        return real(q, k, v, mask=mask, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    # The bias is columns of the keys, and all get one width.
    q, k = normal(1, B, 8, 4, 19), normal(2, B, 8, 2, 19)
    v = normal(4, B, 8, 2, 16)
    bias = normal(5, B, 8, 4) if biased else None
    output, kept = cudnn.attend(q, k, v, bias, MASKS[name], Options(), scale=0.3)
    wanted, wanted_kept = xla.attend(q, k, v, bias, MASKS[name], Options(), scale=0.3)
    np.testing.assert_allclose(output, wanted, atol=2e-6)
    one = (B, 8, 4, 1)
    np.testing.assert_array_equal(np.broadcast_to(kept, one), np.broadcast_to(wanted_kept, one))


def test_causal_is_cudnn_s_own_only_where_it_means_the_same(monkeypatch):
    asked = []

    def stand_in(q, k, v, *, mask, is_causal, local_window_size, **how):
        asked.append((is_causal, local_window_size, mask is None))
        return jnp.zeros_like(q)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    cases = [
        (Mask.causal(), 8, (True, None, True)),
        (Mask.causal(), 6, (False, None, False)),
        (Mask.local(3), 8, (True, (3, 0), True)),
        # Such a window may have none of the keys.
        (Mask.local(3) & Mask.lengths(5), 8, (True, None, False)),
    ]
    for mask, queries, _ in cases:
        cudnn.attend(*arrays(T=queries), None, mask, Options(), scale=1.0)
    assert asked == [wanted for *_, wanted in cases]


def test_a_scanned_layer_saves_what_cudnn_gives():
    """Under the name that jax has for it, or the backward pass would run its kernel again."""
    of_jax = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    (name,) = cudnn.SAVED
    named = [x for x in vars(of_jax).values() if getattr(x, "name", None) == name]
    assert named
    assert all(map(engines.is_saved, named))


def test_names_of_engines():
    """What a config may ask for is what there is, and `auto` tries only what there is."""
    assert set(get_args(Engine)) == {"auto", *engines.LADDER, *engines.SHARED}
    assert set(engines.AUTO) <= {*engines.LADDER, *engines.SHARED}
    assert "xla" in engines.AUTO


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", [name for name in engines.LADDER if name != "xla"])
def test_engines_compute_the_same(engine, dtype):
    """Output and gradients of each engine of the ladder are those of `xla` in float32."""
    mask = Mask.causal() & Mask.padding(jnp.arange(16)[None] < jnp.array([[16], [11]]))
    shapes = ((B, 16, 4, 8), (B, 16, 2, 8), (B, 16, 2, 8), (B, 16, 4))
    given = [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    reason = engines.LADDER[engine].refusal(*given, mask, Options())
    if reason is not None:
        pytest.skip(f"{engine} refuses the call: {reason}")

    @functools.partial(jax.jit, static_argnums=0)
    def computed(engine, cotangent, *given):
        def output(*given):
            return engines.attend(*given, mask, Options(float32_softmax=True), engine)[0]

        found, pull = jax.vjp(output, *given)
        return found, *pull(cotangent.astype(given[0].dtype))

    cotangent = normal(7, B, 16, 4, 8)
    found = computed(engine, cotangent, *given)
    wanted = computed("xla", cotangent, *jax.tree.map(np.float32, given))
    exact = dtype == "float32" and jax.default_backend() == "cpu"
    for a, b in zip(found, wanted, strict=True):
        b = np.asarray(b)
        tolerance = (2e-6 if exact else 0.1) * max(1.0, float(abs(b).max()))
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=tolerance)


@every_kind
def test_choices_tell_what_ran(case, caplog):
    x = normal(1, B, 4, case.width)
    module = case.module()
    params = {"params": random_parameters(module, x)}
    engines.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "mhe_jax.attention"), engines.recording():
        for _ in range(2):  # traced anew each time
            jax.eval_shape(lambda params, x: module.apply(params, x), params, x)
        made = choices()
    form = case.form or FORMS_OF_KINDS.get(case.kind, [""])[-1]
    wanted = f"{form} on xla" if form else "xla"
    if jax.default_backend() == "cpu":
        assert made == {case.kind: wanted}
        assert [r.getMessage() for r in caplog.records] == [f"{case.kind} runs as {wanted}"]


def test_choices_are_those_of_their_recording():
    """Each once, in the order they were made; what was made elsewhere is not there."""
    engines.record_choice("mha", "xla")
    with engines.recording() as outer:
        with engines.recording() as made:
            for choice in ("shared on xla", "folded on xla", "shared on xla"):
                engines.record_choice("mhe_add", choice)
            assert choices() == {"mhe_add": "shared on xla, folded on xla"}
        engines.record_choice("mha", "xla")
    assert (outer, choices()) == ({"mha": ["xla"]}, {})
    assert made == {"mhe_add": ["shared on xla", "folded on xla"]}


DROPPED = Options(dropout_rate=0.4, dropout_rng=jax.random.key(3), broadcast_dropout=False)
OF_ONE = {
    "plain": (Mask(), Options()),
    "lengths": (Mask.lengths(jnp.array([3, 7])), Options()),
    "an example empty": (Mask.lengths(jnp.array([0, 7])), Options(float32_softmax=True)),
    "dense": (Mask.array(normal(6, B, 6, 1, 7) > -0.5), Options(precision="highest")),
    "dropout": (Mask.local(3, 0, jnp.array([2, 6])), DROPPED),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", OF_ONE)
def test_one_query_in_the_order_of_the_cache(name, biased, monkeypatch):
    """On a GPU, of heads that share several keys: outputs, gradients and what is sown are those of
    the products, which there are none of."""
    mask, options = OF_ONE[name]
    shapes = (B, 1, 6, 11), (B, 7, 2, 11), (B, 7, 2, 13), (B, 7, 6)
    given = [normal(i, *shape) for i, shape in enumerate(shapes[: 3 + biased])]
    found, sown = [], []

    def run(options, query, key, value, bias=None):
        return xla.attend(query, key, value, bias, mask, options, scale=0.3)

    for where in ("cpu", "gpu"):
        monkeypatch.setattr(xla, "platform", lambda where=where: where)
        output, weight_sum = run(dataclasses.replace(options, sow=sown.append), *given)
        plain = functools.partial(run, options)
        _, pull, _ = jax.vjp(plain, *given, has_aux=True)
        gradients = pull(jnp.asarray(normal(9, B, 1, 6, 13)))
        weight_sum = jnp.broadcast_to(weight_sum, (B, 1, 6, 1))
        found.append((output, gradients, weight_sum, sown.pop()))
        assert ("dot_general" in str(jax.make_jaxpr(plain)(*given))) == (where == "cpu")
    chex.assert_trees_all_close(*found, atol=2e-6)


@pytest.mark.parametrize(("K", "rows"), [(1, B), (6, B), (2, 1)])
def test_one_query_of_other_heads_is_a_product_on_a_gpu_too(K, rows, monkeypatch):
    """One key head for all, one for each, or one example: XLA copies no cache for it."""
    monkeypatch.setattr(xla, "platform", lambda: "gpu")
    q, k = normal(1, rows, 1, 6, 11), normal(2, rows, 7, K, 11)
    call = functools.partial(xla.attend, mask=Mask(), options=Options(), scale=1.0)
    assert "dot_general" in str(jax.make_jaxpr(call)(q, k, k, None))


def test_products_of_one_query_are_not_rounded(monkeypatch):
    """(1 + 2⁻⁷)² - (1 + 2⁻⁶) is 2⁻¹⁴, and 0 where bfloat16 holds the square."""
    monkeypatch.setattr(xla, "platform", lambda: "gpu")
    one = jnp.array([1 + 2**-7, 1.0]), jnp.array([[1 + 2**-7, -1 - 2**-6], [0.0, 0.0]])
    q, k = (jnp.asarray(x, jnp.bfloat16) for x in one)
    q, k = jnp.broadcast_to(q, (B, 1, 4, 2)), jnp.broadcast_to(k[:, None], (B, 2, 2, 2))
    v = jnp.broadcast_to(jnp.eye(2, dtype=q.dtype)[:, None], (B, 2, 2, 2))
    output, _ = xla.attend(q, k, v, None, Mask(), Options(), scale=2.0**14)
    wanted = np.broadcast_to(jax.nn.softmax(jnp.array([1.0, 0.0])), (B, 1, 4, 2))
    np.testing.assert_allclose(output.astype(np.float32), wanted, rtol=2**-7)
