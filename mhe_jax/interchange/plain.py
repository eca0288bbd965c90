"""A run's parameters in one plain form, and back: the form that the tables of architectures use.

    names     those of the parameters, as `decoder/layer_0/mlp/up/kernel`; layers are unrolled
    kernels   [in, out], heads side by side; attention with the heads of `heads_of`, and all biases
    tables    `embeddings/token`, `embeddings/position`, `embeddings/type`, as they are added up;
              without the rows past the vocabulary

Our model multiplies what it looks up by √M and its tied logits by nothing; others have no such
factor. So tables are multiplied here, and the norm before the logits is divided: the same function.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax.config import Config, InputError, ModelConfig
from mhe_jax.interchange.heads import Heads, heads_of, matrix
from mhe_jax.model import unroll_layers
from mhe_jax.model.embeddings import sinusoids
from mhe_jax.model.stack import ATTENTION, VOCABULARY, role_of
from mhe_jax.shapeshifter.kronecker import materialize

Tensors = dict[str, np.ndarray]


def require(model: ModelConfig, home: str, **wanted: Any) -> None:
    """Raises InputError unless fields of the model have these values, which `home` takes alone."""
    for field, value in wanted.items():
        found = getattr(model, field)
        if (found or 0) != (value or 0):
            raise InputError(f"model.{field} is {found!r}: {home} takes {value!r} only")


def require_all(tensors: Tensors, used: Iterable[str], home: str) -> None:
    """Raises InputError unless all tensors are used: without one, another function is computed."""
    for name in sorted(tensors.keys() - {*used}):
        raise InputError(f"{name} of the run has no place in {home}")


def plain(
    config: Config,
    params: Any,
    home: str,
    *,
    rows: np.ndarray | None = None,
    key_heads: int | None = None,
    bias: bool = True,
    mlp_bias: bool = True,
    width: int | None = None,
    own: bool = False,
) -> Tensors:
    """The parameters of a run in the plain form.

    Args:
      config: of the run.
      params: of the run.
      home: the name of the architecture, for messages.
      rows: our ids in the order of the file; None: all.
      key_heads: K of every attention sublayer; None: as many as query heads.
      bias: whether the home has biases in attention.
      mlp_bias: whether it has biases in MLPs.
      width: of the home's heads; None: features / num_heads, and no rotary positions.
      own: each sublayer has as few key heads as its kind allows, and heads as wide as they must be;
        `key_heads` and `width` are then ignored.

    Raises:
      InputError: something that the home cannot hold.
    """
    model, found = config.model, {}
    if not config.facts.is_encoder:  # others have no types of tokens in decoders
        require(model, home, num_token_types=0)
    if width is None and not own and model.positions == "rotary":
        raise InputError(f"model.positions is 'rotary': {home} has learned or fixed positions")
    tree = unroll_layers(jax.device_get(params))

    def visit(node: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for name, child in node.items():
            at = (*path, name)
            if name in ATTENTION:
                heads = heads_of(model.attention_for(role_of(at)), model.features, child)
                if own:
                    heads = heads.widened(max(heads.query.shape[-1], heads.value.shape[-1]), home)
                else:
                    heads = _fitted(model, heads, home, key_heads, width)
                _attention(heads, "/".join(at), bias, found)
            elif not isinstance(child, Mapping):
                found["/".join(at)] = np.asarray(child)
            elif "a" in child and "b" in child:
                _multiplied_out(model, child, at, found)
            else:
                visit(child, at)

    visit(tree, ())
    if mlp_bias and not model.mlp_bias:
        for name in [name for name in found if name.endswith(("up/kernel", "down/kernel"))]:
            bias_of = name.replace("kernel", "bias")
            found[bias_of] = np.zeros(found[name].shape[1], np.float32)
    rows = np.arange(model.vocabulary_size) if rows is None else rows
    for name in list(found):
        if name.rpartition("/")[2] in VOCABULARY:
            axis = 1 if name.endswith("output") else 0
            found[name] = np.take(found[name], rows, axis)
    if model.positions == "sinusoidal":
        positions = jnp.arange(model.max_length)[None]
        found["embeddings/position"] = np.asarray(sinusoids(positions, model.features)[0])
    return found


def _fitted(
    model: ModelConfig, heads: Heads, home: str, key_heads: int | None, width: int | None
) -> Heads:
    count = heads.query.shape[1]
    if width is None and model.features % count:
        raise InputError(
            f"{home} has heads of width features / num_heads: model.features={model.features} is "
            f"no multiple of model.attention.num_heads={count}"
        )
    heads = heads.widened(width or model.features // count, home)
    return heads.repeated(key_heads or count)


def _attention(heads: Heads, path: str, bias: bool, found: Tensors) -> None:
    M = heads.out.shape[-1]
    for name in ("query", "key", "value", "out"):
        kernel, offset = getattr(heads, name), getattr(heads, f"{name}_bias")
        found[f"{path}/{name}/kernel"] = kernel.reshape((-1, M) if name == "out" else (M, -1))
        if bias:
            found[f"{path}/{name}/bias"] = offset.reshape(-1)


def _multiplied_out(model: ModelConfig, params, path: tuple[str, ...], found: Tensors) -> None:
    """Puts a matrix of Kronecker products in its place as a dense one."""
    M, F, name = model.features, model.mlp_features, path[-1]
    if path[0] == "embeddings":
        V = model.padded_vocabulary_size
        table = np.asarray(materialize(params["a"], params["b"], V, M))
        found["/".join(path)] = table.T if name == "output" else table
        return
    sizes = {
        "up": (M, F),
        "gate": (M, F),
        "down": (F, M),
        "head_dense": (M, M),
        "pooler": (M * (1 + (model.num_spans or 0)), M),
        "classifier": (M, model.num_classes or 1),
        "span": (M, 2),
    }
    found["/".join((*path, "kernel"))] = matrix(params, *sizes[name])
    if "bias" in params:
        found["/".join((*path, "bias"))] = np.asarray(params["bias"])


def unscaled(model: ModelConfig, tensors: Tensors, last_norm: str | None) -> Tensors:
    """The plain form with √M moved into the tables, and out of `last_norm` before tied logits."""
    return _scaled(model, tensors, last_norm, np.float32(model.features**0.5))


def scaled(model: ModelConfig, tensors: Tensors, last_norm: str | None) -> Tensors:
    """The inverse of `unscaled`."""
    return _scaled(model, tensors, last_norm, 1 / np.float32(model.features**0.5))


def _scaled(model: ModelConfig, tensors: Tensors, last_norm: str | None, factor) -> Tensors:
    found = dict(tensors)
    for name in ("token", "type", "position"):
        path = f"embeddings/{name}"
        if path in found and (name != "position" or model.positions == "learned"):
            found[path] = found[path] * factor
    if model.tie_embeddings and last_norm is not None:
        for part in ("scale", "bias"):
            if f"{last_norm}/{part}" in found:
                found[f"{last_norm}/{part}"] = found[f"{last_norm}/{part}"] / factor
    return found


def plain_shapes(abstract: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the plain form of a model of kind `mha`, `mqa` or `gqa`, by its parameters."""
    shapes = {}
    for path, leaf in _leaves(abstract).items():
        shape = leaf.shape
        if any(f"/{name}/" in path for name in ATTENTION):
            if path.endswith("out/kernel"):
                shape = (shape[0] * shape[1], shape[2])
            elif path.endswith("kernel"):
                shape = (shape[0], shape[1] * shape[2])
            elif len(shape) == 2:
                shape = (shape[0] * shape[1],)
        shapes[path] = shape
    return shapes


def from_plain(abstract: Any, tensors: Tensors) -> Any:
    """Parameters of the shapes of `abstract` from the plain form, which has all of them."""
    leaves = _leaves(abstract)
    return unflatten_dict(
        {path: tensors[path].reshape(leaf.shape) for path, leaf in leaves.items()}, sep="/"
    )


def _leaves(tree: Any) -> dict[str, Any]:
    return flatten_dict(tree, sep="/")  # pyright: ignore[reportReturnType]
