"""Inside a `jax.shard_map` of the caller, with its default checks, a module gives what it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mhe_jax.attention import KINDS, make_attention
from mhe_jax.config import FIELDS_OF_KINDS

T, M = 33, 24


# 300: key biases far apart, so that `shared` goes head by head.
@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 1.0) for kind in KINDS), ("mhe_add", 300.0), ("mva", 300.0)]
)
def test_output_and_gradients(kind, size):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    fields = {"num_kv_heads": 2} if kind in FIELDS_OF_KINDS["num_kv_heads"] else {}
    module = make_attention(kind, num_heads=4, use_bias=False, **fields)
    x = jax.random.normal(jax.random.key(1), (2, T, M))
    params = module.init(jax.random.key(0), x)
    wide = ("key_bias", "query_head_embedding")
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: p * size if path[1].key in wide else p, params
    )

    def apply(params, x):
        return module.apply(params, x, dropout_rng=jax.random.key(2), deterministic=True)

    def with_gradients(apply):
        def run(params, x):
            output, pull = jax.vjp(apply, params, x)
            return output, pull(jnp.cos(jnp.arange(output.size)).reshape(output.shape))

        return jax.jit(run)

    split = jax.shard_map(apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    wanted, got = (with_gradients(f)(params, x) for f in (apply, split))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(other).max() or 1.0
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * scale)
