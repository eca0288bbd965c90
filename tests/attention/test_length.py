"""Rows split along their length over simulated devices: results are those of one."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, assert_close, normal
from jax.sharding import AxisType

from mhe_jax.attention import Mask, Rotary, engines
from mhe_jax.attention.engines import Options, blocked, blocks, cudnn, length, splash, xla
from mhe_jax.attention.engines.shared import tpu

RULES = (("batch", "data"), ("length", "tensor"), ("activation_heads", "tensor"))
B, L, H, D, E = 2, 64, 4, 8, 6
pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 8, reason="needs eight devices, see tests/conftest.py"
)


@functools.cache
def mesh(devices=4):
    return jax.make_mesh((2, devices), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


ENGINES = {
    "blocked": ("", blocked.attend),
    "splash": ("", functools.partial(splash.attend, blocks=(128, 128, 128), interpret=True)),
    "pallas": ("shared", functools.partial(tpu.attend, blocks=(8, 8), interpret=True)),
    "xla": ("shared", engines.SHARED["xla"].attend),
}
REST = pytest.mark.rest
SEGMENTS: Any = np.repeat([[1, 2, 3]] * B, [5, 40, 19], axis=1)
VALID: Any = np.arange(L) < [[50], [L]]
LENGTHS: Any = np.array([37, 64])
MASKS = {
    "none": Mask(),
    "causal": Mask.causal(),
    "window": Mask.causal() & Mask.local(9),
    "causal, padding": Mask.causal() & Mask.padding(VALID),
    "packed": Mask.causal() & Mask.segments(SEGMENTS),
    "lengths": Mask.lengths(LENGTHS),
}


def on_one_and_on_many(run, *arrays, alone=None, devices=4):
    """Output and gradients of `run`, without a mesh and on one; and the program for the mesh.

    `alone` is what runs without a mesh, if that is not `run`.
    """

    def computed(run, *arrays):
        output, pull = jax.vjp(run, *arrays)
        return output, pull(jnp.asarray(normal(9, *output.shape), output.dtype))

    wanted = jax.jit(lambda *arrays: computed(alone or run, *arrays))(*arrays)
    with jax.set_mesh(mesh(devices)), nn.logical_axis_rules(RULES):
        lowered = jax.jit(lambda *arrays: computed(run, *arrays)).lower(*arrays)
        got = lowered.compile()(*arrays)
    return got, wanted, lowered.as_text()


# Each engine by itself has what it skips; the rest is common.
CASES = [
    pytest.param(engine, name, marks=[] if engine == "blocked" or "causal," in name else REST)
    for engine in ENGINES
    for name in MASKS
]


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_split_is_whole(engine, name):
    check(engine, MASKS[name], Options())


@pytest.mark.parametrize("engine", ["blocked", "pallas", pytest.param("xla", marks=REST)])
def test_dropout_is_that_of_one_device(engine):
    check(engine, Mask.causal(), Options(dropout_rate=0.4, dropout_rng=jax.random.key(3)))


def check(engine, mask, options):
    form, attend = ENGINES[engine]
    shared = form == "shared"
    q, k = normal(1, B, L, 1 if shared else H, D), normal(2, B, L, 1 if shared else 2, D)
    v, b = normal(3, B, L, H if shared else 2, E), normal(4, B, L, H)

    def run(q, k, v, b, attend=attend):
        return attend(q, k, v, b, mask, options, scale=0.4)[0]

    how: dict[str, Any] = {"devices": 2 if engine == "xla" else 4}  # each has a program of its own
    if engine == "splash":
        how["alone"] = functools.partial(run, attend=xla.attend)
    with jax.default_matmul_precision("highest"):
        call = (*map(jnp.asarray, (q, k, v, b)),)
        got, wanted, text = on_one_and_on_many(run, *call, **how)
    assert_close(got, wanted, 1e-5)
    assert "all_gather" in text
    assert "collective_permute" in text


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_all_devices_have_as_many_scores_under_a_causal_mask(devices):
    parts = 2 * devices
    row = jnp.zeros((1, parts, 1, 1))
    programs = []

    def run(query, key, value, key_bias, seen):
        programs.append((query.shape[1], key.shape[1]))
        return query

    axes = jax.make_mesh((devices,), ("tensor",), axis_types=(AxisType.Auto,))
    split = length.part_by_part(run, "tensor", devices)
    spec = jax.sharding.PartitionSpec(None, "tensor")
    mapped: Any = jax.shard_map(
        split, mesh=axes, in_specs=(spec, spec, spec, None, None), out_specs=spec, check_vma=False
    )
    jax.eval_shape(mapped, row, row, row, None, blocks.Seen(Mask.causal()))
    # Two parts of one query each for every device.
    scores = [a * b + c * d for (a, b), (c, d) in zip(programs[::2], programs[1::2], strict=True)]
    assert scores == [parts + 1] * devices


def test_rows_that_do_not_divide_are_whole():
    q, k, v = (jnp.asarray(normal(i, B, L - 4, H, D)) for i in (1, 2, 3))

    def run(*arrays):
        return engines.attend(*arrays, None, Mask.causal(), Options(), "blocked")[0]

    got, wanted, text = on_one_and_on_many(run, q, k, v)
    assert_close(got, wanted)
    assert "all_gather" not in text


@pytest.mark.parametrize("engine", ["blocked", pytest.param("pallas", marks=REST)])
def test_two_axes_may_split_a_row(engine):
    axes = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    form, attend = ENGINES[engine]
    heads = 1 if form == "shared" else H
    q, k = (jnp.asarray(normal(i, 1, 16, heads, D)) for i in (1, 2))
    v, b = jnp.asarray(normal(3, 1, 16, H, E)), jnp.asarray(normal(4, 1, 16, H))

    def run(*arrays):
        return attend(*arrays, Mask.causal(), Options(), scale=0.4)[0]

    wanted = run(q, k, v, b)
    with jax.set_mesh(axes), nn.logical_axis_rules((("length", ("a", "b")),)):
        assert_close(jax.jit(run)(q, k, v, b), wanted, 1e-5)


def test_cudnn_says_why_not(monkeypatch):
    monkeypatch.setattr(cudnn, "platform", lambda: "gpu")
    q = jnp.zeros((B, L, H, 64), jnp.bfloat16)
    whole = pytest.raises(ValueError, match="cudnn: takes whole rows, and the mesh splits them")
    with jax.set_mesh(mesh()), nn.logical_axis_rules(RULES), whole:
        engines.attend(q, q, q, None, Mask.causal(), Options(), "cudnn")


@pytest.mark.parametrize("case", [Case("mva"), Case("gqa", kv_heads=2)], ids=str)
def test_a_whole_module_with_rotary_positions(case):
    module = case.module(num_heads=4, qkv_features=32, rotary=Rotary())
    x = jnp.asarray(normal(5, B, L, 32))
    params = jax.jit(module.init)(jax.random.key(0), x)

    def run(params, x):
        return module.apply(params, x, mask=Mask.causal())

    got, wanted, _ = on_one_and_on_many(run, nn.unbox(params), x, devices=2)
    assert_close(got, wanted, 1e-5)
