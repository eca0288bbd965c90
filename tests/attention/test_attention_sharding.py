"""On a mesh of 2 x 2 x 2 simulated devices: parameters carry names, results are those of one."""

import contextlib
import functools

import flax.linen as nn
import jax
import kind_references
import numpy as np
import pytest
from attention_cases import CASES, Case, assert_close, normal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mhe_jax.attention import Mask, engines
from mhe_jax.attention.engines import blocked

RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("groups", None),
    ("activation_heads", "tensor"),
    ("head_features", None),
    ("length", None),
)
ROWS, LENGTH = 4, 5
pytestmark = pytest.mark.skipif(
    len(jax.devices()) < 8, reason="needs eight devices, see tests/conftest.py"
)
# Everything that a mesh axis splits is even.
SHARDED = [c for c in CASES if c.kv_heads in (None, 2)]
# One for each sort of projection, key head and engine.
FIRST = "mha", "skv", "el", "mhe_add-shared", "mhe_mul-folded", "mva-shared", "mla-absorbed"
FEW = [c if str(c) in FIRST else pytest.param(c, marks=pytest.mark.rest) for c in SHARDED]


def module_of(case):
    groups = {"num_groups": 2} if case.groups else {}
    scores = {"score_groups": 2} if case.score_groups else {}
    return case.module(num_heads=4, qkv_features=32, **groups, **scores)


@functools.cache
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_names_of_the_parameters(case):
    """Every parameter is boxed under logical axis rules, with a name for each axis; else none."""
    x = normal(1, ROWS, LENGTH, 32)

    def start():  # a new function each time: jax would give the first trace again
        return lambda: module_of(case).init(jax.random.key(0), x)

    with nn.logical_axis_rules(RULES):
        boxed = jax.eval_shape(start())
    plain = jax.eval_shape(start())
    leaves = jax.tree.leaves(boxed, is_leaf=lambda b: isinstance(b, nn.LogicallyPartitioned))
    assert all(isinstance(b, nn.LogicallyPartitioned) for b in leaves)
    assert all(len(b.names) == b.value.ndim for b in leaves)
    assert jax.tree.structure(nn.meta.unbox(boxed)) == jax.tree.structure(plain)
    specs = nn.get_partition_spec(boxed)["params"]
    assert specs["out"]["kernel"] == PartitionSpec("heads", "head_features", "embed")
    axes = len(kind_references.KINDS[case.kind].kernels(case)["query"])
    head = () if axes == 2 else ("groups",) if case.groups else ("heads",)
    assert specs["query"]["kernel"] == PartitionSpec("embed", *head, "head_features")
    if "query_head_embedding" in specs:
        assert specs["query_head_embedding"] == PartitionSpec("heads", "head_features")


@pytest.mark.parametrize("case", FEW, ids=str)
def test_sharded_is_single(case):
    check_sharded_is_single(module_of(case))


@pytest.mark.parametrize("kind", ["mha", "mqa"])
def test_sharded_is_single_in_blocks(kind, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_SCORES", 100)
    check_sharded_is_single(module_of(Case(kind)).clone(engine="blocked"))


def test_key_heads_that_the_mesh_does_not_divide():
    """Three, each for two query heads, on two devices: repeated, in their order."""
    query, key, value = (normal(i, ROWS, LENGTH, n, 8) for i, n in ((1, 6), (2, 3), (3, 3)))

    def run(*heads):
        return engines.attend(*heads, None, Mask(), engines.Options(), "blocked")[0]

    wanted = jax.jit(lambda *heads: run(*heads))(query, key, value)
    with jax.set_mesh(mesh()), nn.logical_axis_rules(RULES):
        got = jax.jit(lambda *heads: run(*heads))(query, key, value)
    assert_close(got, wanted)


def check_sharded_is_single(module):
    x = normal(1, ROWS, LENGTH, 32)
    mask = Mask.causal() & Mask.padding(normal(2, ROWS, LENGTH) > -1)
    cotangent = normal(3, ROWS, LENGTH, 32)

    def init(key):
        return module.init(key, x)

    def run(params, x, mask):
        def loss(params, x):
            output = module.apply(params, x, mask=mask)
            return (output * cotangent).sum(), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    single = jax.jit(init)(jax.random.key(0))
    wanted = jax.jit(run)(single, x, mask)
    with jax.set_mesh(mesh()), nn.logical_axis_rules(RULES):
        boxed = jax.eval_shape(lambda key: init(key), jax.random.key(0))
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh(), RULES)
        params = jax.device_put(single, shardings)
        rows = NamedSharding(mesh(), PartitionSpec(("data", "fsdp")))
        placed = jax.device_put(x, rows), jax.device_put(mask, rows)
        program = jax.jit(lambda *a: run(*a), out_shardings=((shardings, rows), rows))
        lowered = program.lower(params, *placed)
        got = program(params, *placed)
    assert "sdy.sharding_constraint" in lowered.as_text()
    kernel = params["params"]["out"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 16)
    assert_close(got, wanted)


