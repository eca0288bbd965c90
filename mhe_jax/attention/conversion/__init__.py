"""From the parameters of one attention kind to those of another.

A source gives its heads, and the target's class its `nearest` parameters (`attention.nearest`).
fitting.py has the moments of real inputs, and fits W_o to them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax.attention.conversion.fitting import Activations, error, fit_output, moments_of
from mhe_jax.attention.kinds import KINDS
from mhe_jax.attention.module import Attention
from mhe_jax.attention.nearest.heads import Heads
from mhe_jax.attention.nearest.scores import Moments, Parameters
from mhe_jax.config import ConversionConfig, InputError

__all__ = [
    "FIELDS",
    "Activations",
    "check_source",
    "check_target",
    "convert",
    "convert_and_fit",
    "module_of",
]

# Fields of a module that a conversion takes.
FIELDS = tuple(f for f in ConversionConfig.__dataclass_fields__ if f not in ("kind", "rows"))


def convert(
    params: Mapping[str, Any],
    kind: str,
    *,
    source: str = "mha",
    activations: Sequence[Activations] = (),
    **fields: Any,
) -> dict[str, Any]:
    """Parameters of `make_attention(kind, ...)` that come closest to another module's.

    Scores are `x Q[h] K[h]ᵀ yᵀ`, and a head adds `y V[h] O[h]`: the parameters of `kind` are those
    whose products come closest, by least squares (`nearest` of its class). A kind that can
    represent another takes it exactly: each into `mha` (except `mva` and `collaborative`, where
    score_features + 1 is more than the width of a head), those with one head into those with
    several, and `mha` into `collaborative`, `tpa` and, without biases of queries or with
    `query_rank`, `mla` that are wide enough. None of this holds where rotary positions
    rotate queries and keys: their products then differ at each distance.

    Args:
      params: parameters of one module, Flax's own or `make_attention` of `source`.
      kind: the kind of the parameters to make.
      source: the kind of `params`; it is never guessed. `mfa`, `mla` and `tpa` are not converted
        into others; `mlra` and `ghla` neither into nor from them.
      activations: inputs of the module. With them, products are weighted by their moments, and W_o
        is fitted to the outputs. Without, inputs count as independent, of variance 1.
      fields: of the new module, where its kind has them: `num_kv_heads`, `num_groups`,
        `score_groups`, `score_features`, `query_rank`, `key_rank`, `value_rank`, `reuse_keys`,
        `latent_features` and `latent_groups`.

    Returns:
      Parameters for `make_attention(kind, num_heads=..., **fields)`, of the same heads and width.
      They have biases where `params` have, and where heads have something that only a bias can
      keep, such as the head embeddings of `mhe_add` in `mha`, or the kind needs them to be made
      (`mfa`, `mla`, `tpa`); `use_bias` of the module must match.

    Examples:
      >>> import flax.linen as nn
      >>> from mhe_jax.attention import make_attention
      >>> x = jax.random.normal(jax.random.key(0), (2, 5, 32))
      >>> theirs = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)
      >>> params = theirs.init(jax.random.key(1), x)["params"]
      >>> grouped = convert(params, "gqa", num_kv_heads=2)
      >>> ours = make_attention("gqa", num_heads=4, num_kv_heads=2, use_bias=False)
      >>> ours.apply({"params": grouped}, x).shape
      (2, 5, 32)

    Raises:
      ValueError: an unknown kind; a source whose heads are not linear; a field that the kind does
        not have, or that does not divide the heads, or is too small for a latent; inputs of keys
        and values whose widths the kind does not take; a LayerNorm between projections and scores
        (`normalize_qk`); activations of another width; parameters or activations that hold NaN or
        infinity.
    """
    given = module_of(params, source)
    made = _target(kind, given, fields)
    inputs = _inputs(params)
    shapes = _shapes(made, inputs)  # refuses fields that do not go together
    if kind == source and shapes == jax.tree.map(np.shape, dict(params)):
        return dict(params)
    check_source(given)
    if not all(isinstance(a, Activations) for a in activations):
        raise InputError("activations must be a list of Activations, one for each batch")
    for shape in (np.shape(a.query) for a in activations):
        if len(shape) != 3 or shape[-1] != inputs[0]:
            raise InputError(
                f"activations: query has shape {shape}: takes [batch, length, {inputs[0]}]"
            )
    heads = given.heads(params).repeated()
    biases = {"query": heads.query[:, -1], "out": heads.constant}
    lost = any(np.any(biases[role]) for role in biases if role not in made.keeps_bias)
    made = made.clone(use_bias=bool(given.use_bias or made.not_linear or lost))
    whole = [a.completed(given, params) for a in activations]
    moments = moments_of(whole) if whole else Moments.unit(heads)
    for name, arrays in (("params", params), ("activations", dataclasses.astuple(moments))):
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays)):
            raise InputError(f"{name} hold NaN or infinity: takes finite numbers")
    dtype = params["out"]["kernel"].dtype
    found = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), nearest(made, heads, moments))
    return fit_output(made, found, whole) if whole else found


def convert_and_fit(
    params: Mapping[str, Any], kind: str, *, activations: Sequence[Activations], **how: Any
) -> tuple[dict[str, Any], dict[str, float | None]]:
    """What `convert` makes, and its `error` with inputs unknown (`before`) and with them (`after`).

    Errors are None without activations, which must have an output.
    """
    found = convert(params, kind, **how)
    if not activations:
        return found, {"before": None, "after": None}
    module, fitted = module_of(found, kind), convert(params, kind, activations=activations, **how)
    before, after = (error(module, made, activations) for made in (found, fitted))
    return fitted, {"before": before, "after": after}


def nearest(module: Attention, heads: Heads, moments: Moments) -> Parameters:
    """All parameters of the module that come nearest to what the heads do, as float64."""
    found = module.nearest(heads, moments)
    found["out"]["bias"] = heads.constant
    given: dict[Any, Any] = flatten_dict(found)
    widths = [part.shape[1] - 1 for part in (heads.query, heads.key, heads.value)]
    shapes: dict[Any, Any] = flatten_dict(_shapes(module, widths))
    return unflatten_dict(
        {path: np.reshape(given.get(path, np.zeros(s)), s) for path, s in shapes.items()}
    )


def module_of(params: Mapping[str, Any], kind: str) -> Attention:
    """The module of `kind` that has these parameters, by their names and shapes.

    Raises:
      InputError: an unknown kind.
      ValueError: the parameters are not of that kind.
    """
    check_target(kind)
    try:
        H, D, P = np.shape(params["out"]["kernel"])
        fields = {"use_bias": "bias" in params["out"], **_fields(params, kind)}
        module = KINDS[kind](num_heads=H, qkv_features=H * D, out_features=P, **fields)
        same = jax.tree.map(np.shape, dict(params)) == _shapes(module, _inputs(params))
    except (KeyError, ValueError, TypeError, IndexError):
        same = False
    if not same:
        raise ValueError(
            f"these are not the parameters of an attention module of kind {kind}: "
            f"{jax.tree.map(np.shape, dict(params))}"
        )
    return module


def check_target(kind: str) -> None:
    """Raises InputError for an unknown kind."""
    if kind not in KINDS:
        raise InputError(f"kind {kind!r} cannot be made: takes one of {', '.join(KINDS)}")


def check_source(module: Attention) -> None:
    """Raises InputError for a module that has no plain heads (`Heads`)."""
    reason = module.not_linear
    if module.normalize_qk:
        reason = "normalize_qk has a LayerNorm between its projections and its scores"
    if reason:
        raise InputError(f"{module.kind} is not made into other attention: {reason}")


def _fields(params: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of the module that the parameters tell, beyond its heads and widths."""
    query = np.shape(params["query"]["kernel"])
    fields: dict[str, Any] = {
        "normalize_qk": any(name.endswith("_ln") for name in params),
        "reuse_keys": "value_scale" in params,
        "score_features": query[-1],
    }
    if "num_kv_heads" in KINDS[kind].__dataclass_fields__:
        key = params.get("key_value", params.get("key", {}))
        fields["num_kv_heads"] = np.shape(key["kernel"])[1]
    if len(query) == 3:
        fields["num_groups"] = query[1]
    if "query_group_embedding" in params:
        fields["score_groups"] = len(params["query_group_embedding"])
    if "query_latent" in params:
        fields["query_rank"] = query[0]
    if "query_basis" in params:
        for role in ("query", "key", "value"):
            fields[f"{role}_rank"] = np.shape(params[role]["kernel"])[2]
    if "latent_norm" in params:
        scale = np.shape(params["latent_norm"]["scale"])
        fields |= {"latent_features": math.prod(scale), "latent_groups": math.prod(scale[:-1])}
        readers, heads = np.shape(params["key"]["kernel"])[1], len(params["out"]["kernel"])
        fields["latent_branches"] = readers // heads
    if "decoder" in params:
        fields["latent_features"] = len(params["decoder"]["kernel"])
    return {name: fields[name] for name in fields if name in KINDS[kind].__dataclass_fields__}


def _inputs(params: Mapping[str, Any]) -> list[int]:
    """Widths of the inputs of queries, keys and values."""

    def width(*names: str) -> int:
        # Keys and values that no kernel makes are inputs, cut into heads.
        whole = math.prod(np.shape(params["out"]["kernel"])[:2])
        return next((len(params[name]["kernel"]) for name in names if name in params), whole)

    query, key = width("query_latent", "query"), width("key_value", "latent", "key")
    return [query, key, key if "latent" in params else width("value", "key_value", "key")]


def _shapes(module: Attention, inputs: Sequence[int]) -> dict[str, Any]:
    """The shapes of the module's parameters for inputs of these widths."""
    given = (jax.ShapeDtypeStruct((1, 1, width), jnp.float32) for width in inputs)
    made = jax.eval_shape(lambda *x: module.init(jax.random.key(0), *x)["params"], *given)
    return jax.tree.map(np.shape, made)


def _target(kind: str, given: Attention, fields: Mapping[str, Any]) -> Attention:
    check_target(kind)
    theirs = set(KINDS[kind].__dataclass_fields__) & set(FIELDS)
    for field in fields:
        if field not in theirs:
            has = ", ".join(sorted(theirs)) or "none"
            raise ValueError(f"{kind} has no field {field!r} to be converted with; it has {has}")
    names = ("num_heads", "qkv_features", "out_features", "use_bias", "normalize_qk")
    own = {name: getattr(given, name) for name in names}
    return KINDS[kind](**own, **{name: fields[name] for name in fields if fields[name] is not None})
