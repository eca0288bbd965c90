"""Memory of the attention calculation: the needs of one layer beside its inputs and parameters.

    bytes = temporaries + outputs, as the compiler lays them out

of `attention(x)`, x [B, T, M], forward; or of its output with the gradients of x and all
parameters. Nothing is computed: the layer is compiled for the device at hand, or for one that is
not there.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mhe_jax.attention import Mask


def layer_memory(
    module: nn.Module,
    shape: tuple[int, int, int],
    dtype: str,
    *,
    causal: bool = False,
    gradients: bool = False,
    mesh: Any = None,
) -> int:
    """Bytes of temporaries and outputs of `module` on x of `shape` [B, T, M].

    `module` is self-attention, with the call of `nn.MultiHeadDotProductAttention`; `gradients` are
    those of x and all parameters. `mesh` is of one device, such as a TPU that is not here; without
    one it is the first device there is.
    """
    x = jax.ShapeDtypeStruct(shape, dtype)
    params = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
    if mesh is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        params, x = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), (params, x)
        )
    mask = Mask.causal() if causal else Mask()

    def apply(params, x) -> Any:
        return module.apply(params, x, mask=mask)

    def with_gradients(params, x):
        output, pull = jax.vjp(apply, params, x)
        return output, pull(jnp.ones_like(output))

    compiled = jax.jit(with_gradients if gradients else apply).lower(params, x).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes
