"""JAX's global switches, set by another part of a program: a run gives what it gives without."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mhe_jax.attention import KINDS, Mask, make_attention

LINES = ["the cat", "a small dog runs"]


@pytest.mark.parametrize("task", ["translation", "lm"])
def test_decoding_in_64_bits(load, task):
    """Of tokens drawn by top-k 1, since other random numbers are drawn."""

    def found():
        run = load(task, extra_length=2)
        if task == "translation":
            return [one.tokens for one in run.translate(LINES, details=True, length_penalty=0.0)]
        drawn = {"temperature": 0.9, "top_k": 1, "top_p": 0.9}
        return [one.tokens for one in run.generate(LINES, details=True, **drawn)]

    plain = found()
    compiled = load(task).compiled
    compiled.clear()
    with jax.enable_x64(True):
        changed = found()
    compiled.clear()
    assert changed == plain


@pytest.mark.parametrize("kind", KINDS)
def test_types_of_modules_in_64_bits(kind):
    """Outputs, gradients and cached steps are of the type that was asked for."""
    fields = {"gqa": {"num_kv_heads": 2}, "gta": {"num_kv_heads": 2}}.get(kind, {})
    mask = Mask.causal(jnp.array([0, 1])) & Mask.lengths(jnp.array([3, 6]))

    def loss(variables, x, module):
        y = module.apply(variables, x, mask=mask, rngs={"dropout": jax.random.key(0)})
        return y.astype(jnp.float32).sum(), y

    def run(module, x):
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        train = module.clone(deterministic=False)
        found = jax.grad(loss, argnums=(0, 1), has_aux=True)(train.init(keys, x), x, train)
        decode = module.clone(decode=True, deterministic=True)
        cached = decode.init(keys, x)
        steps = [decode.apply(cached, x[:, :T], mutable=["cache"])[0] for T in (3, 1)]
        return found, steps

    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.float64):
            dtypes = {"dtype": dtype, "param_dtype": dtype}
            module = make_attention(kind, num_heads=4, dropout_rate=0.1, **dtypes, **fields)
            found = jax.eval_shape(functools.partial(run, module), jnp.ones((2, 6, 32), dtype))
            assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {dtype(0).dtype}
