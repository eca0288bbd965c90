"""Matrices of a trained model as int8 numbers with float scales, by Google's qwix.

    W[i, o] ≈ q[i, o] s[o]        s[o] = max_i |W[i, o]| / 127, q = round(W / s) in int8

Each output o of a matrix has a scale s: a feature of a head or of the MLP, a piece of the
vocabulary. What is computed stays float: `q s` is multiplied out where it is read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mhe_jax import tasks
from mhe_jax.config import Config, not_installed
from mhe_jax.model import stack_layers, unroll_layers

# The products with matrices: of projections in layers, and logits; the pattern is of their modules.
PRODUCTS = {"dot_general": r".*(_attention|mlp)/\w+", "einsum": "embeddings"}
METHODS = ("__call__", "encode", "start_cache", "decode_step")
MATRIX = "mhe_jax.attention.projection.Projection.matrix"


def quantized(config: Config, model: Any, params: Any) -> tuple[Any, Any]:
    """A run's model that multiplies by int8 matrices, and its parameters with them.

    Float stay biases, norms, embeddings of heads and positions, heads of tasks, a table without
    logits, and matrices that a kind does not apply as a projection: `key` and `value` of `mlra`
    (and of `mla` with `latent_groups`), `decoder` of `ghla`.

    Raises:
      InputError: qwix, the extra `quantize`, is not installed.
    """
    try:
        import qwix
    except ModuleNotFoundError:
        raise not_installed("evaluation.quantize needs qwix", "quantize") from None

    class Provider(qwix.PtqProvider):
        """With what qwix leaves out: rows of a table, and logits in float32 under bfloat16."""

        def get_intercept_map(self):
            others = {"jax.numpy.take": take, MATRIX: matrix}
            return super().get_intercept_map() | others

        def einsum(self, equation, *operands, **how):
            *others, last = operands
            if not is_int8(last):
                return super().einsum(equation, *operands, **how)
            return jnp.einsum(equation, *others, qwix.dequantize(last.array), **how)

    def take(table, ids, **how):
        if not is_int8(table):
            return jnp.take(table, ids, **how)
        # A scale that is not there is NaN.
        numbers, scales = table.array.qvalue, table.array.scale
        return jnp.take(numbers, ids, axis=0, mode="clip") * jnp.take(scales, ids, **how)

    def matrix(projection, *shape):
        kernel = projection.get_variable("params", "kernel")
        return qwix.dequantize(kernel.array) if is_int8(kernel) else projection.matrix(*shape)

    def in_int8(model):
        rules = [
            qwix.QuantizationRule(module_path=path, op_names=(product,), weight_qtype="int8")
            for product, path in PRODUCTS.items()
        ]
        methods = [name for name in METHODS if hasattr(model, name)]
        return qwix.quantize_model(model, Provider(rules), methods=methods)

    # qwix takes no account of the axis of scanned layers.
    scans, dtype = model.config.scan_layers, model.config.dtype
    flat = model.clone(config=dataclasses.replace(model.config, scan_layers=False))
    initialize = tasks.of(config).initializer(in_int8(flat), config.data.sequence_length)
    abstract = jax.eval_shape(initialize, jax.random.key(0))

    def cast(leaf):
        # Products have the type of scales: let that be the one that is computed in.
        return leaf.replace(array=leaf.array.astype(dtype)) if is_int8(leaf) else leaf

    def convert(params):
        params = qwix.quantize_params(unroll_layers(params) if scans else params, abstract)
        params = jax.tree.map(cast, params, is_leaf=is_int8)
        return stack_layers(params) if scans else params

    return in_int8(model), jax.jit(convert)(params)


def is_int8(leaf: Any) -> bool:
    """Whether it is one of qwix: it knows how it was quantized."""
    return hasattr(leaf, "how")
