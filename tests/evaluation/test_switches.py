"""JAX's global switches, set by another part of a program: a run gives what it gives without."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhe_jax
from mhe_jax.attention import KINDS, Mask, make_attention
from mhe_jax.config.fields import load_json, set_field
from mhe_jax.evaluation import evaluate
from mhe_jax.evaluation.sample import TranslatedSample
from mhe_jax.training.loop import train

LINES = ["the cat", "", "a small dog runs", "old"]
SWITCHES = {
    "x64": lambda: jax.enable_x64(True),
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "nans": lambda: jax.debug_nans(True),
    "eager": jax.disable_jit,
}
every_switch = pytest.mark.parametrize("switch", SWITCHES)


def found(workdir, calls):
    run = mhe_jax.load(workdir, devices=jax.devices()[:1], extra_length=3, length_penalty=0.0)
    return [call(run) for call in calls]


@every_switch
@pytest.mark.parametrize("task", ["translation", "lm"])
def test_decoding(run_of, translation_run, task, switch):
    greedy, sampled = {"temperature": 0.0}, {"temperature": 0.9, "top_k": 5, "top_p": 0.9}
    calls = [
        lambda run: [one.tokens for one in run.translate(LINES, details=True, beam_size=1)],
        lambda run: [one.tokens for one in run.translate(LINES, details=True, beam_size=3)],
    ]
    if task == "lm":
        calls = [
            lambda run: [one.tokens for one in run.generate(LINES, details=True, **greedy)],
            lambda run: [one.tokens for one in run.generate(LINES, details=True, **sampled)],
        ]
    workdir = translation_run if task == "translation" else run_of(task)
    plain = found(workdir, calls)
    with SWITCHES[switch]():
        changed = found(workdir, calls)
    assert changed[:1] == plain[:1]
    # In 64 bits, other random numbers are drawn.
    assert changed == plain or (switch, task) == ("x64", "lm")


@pytest.mark.parametrize("switch", ["x64", "nans"])
def test_training(translation_run, texts, tmp_path, switch):
    """With translations at each validation; optax itself has no strict types."""
    config = load_json(translation_run / "config.json")
    for name, value in {
        "workdir": str(tmp_path / "run"),
        "train.num_steps": 2,
        "train.eval_translate": 5,
        "optimizer.label_smoothing": 0.1,
        "data.length_buckets": (16,),
        "data.tokens_per_batch": 256,
    }.items():
        config = set_field(config, name, value)
    with SWITCHES[switch]():
        result = train(config, sample=TranslatedSample)
        scores = evaluate(tmp_path / "run", config.evaluation, devices=jax.devices()[:1])
    assert np.isfinite([result["validation_loss"], scores["loss"], scores["bleu"]]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("switch", ["x64", "strict"])
def test_types_of_modules(kind, switch):
    """Outputs and gradients are of the type that was asked for, and a cache can be filled."""
    fields = {"gqa": {"num_kv_heads": 2}, "gta": {"num_kv_heads": 2}}.get(kind, {})
    types = {"x64": [jnp.float32, jnp.bfloat16, jnp.float64], "strict": [jnp.float32, jnp.bfloat16]}
    if switch == "strict" and kind in ("mfa", "mla"):
        types["strict"].pop()  # Flax's RMSNorm mixes types of 16 and 32 bits
    mask = Mask.causal(jnp.array([0, 1])) & Mask.lengths(jnp.array([3, 6]))

    def loss(variables, x, module):
        y = module.apply(variables, x, mask=mask, rngs={"dropout": jax.random.key(0)})
        return y.astype(jnp.float32).sum(), y

    with SWITCHES[switch]():
        for dtype in types[switch]:
            dtypes = {"dtype": dtype, "param_dtype": dtype}
            module = make_attention(kind, num_heads=4, dropout_rate=0.1, **dtypes, **fields)
            x = jnp.ones((2, 6, 32), dtype)
            keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

            def run(module=module, x=x, keys=keys):
                module = module.clone(deterministic=False)
                variables = module.init(keys, x)
                return jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, x, module)

            assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(run))} == {dtype(0).dtype}
            module = module.clone(decode=True, deterministic=True)
            cached = jax.tree.map(jnp.zeros_like, nn.unbox(module.init(keys, x)))
            for T in (3, 1):
                y, _ = module.apply(cached, x[:, :T], mutable=["cache"])
                assert y.dtype == dtype
