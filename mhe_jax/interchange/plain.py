"""A run's parameters in one plain form: the form that the tables of other formats use.

names     those of the parameters, as `decoder/layer_0/mlp/up/kernel`; layers are unrolled
kernels   [in, out], heads side by side; attention as `Heads` of its kind, and all biases
tables    `embeddings/token`, `embeddings/position`, `embeddings/type`, without the rows past
          the vocabulary
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax import tasks
from mhe_jax.attention.conversion import check_source
from mhe_jax.attention.module import Attention
from mhe_jax.attention.nearest import Heads
from mhe_jax.config import Config, InputError, KroneckerConfig, ModelConfig
from mhe_jax.model import unroll_layers
from mhe_jax.model.embeddings import sinusoids
from mhe_jax.model.layers import attention_module
from mhe_jax.model.stack import VOCABULARY, role_of
from mhe_jax.shapeshifter import materialize

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
    own: bool = False,
) -> Tensors:
    """The parameters of a run in the plain form, for the architecture `home`.

    `rows` are our ids in the order of the file, `biases` says that the home has them in all
    matrices. With `own`, key and value heads are as few, and all heads as wide, as the kind allows;
    without, there are H of width features / H, and positions are not rotary.
    """
    model = config.model
    if not config.facts.is_encoder:  # others have no types of tokens in decoders
        require(model, home, num_token_types=0)
    if not own and model.positions == "rotary":
        raise InputError(f"model.positions is 'rotary': {home} has learned or fixed positions")
    found, attention = dense(config, params), {}
    for path in [*found]:
        if inside := SUBLAYER.fullmatch(path):
            attention.setdefault(inside[1], {})[inside[2]] = found.pop(path)
    for path, arrays in attention.items():
        module = attention_module(model, role_of(tuple(path.split("/"))))
        heads = heads_of(module, unflatten_dict(arrays, sep="/"), home)
        if not own:
            H, width = len(heads.out), heads.query.shape[-1]
            if model.features % H or width > model.features // H:
                raise InputError(
                    f"{home} has heads of width features / num_heads, {model.features} / {H}: "
                    f"takes no heads of width {width}"
                )
            heads = heads.widened(model.features // H).repeated()
        found |= matrices(path, heads, biases or module.use_bias)
    if biases and not model.mlp_bias:
        for name in [name for name in found if name.endswith(("up/kernel", "down/kernel"))]:
            found[name.replace("kernel", "bias")] = np.zeros(found[name].shape[1], np.float32)
    rows = np.arange(model.vocabulary_size) if rows is None else rows
    for name, axis in rows_of_tokens(found).items():
        found[name] = np.take(found[name], rows, axis)
    if model.positions == "sinusoidal":
        positions = jnp.arange(model.max_length)[None]
        found["embeddings/position"] = np.asarray(sinusoids(positions, model.features)[0])
    return found


def heads_of(module: Attention, params: Any, home: str) -> Heads:
    """What one sublayer computes, with queries, keys and values of one width."""
    check_source(module)
    if module.rotary is not None and module.not_rotated:
        raise InputError(
            f"model.attention.kind is {module.kind!r}: has no place in {home}, which turns whole "
            f"keys, the same for all heads of a group: {module.not_rotated}"
        )
    heads = module.heads(params)
    heads = heads.repeated(max(len(heads.key), len(heads.value)))
    return heads.widened(max(heads.query.shape[-1], heads.value.shape[-1]))


def matrices(path: str, heads: Heads, biases: bool) -> Tensors:
    """The matrices of heads side by side, and their biases."""
    found = {f"{path}/out/kernel": heads.out.reshape(-1, heads.out.shape[-1])}
    found[f"{path}/out/bias"] = heads.bias
    for name in ("query", "key", "value"):
        rows = getattr(heads, name).swapaxes(0, 1)
        rows = rows.reshape(len(rows), -1)
        found[f"{path}/{name}/kernel"], found[f"{path}/{name}/bias"] = rows[:-1], rows[-1]
    return {at: x.astype(np.float32) for at, x in found.items() if biases or "kernel" in at}


def dense(config: Config, params: Any) -> Tensors:
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
        if path in given:
            found[path] = np.asarray(given[path])
            continue
        a, b = given[f"{factors}/a"], given[f"{factors}/b"]
        m, n = flat_shape(path, leaf.shape)
        # The factors of an output matrix are those of its transpose.
        out = path == "embeddings/output"
        matrix = materialize(a, b, n, m).T if out else materialize(a, b, m, n)
        found[path] = np.asarray(matrix).reshape(leaf.shape)
    return found


def abstract_of(config: Config, sep: str = "/") -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the parameters of a config's model, by name."""
    task = tasks.of(config)
    init = task.initializer(task.model(config.model), config.data.sequence_length)
    params = nn.unbox(jax.eval_shape(init, jax.random.key(0)))
    return flatten_dict(params, sep=sep)  # pyright: ignore[reportReturnType]


def rows_of_tokens(names: Iterable[str]) -> dict[str, int]:
    """The parameters with a row for each token, and on which axis."""
    found = [name for name in names if name.rpartition("/")[2] in VOCABULARY]
    return {name: int(name.endswith("output")) for name in found}


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

    Our model multiplies what it looks up by √M; others have it in the tables.
    """
    found = dict(tensors)
    for name in tables:
        path = f"embeddings/{name}"
        if path in found and (name != "position" or model.positions == "learned"):
            found[path] = found[path] * factor
    if model.tie_embeddings and last_norm is not None:
        for path in {f"{last_norm}/scale", f"{last_norm}/bias"} & found.keys():
            found[path] = found[path] / factor
    return found
