"""From the parameters of one attention kind to those of another.

heads.py      every kind as heads of its own, exactly
factors.py    the best factors that several heads can share
kinds.py      the parameters of each kind that come closest to given heads
fitting.py    what real inputs say
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mhe_jax.attention.conversion.fitting import Activations, error, fit_output, moments_of
from mhe_jax.attention.conversion.heads import Heads, expand
from mhe_jax.attention.conversion.kinds import Moments, Target, closest
from mhe_jax.attention.kinds import KINDS
from mhe_jax.attention.module import Attention
from mhe_jax.config import InputError

__all__ = ["Activations", "convert", "error", "module_of", "require_heads"]

# Kinds that have room for a bias of the queries without `use_bias`, and of the output.
BIASED_QUERIES, BIASED_OUTPUT = ("mhe_add", "mva"), ("mhe_add",)
# Kinds without heads `x Q[h]`, `y K[h]` and `y V[h]`, and why.
WITHOUT_HEADS = {
    "mla": "a norm lies between its inputs and its keys and values",
    "tpa": "its queries, keys and values are products of two maps of its inputs",
}


def convert(
    params: Mapping[str, Any],
    kind: str,
    *,
    source: str = "mha",
    activations: Sequence[Activations] = (),
    **fields: Any,
) -> dict[str, Any]:
    """Parameters of `make_attention(kind, ...)` that do nearest what those of another module do.

    Scores are `x Q[h] K[h]ᵀ yᵀ`, and a head adds `y V[h] O[h]`: the parameters of `kind` are those
    whose products come closest, by least squares (`kinds.py`). A kind that has room for another
    takes it exactly: each into `mha` (but `mva`, where score_features + 1 is more than the width of
    a head), those with one head into those with several, and `mha` into none. None of it holds
    where rotary positions turn queries and keys: their products are others at each distance.

    Args:
      params: of one module, as Flax's own or as `make_attention` of `source` has them.
      kind: of the parameters that are made.
      source: the kind of `params`.
      activations: inputs that the module gets. Products are weighted by their moments then, and
        W_o is fitted to the outputs. Without any, inputs count as independent, of variance 1.
      fields: `num_kv_heads`, `num_groups`, `score_groups` and `score_features` of the new module,
        where its kind has them.

    Returns:
      Parameters for `make_attention(kind, num_heads=..., **fields)`, of the same heads and width.
      They have biases where `params` have, and where heads have what only a bias can keep, such as
      the head embeddings of `mhe_add` in `mha`; `use_bias` there must be
      as they are.

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
      ValueError: an unknown kind, or one `WITHOUT_HEADS`; a field that the kind does not have, or
        that does not divide the heads; a LayerNorm between projections and scores
        (`normalize_qk`).
    """
    for one in (source, kind):
        require_heads(one)
    given = module_of(params, source)
    made = _target_module(kind, given, fields)
    if kind == source and made == given:
        return dict(params)
    heads = expand(params, source)
    biased = given.use_bias or _needs_bias(kind, heads)
    made = made.clone(use_bias=biased)
    target = Target(kind, heads.value.shape[-1], use_bias=biased, **_numbers(made))
    whole = [a.completed(given, params) for a in activations]
    moments = moments_of(whole) if whole else Moments.unit(heads)
    found = closest(heads, target, moments)
    dtype = params["out"]["kernel"].dtype
    found = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), found)
    return fit_output(made, found, whole) if whole else found


def require_heads(kind: str) -> None:
    """Raises InputError for a kind whose heads are no linear maps of its inputs."""
    if kind in WITHOUT_HEADS:
        raise InputError(f"{kind} is neither converted nor exported: {WITHOUT_HEADS[kind]}")


def module_of(params: Mapping[str, Any], kind: str) -> Attention:
    """The module of `kind` that has these parameters, by their names and shapes.

    Raises:
      ValueError: they are not of that kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    try:
        H, D, _ = np.shape(params["out"]["kernel"])
        query = np.shape(params["query"]["kernel"])
        fields: dict[str, Any] = {"use_bias": "bias" in params["out"]}
        if kind == "gqa":
            fields["num_kv_heads"] = np.shape(params["key"]["kernel"])[1]
        if kind in ("mhe_add", "mhe_mul", "mva") and len(query) == 3:
            fields["num_groups"] = query[1]
        if "query_group_embedding" in params:
            fields["score_groups"] = len(params["query_group_embedding"])
        if kind == "mva":
            fields["score_features"] = query[-1]
        fields["normalize_qk"] = "query_ln" in params or "key_ln" in params
        module = KINDS[kind](num_heads=H, qkv_features=H * D, **fields)
        inputs = [(1, 1, query[0])]
        if kind != "el":
            key = params["key_value" if kind == "skv" else "key"]
            inputs.append((1, 1, np.shape(key["kernel"])[0]))
        if "value" in params:
            inputs.append((1, 1, np.shape(params["value"]["kernel"])[0]))
        module = module.clone(out_features=np.shape(params["out"]["kernel"])[2])
        shapes = jax.eval_shape(
            lambda *x: module.init(jax.random.key(0), *x)["params"],
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in inputs),
        )
        same = jax.tree.map(np.shape, dict(params)) == jax.tree.map(np.shape, shapes)
    except (KeyError, ValueError, TypeError, IndexError):
        same = False
    if not same:
        raise ValueError(f"these are not the parameters of an attention module of kind {kind}")
    return module


def _target_module(kind: str, given: Attention, fields: Mapping[str, Any]) -> Attention:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    allowed = {f.name for f in dataclasses.fields(Target)} - {"kind", "width", "use_bias"}
    theirs = set(KINDS[kind].__dataclass_fields__) & allowed
    for field in fields:
        if field not in theirs:
            has = ", ".join(sorted(theirs)) or "none"
            raise ValueError(f"{kind} has no field {field!r} to be converted with; it has {has}")
    H = given.num_heads
    if kind == "gqa" and fields.get("num_kv_heads") is None:
        raise ValueError(f"num_kv_heads is not set: it must divide num_heads={H}")
    for field, value in fields.items():
        if field != "score_features" and value is not None and (value < 1 or H % value):
            raise ValueError(f"{field}={value} must divide num_heads={H}")
    fields = {name: value for name, value in fields.items() if value is not None}
    if kind == "mva":
        fields.setdefault("score_features", (given.qkv_features or 0) // H)
    return KINDS[kind](
        num_heads=H,
        qkv_features=given.qkv_features,
        out_features=given.out_features,
        use_bias=given.use_bias,
        normalize_qk=given.normalize_qk,
        **fields,
    )


def _numbers(module: Attention) -> dict[str, Any]:
    names = ("num_kv_heads", "num_groups", "score_groups", "score_features")
    return {name: getattr(module, name) for name in names if getattr(module, name, None)}


def _needs_bias(kind: str, heads: Heads) -> bool:
    queries, output = np.any(heads.query[:, -1]), np.any(heads.bias)
    # `expand` writes a bias of mva's keys as one of queries, which mva alone takes back.
    return bool((queries and kind not in BIASED_QUERIES) or (output and kind not in BIASED_OUTPUT))
