"""From the parameters of one attention kind to those of another.

heads.py             a kind as heads of its own, exactly
factors.py           the best factors that several heads can share
scores.py            the target, in coordinates in which all differences count the same
kinds.py             the parameters of each kind that come closest to given heads
latents.py           those of kinds with a norm on a latent
tied.py              those of the kind whose keys are in part its values
tensor_products.py   those of the kind whose projections are mixed by heads
fitting.py           moments of real inputs, and W_o fitted to them
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.conversion.fitting import Activations, error, fit_output, moments_of
from mhe_jax.attention.conversion.heads import NOT_LINEAR, Heads, expand
from mhe_jax.attention.conversion.kinds import TARGETS, closest
from mhe_jax.attention.conversion.scores import Moments, Target
from mhe_jax.attention.kinds import KINDS
from mhe_jax.attention.module import Attention
from mhe_jax.config import MHE_KINDS, InputError

__all__ = [
    "FIELDS",
    "Activations",
    "check_source",
    "check_target",
    "convert",
    "error",
    "module_of",
]

# Kinds that can hold a bias of the queries, and of the output, without `use_bias`.
BIASED_QUERIES, BIASED_OUTPUT = ("mhe_add", "mva", "collaborative"), ("mhe_add",)
# Kinds that need biases to be made: constants that hold a norm, or that are factors of heads.
BIASED = ("mla", "mfa", "tpa")
# Fields of a module that a conversion takes, and those that must divide the number of heads.
FIELDS = tuple(
    f.name for f in dataclasses.fields(Target) if f.name not in ("kind", "width", "use_bias")
)
DIVISORS = ("num_kv_heads", "num_groups", "score_groups", "latent_groups")


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
    whose products come closest, by least squares (`kinds.py`). A kind that can represent another
    takes it exactly: each into `mha` (except `mva` and `collaborative`, where score_features + 1 is
    more than the width of a head), those with one head into those with several, and `mha` into
    `collaborative`, `tpa` and, without biases of queries or with `query_rank`, `mla` that are wide
    enough. None of this holds where rotary positions
    rotate queries and keys: their products then differ at each distance.

    Args:
      params: parameters of one module, Flax's own or `make_attention` of `source`.
      kind: the kind of the parameters to make.
      source: the kind of `params`; it is never guessed. `mfa`, `mla` and `tpa` are not converted
        into others.
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
        not have, or that does not divide the heads, or is too small for a latent; key and value
        inputs that differ in width for a kind with one input for both, or for `el` from
        `qkv_features`; a LayerNorm between projections and scores (`normalize_qk`); activations of
        another width; parameters or activations that hold NaN or infinity.
    """
    given = module_of(params, source)
    made = _target_module(kind, given, fields)
    if kind == source and made == given:
        return dict(params)
    check_source(source)
    heads = expand(params, source)
    keys, values = heads.key.shape[1], heads.value.shape[1]
    if made.one_source and keys != values:
        raise InputError(
            f"{kind} makes keys and values of one input: the parameters take inputs {keys} and "
            f"{values} wide, which must be equal"
        )
    if kind == "el" and keys != given.qkv_features:
        raise InputError(
            f"el cuts its inputs into heads: the parameters take keys {keys} wide, and must take "
            f"qkv_features={given.qkv_features}"
        )
    biased = given.use_bias or _needs_bias(kind, heads)
    made = made.clone(use_bias=biased)
    target = Target(kind, heads.value.shape[-1], use_bias=biased, **_numbers(made))
    _check_activations(activations, _inputs(params, source)[0])
    whole = [a.completed(given, params) for a in activations]
    moments = moments_of(whole) if whole else Moments.unit(heads)
    for name, arrays in (("params", params), ("activations", dataclasses.astuple(moments))):
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays)):
            raise InputError(f"{name} hold NaN or infinity: takes finite numbers")
    found = closest(heads, target, moments)
    dtype = params["out"]["kernel"].dtype
    found = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), found)
    return fit_output(made, found, whole) if whole else found


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
        shapes = jax.eval_shape(
            lambda *x: module.init(jax.random.key(0), *x)["params"],
            *(jax.ShapeDtypeStruct((1, 1, width), jnp.float32) for width in _inputs(params, kind)),
        )
        same = jax.tree.map(np.shape, dict(params)) == jax.tree.map(np.shape, shapes)
    except (KeyError, ValueError, TypeError, IndexError):
        same = False
    if not same:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        found = [
            f"{jax.tree_util.keystr(path, simple=True, separator='/')} {np.shape(leaf)}"
            for path, leaf in leaves
        ]
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise ValueError(
            f"these are not the parameters of an attention module of kind {kind}: "
            f"{', '.join(found[:4]) or 'none'}{more}"
        )
    return module


