"""What the tests of conversions are made of: modules, their parameters, inputs, and heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention import make_attention
from mhe_jax.attention.conversion import module_of
from mhe_jax.attention.nearest.heads import Heads

H, D, T = 6, 5, 7
M = H * D
ORDER = [2, 4, 1, 5, 0, 3]
FIELDS = {
    "gqa": {"num_kv_heads": 3},
    "gta": {"num_kv_heads": 3},
    "collaborative": {"score_features": D - 1},
}
NOT_MADE = ("mlra", "ghla")  # of other kinds
WIDTHS = {"gta": 4 * H}  # of all heads; gta's are even


def module(kind, use_bias, **fields):
    fields = {"qkv_features": WIDTHS.get(kind), **FIELDS.get(kind, {}), **fields}
    return make_attention(kind, num_heads=H, use_bias=use_bias, **fields)


def drawn(shapes, seed=2):
    """Parameters of these shapes, biases and tables too, of which none is 0."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        x = rng.normal(size=leaf.shape)
        if path[-1].key == "kernel":
            out = path[-2].key == "out"
            x /= np.sqrt(np.prod(leaf.shape[:-1]) if out else leaf.shape[0])
        else:
            x = 0.3 * x + (path[-1].key in ("scale", "value_scale"))
        return jnp.asarray(x, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def inputs(seed=0, rows=3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, T, M)) + 0.3, jnp.float32)


@functools.cache
def _started(made):
    return drawn(jax.eval_shape(made.init, jax.random.key(1), inputs())["params"])


def started(made):
    """Parameters of a module, in dicts of the caller's own."""
    return jax.tree.map(lambda leaf: leaf, _started(made))


def start(kind, use_bias=False, **fields):
    made = module(kind, use_bias, **fields)
    return made, started(made)


def apart(made, params, other, theirs, x=None, **how):
    x = inputs() if x is None else x
    y = made.apply({"params": params}, x, **how)
    z = other.apply({"params": theirs}, x, **how)
    return float(jnp.linalg.norm(y - z) / jnp.linalg.norm(y))


def heads_of(params, kind):
    """With a key and a value head for each."""
    return module_of(params, kind).heads(params).repeated()


def moved(heads):
    """The same function: other bases of scores and values, and another order."""
    draw = np.random.default_rng(3)
    R, S = (
        np.stack([draw.normal(size=(n, n)) for _ in range(H)])
        for n in (heads.key.shape[-1], heads.value.shape[-1])
    )
    parts = (
        heads.query @ np.linalg.inv(R).swapaxes(1, 2),
        heads.key @ R,
        heads.value @ S,
        np.linalg.inv(S) @ heads.out,
    )
    query, key, value, out = (part[ORDER] for part in parts)
    return Heads(query, key, value, out, heads.bias)
