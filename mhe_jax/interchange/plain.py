"""A run's parameters in one plain form: the form that the tables of other formats use.

names     those of the parameters, as `decoder/layer_0/mlp/up/kernel`; layers are unrolled
kernels   [in, out], heads side by side; attention with the heads of `heads_of`, and all biases
tables    `embeddings/token`, `embeddings/position`, `embeddings/type`, without the rows past
          the vocabulary
"""

import dataclasses
import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax import tasks
from mhe_jax.config import Config, InputError, KroneckerConfig, ModelConfig
from mhe_jax.interchange.heads import Heads, heads_of
from mhe_jax.model import unroll_layers
from mhe_jax.model.embeddings import sinusoids
from mhe_jax.model.stack import VOCABULARY, role_of
from mhe_jax.shapeshifter.kronecker import materialize

Tensors = dict[str, np.ndarray]
SUBLAYER = re.compile(r"(.*/(?:self|cross)_attention)/(.*)")


def require(model: ModelConfig, home: str, **wanted: Any) -> None:
    """Raises InputError unless fields of the model have these values, which `home` takes alone."""
    for field, value in wanted.items():
        found = getattr(model, field)
        if (found or 0) != (value or 0):
            raise InputError(f"model.{field} is {found!r}: {home} takes {value!r} only")


def require_heads_of_cross(config: Config, home: str) -> dict[str, int]:
    """The heads of each role; cross-attention must have as many as the decoder."""
    heads = {role: config.model.attention_for(role).num_heads for role in config.facts.roles}
    if heads["decoder"] != heads.get("cross", heads["decoder"]):
        raise InputError(
            f"{home} has as many heads in cross-attention as in the decoder: num_heads are "
            f"{heads['cross']} and {heads['decoder']}"
        )
    return heads


def plain(
    config: Config,
    params: Any,
    home: str,
    *,
    rows: np.ndarray | None = None,
    biases: bool = True,
    key_heads: int | None = None,
    width: int | None = None,
    own: bool = False,
) -> Tensors:
    """The parameters of a run in the plain form, for the architecture `home`.

    `rows` are our ids in the order of the file, `biases` says that the home has them in all
    matrices. Heads are of `width`, by default features / num_heads without rotary positions, and
    K is `key_heads`, by default H; `own`: they are as few and as wide as the kind allows.
    """
    model = config.model
    if not config.facts.is_encoder:  # others have no types of tokens in decoders
        require(model, home, num_token_types=0)
    if width is None and not own and model.positions == "rotary":
        raise InputError(f"model.positions is 'rotary': {home} has learned or fixed positions")
    found: Tensors = {}
    attention: dict[str, Tensors] = {}
    for path, array in _dense(config, params).items():
        if inside := SUBLAYER.fullmatch(path):
            attention.setdefault(inside[1], {})[inside[2]] = array
        else:
            found[path] = array
    for path, arrays in attention.items():
        wanted = model.attention_for(role_of(tuple(path.split("/"))))
        heads = heads_of(wanted, model.features, unflatten_dict(arrays, sep="/"))
        if own:
            heads = heads.widened(max(heads.query.shape[-1], heads.value.shape[-1]), home)
        else:
            heads = _fitted(model, heads, home, key_heads, width)
        for name in ("query", "key", "value", "out"):
            at, kernel = f"{path}/{name}/kernel", getattr(heads, name)
            found[at] = kernel.reshape(flat_shape(at, kernel.shape))
            if biases or wanted.use_bias:
                found[f"{path}/{name}/bias"] = getattr(heads, f"{name}_bias").reshape(-1)
    if biases and not model.mlp_bias:
        for name in [name for name in found if name.endswith(("up/kernel", "down/kernel"))]:
            found[name.replace("kernel", "bias")] = np.zeros(found[name].shape[1], np.float32)
    rows = np.arange(model.vocabulary_size) if rows is None else rows
    for name in found:
        if name.rpartition("/")[2] in VOCABULARY:
            found[name] = np.take(found[name], rows, 1 if name.endswith("output") else 0)
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


def _dense(config: Config, params: Any) -> Tensors:
    """All parameters by name, layers unrolled, Kronecker products multiplied out."""
    given: dict[str, Any] = flatten_dict(  # pyright: ignore[reportAssignmentType]
        jax.device_get(unroll_layers(params)), sep="/"
    )
    if not any(path.endswith("/a") for path in given):
        return {path: np.asarray(array) for path, array in given.items()}
    model = dataclasses.replace(config.model, kronecker=KroneckerConfig(), scan_layers=False)
    found = {}
    for path, leaf in abstract_of(dataclasses.replace(config, model=model)).items():
        factors = path.removesuffix("/kernel")
        if f"{factors}/a" in given:
            a, b = given[f"{factors}/a"], given[f"{factors}/b"]
            m, n = flat_shape(path, leaf.shape)
            # The factors of an output matrix are those of its transpose.
            out = path == "embeddings/output"
            matrix = materialize(a, b, n, m).T if out else materialize(a, b, m, n)
            found[path] = np.asarray(matrix).reshape(leaf.shape)
        else:
            found[path] = np.asarray(given[path])
    return found


def abstract_of(config: Config, sep: str = "/") -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the parameters of a config's model, by name."""
    task = tasks.of(config)
    init = task.initializer(task.model(config.model), config.data.sequence_length)
    params = nn.unbox(jax.eval_shape(init, jax.random.key(0)))
    return flatten_dict(params, sep=sep)  # pyright: ignore[reportReturnType]


def flat_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a kernel as a matrix, and of a bias as a vector."""
    if path.endswith("/kernel"):
        inputs = shape[:-1] if path.endswith("/out/kernel") else shape[:1]
        return math.prod(inputs), math.prod(shape[len(inputs) :])
    return (math.prod(shape),) if path.endswith("/bias") else shape


def scaled(
    model: ModelConfig,
    tensors: Tensors,
    factor: np.float32,
    last_norm: str | None = None,
    tables: tuple[str, ...] = ("token", "type", "position"),
) -> Tensors:
    """Tables times `factor`, and the norm before tied logits divided by it.

    Our model multiplies what it looks up by √M and its tied logits by nothing; others have no such
    factor. With √M in the tables, the function is the same.
    """
    found = dict(tensors)
    for name in tables:
        path = f"embeddings/{name}"
        if path in found and (name != "position" or model.positions == "learned"):
            found[path] = found[path] * factor
    if model.tie_embeddings and last_norm is not None:
        for path in (f"{last_norm}/scale", f"{last_norm}/bias"):
            if path in found:
                found[path] = found[path] / factor
    return found