def _check_activations(activations: Sequence[Activations], width: int) -> None:
    """Raises InputError where inputs of queries are not `width` wide."""
    several = isinstance(activations, Sequence)
    if not several or not all(isinstance(a, Activations) for a in activations):
        raise InputError("activations must be a list of Activations, one for each batch")
    for a in activations:
        if np.ndim(a.query) != 3 or np.shape(a.query)[-1] != width:
            raise InputError(
                f"activations: query has shape {np.shape(a.query)}, and must be [batch, length, "
                f"{width}], as the parameters take inputs {width} wide"
            )


def _fields(params: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of the module that the parameters tell, beyond its heads and widths."""

    def shape(*names: str) -> tuple[int, ...]:
        value: Any = params
        for name in names:
            value = value[name]
        return np.shape(value)

    fields: dict[str, Any] = {"normalize_qk": any(name.endswith("_ln") for name in params)}
    query = shape("query", "kernel")
    if kind in ("gqa", "gta"):
        fields["num_kv_heads"] = shape("key" if kind == "gqa" else "key_value", "kernel")[1]
    if kind in (*MHE_KINDS, "mva", "collaborative") and len(query) == 3:
        fields["num_groups"] = query[1]
    if "query_group_embedding" in params:
        fields["score_groups"] = len(params["query_group_embedding"])
    if kind in ("mva", "collaborative"):
        fields["score_features"] = query[-1]
    if "query_latent" in params:
        fields["query_rank"] = len(params["query"]["kernel"])
    if kind == "mfa":
        fields["reuse_keys"] = "value_scale" in params
    if kind == "tpa":
        for role in ("query", "key", "value"):
            fields[f"{role}_rank"] = shape(role, "kernel")[2]
    if kind == "mla":
        scale = shape("latent_norm", "scale")
        fields |= {"latent_features": math.prod(scale), "latent_groups": math.prod(scale[:-1])}
    return fields


def _inputs(params: Mapping[str, Any], kind: str) -> list[int]:
    """Widths of the inputs: queries, keys and values, or one of both where the kind takes one."""

    def width(*names: str) -> list[int]:
        return [len(params[name]["kernel"]) for name in names if name in params][:1]

    found = width("query_latent", "query")
    if kind == "el":  # its keys and values are its inputs, cut into heads
        return [*found, math.prod(np.shape(params["out"]["kernel"])[:2])]
    found += width("key_value", "latent", "key")
    return found if kind == "mla" else found + width("value")


def check_target(kind: str) -> None:
    """Raises InputError for an unknown kind."""
    if kind not in TARGETS:
        raise InputError(f"kind {kind!r} cannot be made: takes one of {', '.join(TARGETS)}")


def check_source(kind: str) -> None:
    """Raises InputError for a kind that is not converted into others."""
    if kind in NOT_LINEAR:
        raise InputError(f"{kind} is not converted into others: {NOT_LINEAR[kind]}")


def _target_module(kind: str, given: Attention, fields: Mapping[str, Any]) -> Attention:
    check_target(kind)
    theirs = set(KINDS[kind].__dataclass_fields__) & set(FIELDS)
    for field in fields:
        if field not in theirs:
            has = ", ".join(sorted(theirs)) or "none"
            raise ValueError(f"{kind} has no field {field!r} to be converted with; it has {has}")
    H = given.num_heads
    if "num_kv_heads" in theirs and fields.get("num_kv_heads") is None:
        raise ValueError(f"num_kv_heads is not set: it must divide num_heads={H}")
    D = (given.qkv_features or 0) // H
    fields = {name: value for name, value in fields.items() if value is not None}
    for field, value in fields.items():
        if field in DIVISORS and (value < 1 or H % value):
            raise ValueError(f"{field}={value} must divide num_heads={H}")
        if field != "reuse_keys" and value < 1:
            raise ValueError(f"{field}={value} must be 1 or more")
    if kind in ("mva", "collaborative"):
        fields.setdefault("score_features", D)
    if kind == "mfa":
        fields.setdefault("query_rank", D)
    if kind == "mla":
        fields.setdefault("latent_features", 4 * D)
    made = KINDS[kind](
        num_heads=H,
        qkv_features=given.qkv_features,
        out_features=given.out_features,
        use_bias=given.use_bias,
        normalize_qk=given.normalize_qk,
        **fields,
    )
    made.widths(D)  # refuses fields that do not go together
    return made


def _numbers(module: Attention) -> dict[str, Any]:
    return {name: value for name in FIELDS if (value := getattr(module, name, None))}


def _needs_bias(kind: str, heads: Heads) -> bool:
    if kind in BIASED:
        return True
    queries, output = np.any(heads.query[:, -1]), np.any(heads.bias)
    # `expand` writes a bias of keys as one of queries, which only these kinds take back.
    return bool((queries and kind not in BIASED_QUERIES) or (output and kind not in BIASED_OUTPUT))
