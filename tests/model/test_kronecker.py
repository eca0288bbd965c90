"""Sums of Kronecker products: both ways to apply them, tables, factors, and whole models."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax import shapeshifter as kronecker
from mhe_jax.attention.projection import Projection
from mhe_jax.config import KroneckerConfig
from mhe_jax.model import count_parameters
from mhe_jax.shapeshifter import Factors, KroneckerDense, KroneckerEmbed, balanced
from mhe_jax.shapeshifter.factorize import factorize
from mhe_jax.tasks import TASKS

# Primes, ones, products of few and of many primes.
SHAPES = [(12, 20), (16, 16), (7, 13), (97, 11), (1, 5), (6, 1), (30, 64), (101, 24)]
RNG = jax.random.key(0)
GIVEN = Factors(4, 3, 4, 9)  # for a [13, 26]: padded on both sides


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def by_definition(a, b, m, n):
    return sum(np.kron(x, y) for x, y in zip(a, b, strict=True))[:m, :n]


def factors_of(shape, rank, factors=None, seed=0):
    f = factors or balanced(*shape)
    return normal(seed, rank, f.m1, f.n1), normal(seed + 1, rank, f.m2, f.n2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [*SHAPES, (13, 26)])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("apply", ["factored", "materialized"])
def test_both_ways_are_the_dense_product(shape, rank, apply):
    a, b = factors_of(shape, rank, GIVEN if shape == (13, 26) else None)
    m, n = shape
    x, weights = normal(2, 2, 5, m), normal(3, 2, 5, n)

    def loss(x, a, b):
        return jnp.sum(weights * kronecker.multiply(apply, x, a, b, n))

    @jax.jit
    def computed(x, a, b):
        product = kronecker.multiply(apply, x, a, b, n)
        return kronecker.materialize(a, b, m, n), product, jax.grad(loss, (0, 1, 2))(x, a, b)

    w = by_definition(a, b, m, n)
    matrix, got, gradients = computed(*f32(x, a, b))
    chex.assert_trees_all_close(matrix, w, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(got, x @ w, rtol=1e-5, atol=1e-5 * np.abs(x @ w).max())
    # d loss / dA[k, a, b] = Σ dW ⊙ (e_ab ⊗ B_k), and so for B.
    dw = np.einsum("uvm,uvn->mn", x, weights)
    (_, m1, n1), (_, m2, n2) = a.shape, b.shape
    dw = np.pad(dw, ((0, m1 * m2 - m), (0, n1 * n2 - n))).reshape(m1, m2, n1, n2)
    want = weights @ w.T, np.einsum("acbe,kce->kab", dw, b), np.einsum("acbe,kab->kce", dw, a)
    for found, exact in zip(gradients, want, strict=True):
        chex.assert_trees_all_close(found, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("shape", [*SHAPES, (8009, 512), (32768, 512), (512, 2048)])
def test_balanced_factors_hold_the_matrix_with_few_parameters(shape):
    f, (m, n) = balanced(*shape), shape
    assert f.m1 * f.m2 >= m
    assert f.n1 * f.n2 >= n
    assert f.numbers >= 2 * math.sqrt(m * n)
    if min(shape) > 11:
        assert f.numbers <= 2.2 * math.sqrt(m * n)
        assert f.term_rank >= min(m, n) / 4


@pytest.mark.parametrize("apply", ["factored", "materialized", "auto"])
def test_a_table_gives_rows_and_logits(apply):
    V, M, rank = 23, 10, 3
    table = KroneckerEmbed(V, M, stddev=0.3, rank=rank, apply_as=apply)
    ids = jnp.array([[0, 5, 22], [7, 7, 21]])
    variables = table.init(jax.random.key(0), ids)
    a, b = (np.asarray(variables["params"][name], np.float64) for name in "ab")
    w = by_definition(a, b, V, M)
    chex.assert_trees_all_close(table.apply(variables, ids), w[np.asarray(ids)], rtol=1e-5)
    x = normal(0, 2, 4, M)
    logits = table.apply(variables, jnp.asarray(x, jnp.float32), method="attend")
    chex.assert_trees_all_close(logits, x @ w.T, rtol=1e-5, atol=1e-6)
    assert np.isnan(table.apply(variables, jnp.array([V]))).all()


def test_the_variance_at_the_start_is_that_of_a_dense_matrix():
    fields = {
        "kernel_init": jax.nn.initializers.lecun_normal(),
        "bias_init": jax.nn.initializers.zeros,
        "use_bias": False,
    }
    x = jnp.ones((1, 256))
    for rank in (1, 8):
        stddevs = []
        for seed in range(4):
            module = KroneckerDense(rank=rank, **fields)
            p = module.init(jax.random.key(seed), x, (512,), (None, None))["params"]
            stddevs.append(kronecker.materialize(p["a"], p["b"], 256, 512).std())
        assert np.mean(stddevs) == pytest.approx(256**-0.5, rel=0.1)
    table = KroneckerEmbed(1000, 64, stddev=0.125, rank=32)
    rows = table.init_with_output(jax.random.key(0), jnp.arange(1000))[0]
    assert rows.std() == pytest.approx(0.125, rel=0.1)


def test_a_matrix_of_zeros_learns():
    zeros = jax.nn.initializers.zeros
    module = KroneckerDense(zeros, zeros, use_bias=False, rank=2)
    x, call = jnp.ones((3, 12)), ((20,), (None, None))
    params = module.init(RNG, x, *call)

    def loss(params):
        return ((module.apply(params, x, *call) - 1) ** 2).sum()

    assert loss(params) == 3 * 20
    gradients = jax.grad(loss)(params)
    assert abs(gradients["params"]["b"]).max() > 0
    assert loss(jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)) < 3 * 20


@pytest.mark.parametrize("apply_as", ["auto", "factored", "materialized"])
def test_the_matrix_is_what_a_call_multiplies_by(apply_as):
    """Of the dense projection and of this one; also where only the matrix is asked for."""
    fields = {"kernel_init": jax.nn.initializers.lecun_normal(), "bias_init": None}
    more = {"rank": 2, "apply_as": apply_as}
    dense = Projection(use_bias=False, **fields)
    for module in (dense, KroneckerDense(use_bias=False, **fields, **more)):
        x, names = jnp.asarray(normal(0, 3, 14), jnp.float32), (None, "heads", None)
        variables = module.init(RNG, (14,), (2, 5), names, method="matrix")
        jax.tree.map(np.testing.assert_array_equal, variables, module.init(RNG, x, (2, 5), names))
        w = module.apply(variables, (14,), (2, 5), names, method="matrix")
        got = module.apply(variables, x, (2, 5), names)
        chex.assert_trees_all_close(got, jnp.einsum("ti,ihd->thd", x, w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("task", "changes"),
    [("mlm", {"tie_embeddings": False, "num_layers": 1}), ("lm", {"scan_layers": True})],
)
def test_factors_of_a_dense_model(tiny, task, changes):
    """At full rank the same model; below, the error is what the singular values left out have."""
    dense = tiny.config(attention={"use_bias": True}, **changes)
    params, errors_before = tiny.params(task, dense), {}
    for ranks in ((1, 1, 1), (2, 3, 4), (10_000,) * 3):
        config = dataclasses.replace(dense, kronecker=KroneckerConfig(*ranks))
        like = tiny.params(task, config)
        found, errors = factorize(params, like)
        chex.assert_trees_all_equal_shapes(found, like)
        leaves = jax.tree_util.tree_leaves_with_path(like)
        matrices = [([k.key for k in path], x) for path, x in leaves if path[-1].key == "a"]
        assert len(errors) == sum(len(leaf) if leaf.ndim == 4 else 1 for _, leaf in matrices)
        assert all(errors[path] < before for path, before in errors_before.items())
        errors_before = errors
        for path, leaf in matrices if max(ranks) < 5 else ():
            part = next((i for i, n in enumerate(("self_attention", "mlp")) if n in path), 2)
            rank = ranks[1 if "head_dense" in path else part]
            assert leaf.shape[-3] == rank, path
    assert max(errors.values()) < 1e-5
    want = tiny.logits(task, dense, params)
    for apply in ("factored", "materialized"):
        kronecker = dataclasses.replace(config.kronecker, apply=apply)
        got = tiny.logits(task, dataclasses.replace(config, kronecker=kronecker), found)
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_product_that_makes_the_matrix_has_the_precision_of_the_layer():
    zeros = jax.nn.initializers.zeros
    fields = {"kernel_init": zeros, "bias_init": zeros, "use_bias": False, "rank": 2}
    layer = KroneckerDense(**fields, apply_as="materialized", precision="highest")
    x, shape = jnp.zeros((3, 14)), ((10,), (None, "heads"))
    variables = layer.init(RNG, x, *shape)
    program = jax.jit(lambda x: layer.apply(variables, x, *shape)).lower(x).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_transformer_base_has_2_42_million_numbers_in_its_matrices(tiny):
    from configs import wmt14

    config = wmt14.get_config().model
    config = dataclasses.replace(config, vocabulary_size=32768, tie_embeddings=True)
    small = dataclasses.replace(
        config, kronecker=KroneckerConfig(attention=8, mlp=16, embedding=128)
    )

    def matrices(config):
        model = TASKS["translation"].model(config)
        tokens = np.zeros((1, 4), np.int32)
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        names = ("kernel", "token", "a", "b")
        return count_parameters(shapes), sum(
            leaf.size for path, leaf in leaves if path[-1].key in names
        )

    config = dataclasses.replace(
        config, attention=dataclasses.replace(config.attention, kind="mha")
    )
    small = dataclasses.replace(small, attention=config.attention)
    (counts, dense), (counts_small, few) = matrices(config), matrices(small)
    assert (dense, few) == (60_817_408, 2_424_832)
    assert counts["total"] >= 10 * counts_small["total"]


def f32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]