@pytest.mark.parametrize(("kind", "is_set"), [("mha", True), ("mhe_add", True), ("tpa", False)])
def test_explicit_axes(kind, is_set):
    """The default of `jax.make_mesh`: forward and gradient, and eagerly."""
    default = jax.make_mesh((2,), ("data",))
    assert default.axis_types == (AxisType.Explicit,)
    module = module_of(Case(kind))
    x = normal(1, ROWS, 32, 32)  # as many queries as `shared` needs
    mask = Mask.causal() & Mask.padding(normal(2, ROWS, 32) > -1)
    params = jax.jit(module.init)(jax.random.key(0), x)

    def loss(params, x):
        return (module.apply(params, x, mask=mask) ** 2).sum()

    wanted = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)
    with jax.set_mesh(default) if is_set else contextlib.nullcontext():
        placed = (
            jax.device_put(params, NamedSharding(default, PartitionSpec())),
            jax.device_put(x, NamedSharding(default, PartitionSpec("data"))),
        )
        assert_close(jax.jit(jax.value_and_grad(loss, (0, 1)))(*placed), wanted)
        if kind == "mha":
            assert_close(loss(*placed), wanted[0])


def test_sown_weights_and_dropout_on_explicit_axes():
    default = jax.make_mesh((2,), ("data",))
    module = Case("mhe_mul").module(num_heads=4, qkv_features=32, dropout_rate=0.5)
    x = normal(1, ROWS, LENGTH, 32)
    params = jax.jit(functools.partial(module.init, deterministic=True))(jax.random.key(0), x)
    call = {"deterministic": False, "sow_weights": True, "rngs": {"dropout": jax.random.key(1)}}
    run = jax.jit(functools.partial(module.apply, mutable=["intermediates"], **call))
    wanted = run(params, x)
    with jax.set_mesh(default):
        got = run(
            jax.device_put(params, NamedSharding(default, PartitionSpec())),
            jax.device_put(x, NamedSharding(default, PartitionSpec("data"))),
        )
    assert_close(got, wanted)


def test_decoding_on_explicit_axes_is_refused():
    default = jax.make_mesh((2,), ("data",))
    module = Case("mha").module(num_heads=4, qkv_features=32, decode=True)
    x = normal(1, ROWS, LENGTH, 32)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    placed = jax.device_put(variables, NamedSharding(default, PartitionSpec()))
    token = jax.device_put(x[:, :1], NamedSharding(default, PartitionSpec("data")))
    with pytest.raises(ValueError, match="decoding is not for a mesh with Explicit axes; .*Auto"):
        module.apply(placed, token, mutable=["cache"])


def test_the_initial_parameters_do_not_depend_on_the_mesh():
    module, x = module_of(CASES[-1]), normal(1, ROWS, LENGTH, 32)
    single = jax.jit(module.init)(jax.random.key(0), x)
    with jax.set_mesh(mesh()), nn.logical_axis_rules(RULES):
        boxed = jax.jit(lambda key: module.init(key, x))(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, nn.meta.unbox(boxed), single)


# 300: key biases far apart, so that `shared` goes head by head.
@pytest.mark.parametrize(("kind", "size"), [("tpa", 1.0), ("mva", 1.0), ("mva", 300.0)])
def test_inside_a_shard_map_of_the_caller(kind, size):
    """With its default checks, outputs and gradients are those of one device.

    In float64: sums go in another order, and gradients of scores of 300 cancel.
    """
    with jax.enable_x64(True):
        two = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
        module, x = module_of(Case(kind)), normal(1, ROWS, 33, 32, dtype=np.float64)
        params = jax.jit(module.init)(jax.random.key(0), x)
        params = jax.tree_util.tree_map_with_path(
            lambda path, p: np.float64(p) * (size if path[1].key == "key_bias" else 1.0), params
        )
        cotangent = normal(3, ROWS, 33, 32, dtype=np.float64)

        def with_gradients(apply):
            def run(params, x):
                output, pull = jax.vjp(apply, params, x)
                return output, pull(cotangent)

            return jax.jit(run)(params, x)

        rows, everywhere = PartitionSpec("data"), PartitionSpec()
        split = jax.shard_map(module.apply, mesh=two, in_specs=(everywhere, rows), out_specs=rows)
        wanted = with_gradients(module.apply)
        assert wanted[0].dtype == np.float64
        assert_close(with_gradients(split), wanted, 1e-10)
