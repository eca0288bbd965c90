"""JAX's global switches, set by another part of a program: a run gives what it gives without."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mhe_jax.attention import KINDS, Mask, make_attention

LINES = ["the cat", "a small dog runs"]
SWITCHES = {
    "x64": lambda: jax.enable_x64(True),
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "nans": lambda: jax.debug_nans(True),
    "eager": jax.disable_jit,
}


@pytest.mark.parametrize(
    ("task", "switch"),
    [
        *[("translation", "x64"), ("lm", "x64"), ("lm", "eager")],
        *[pytest.param("lm", switch, marks=pytest.mark.rest) for switch in ("strict", "nans")],
    ],
)
def test_decoding(load, task, switch):
    drawn = {"temperature": 0.9, "top_k": 5, "top_p": 0.9}
    settings = [{"beam_size": 1}, {"beam_size": 3}] if task == "translation" else [{}, drawn]
    settings = settings[: 1 + (switch != "eager")]

    def found():
        run = load(task, extra_length=1 + (switch != "eager"), length_penalty=0.0)
        answer = run.translate if task == "translation" else run.generate
        lines = LINES[: 1 + (switch != "eager")]
        return [[one.tokens for one in answer(lines, details=True, **s)] for s in settings]

    plain = found()
    compiled = load(task).programs._compiled
    compiled.clear()
    with SWITCHES[switch]():
        changed = found()
    compiled.clear()
    assert changed[:1] == plain[:1]
    # In 64 bits, other random numbers are drawn.
    assert changed == plain or (switch, task) == ("x64", "lm")


@pytest.mark.parametrize(
    ("kind", "switch"),
    [
        *((kind, "x64") for kind in KINDS),
        ("mha", "strict"),
        ("mhe_add", "strict"),
        ("mla", "strict"),
    ],
)
def test_types_of_modules(kind, switch):
    """Outputs, gradients and cached steps are of the type that was asked for."""
    fields = {"gqa": {"num_kv_heads": 2}, "gta": {"num_kv_heads": 2}}.get(kind, {})
    types = [jnp.float32, jnp.float64] if switch == "x64" else [jnp.bfloat16]
    if switch == "strict" and kind in ("mfa", "mla"):
        types = [jnp.float32]  # Flax's RMSNorm mixes types of 16 and 32 bits
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

    with SWITCHES[switch]():
        for dtype in types:
            dtypes = {"dtype": dtype, "param_dtype": dtype}
            module = make_attention(kind, num_heads=4, dropout_rate=0.1, **dtypes, **fields)
            found = jax.eval_shape(functools.partial(run, module), jnp.ones((2, 6, 32), dtype))
            assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {dtype(0).dtype}
