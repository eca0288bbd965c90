"""From the parameters of one attention kind to those of another.

A source gives its heads, and the target's class its `nearest` parameters (`attention.nearest`),
with the moments of real inputs, where there are some; W_o is then fitted to real outputs.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax.attention.kinds import KINDS, make_attention
from mhe_jax.attention.mask import Mask, as_mask
from mhe_jax.attention.module import Attention
from mhe_jax.attention.nearest import Heads, Moments, Parameters
from mhe_jax.config import ConversionConfig, InputError

# Fields of a module that a conversion takes.
FIELDS = tuple(f for f in ConversionConfig.__dataclass_fields__ if f not in ("kind", "rows"))
# Kinds that others are made into.
TARGETS = [kind for kind, cls in KINDS.items() if cls.nearest is not Attention.nearest]
# How strongly W_o is held where it was, as a share of the mean square of what it reads.
RIDGE = 1e-3


@flax.struct.dataclass
class Activations:
    """A batch of what an attention module takes, and the output that it should give."""

    query: Any  # [B, T, M]
    key: Any = None  # [B, S, N]; None for `query`
    mask: Any = Mask()  # or an array, as a call takes it
    valid: Any = None  # [B, T]: the queries that count; None for all
    output: Any = None  # [B, T, P]; None for the output of the module to be converted

    def completed(self, module: Attention, params: Mapping[str, Any]) -> "Activations":
        """A copy with every part; an output that is missing is that of `module`."""
        key = self.query if self.key is None else self.key
        valid = np.ones(np.shape(self.query)[:2], bool) if self.valid is None else self.valid
        mask = as_mask(self.mask, np.shape(self.query)[:1])
        whole = dataclasses.replace(self, key=key, valid=valid, mask=mask)
        if self.output is not None:
            return whole
        return dataclasses.replace(whole, output=_apply(module, params, whole))


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
    score_features + 1 is more than the width of a head), and those with one head into those with
    several. Thin queries and keys (`score_features` of `mha`, `mqa` and `gqa`) have the best scores
    of that rank. None of this holds where rotary positions rotate queries and keys: their products
    then differ at each distance.

    Args:
      params: parameters of one module, Flax's own or `make_attention` of `source`.
      kind: of the parameters to make: `mha`, `sha`, `mqa`, `gqa`, `mhe_add`, `mhe_mul` or `mva`.
      source: the kind of `params`, which is never guessed: one of these, or `collaborative`,
        `skv`, `el` or `gta`.
      activations: inputs of the module. With them, products are weighted by their moments, and W_o
        is fitted to the outputs. Without, inputs count as independent, of variance 1.
      fields: of the new module, where its kind has them: `num_kv_heads`, `num_groups` and
        `score_features`.

    Returns:
      Parameters for `make_attention(kind, num_heads=..., **fields)`, of the same heads and width.
      They have biases where `params` have, and where heads have something that only a bias can
      keep, such as the head embeddings of `mhe_add` in `mha`; `use_bias` of the module must match.

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
      ValueError: another kind; a source whose heads are not linear; a field that the kind does not
        have, or that does not divide the heads; a LayerNorm between projections and scores
        (`normalize_qk`); parameters or activations that hold NaN or infinity.
    """
    given = module_of(params, source)
    if unknown := set(fields) - set(FIELDS):
        raise ValueError(f"{', '.join(unknown)}: a conversion takes {', '.join(FIELDS)}")
    names = "num_heads", "qkv_features", "out_features", "use_bias", "normalize_qk"
    own = {name: getattr(given, name) for name in names}
    made = make_attention(kind, **own, **{f: n for f, n in fields.items() if n is not None})
    shapes = _shapes(made, _inputs(params))  # refuses fields that do not go together
    if kind == source and shapes == jax.tree.map(np.shape, dict(params)):
        return dict(params)
    check_source(given)
    heads = given.heads(params).repeated()
    biases = {"query": heads.query[:, -1], "out": heads.constant}
    lost = any(np.any(biases[role]) for role in biases if role not in made.keeps_bias)
    made = made.clone(use_bias=bool(given.use_bias or lost))
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
    """What `convert` makes, and its `error` with inputs unknown, `before`, and with, `after`."""
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
    """The module of `kind`, whose heads are linear, with these parameters, by names and shapes.

    Raises:
      ValueError: the parameters are not of that kind, or its heads are not linear.
    """
    if kind in KINDS:
        check_source(KINDS[kind])
    shapes = jax.tree.map(np.shape, dict(params))
    try:
        H, D, P = shapes["out"]["kernel"]
        fields = {"use_bias": "bias" in params["out"], **_fields(shapes, kind)}
        module = KINDS[kind](num_heads=H, qkv_features=H * D, out_features=P, **fields)
        same = shapes == _shapes(module, _inputs(params))
    except (KeyError, ValueError, TypeError, IndexError):
        same = False
    if not same:
        raise ValueError(f"these are not the parameters of attention of kind {kind}: {shapes}")
    return module


def check_source(module: Attention | type[Attention]) -> None:
    """Raises InputError for a module that has no plain heads (`Heads`)."""
    reason = module.not_linear
    if module.normalize_qk:
        reason = "normalize_qk has a LayerNorm between its projections and its scores"
    if reason:
        raise InputError(f"{module.kind} is not made into other attention: {reason}")


def _fields(shapes: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of the module that the shapes tell, beyond its heads and widths."""
    own = KINDS[kind].__dataclass_fields__
    query, key = shapes["query"]["kernel"], shapes.get("key_value", shapes.get("key"))
    (H, D, _), S = shapes["out"]["kernel"], query[-1]
    fields: dict[str, Any] = {
        "normalize_qk": any(name.endswith("_ln") for name in shapes),
        # Of all heads together, where they have queries of their own.
        "score_features": query[-1] if "num_groups" in own else None if S == D else S * H,
        "use_key_bias": "key_bias" in shapes,
        "num_groups": query[1] if len(query) == 3 else 1,
        "num_kv_heads": key["kernel"][1] if key else None,
        "score_groups": shapes.get("query_group_embedding", [1])[0],
    }
    return {name: fields[name] for name in fields if name in own}


def _inputs(params: Mapping[str, Any]) -> list[int]:
    """Widths of the inputs of queries, keys and values."""

    def width(*names: str) -> int:
        # Keys and values that no kernel makes are inputs, cut into heads.
        whole = math.prod(np.shape(params["out"]["kernel"])[:2])
        return next((len(params[name]["kernel"]) for name in names if name in params), whole)

    return [width("query"), width("key_value", "key"), width("value", "key_value", "key")]


def _shapes(module: Attention, inputs: Sequence[int]) -> dict[str, Any]:
    """The shapes of the module's parameters for inputs of these widths."""
    given = (jax.ShapeDtypeStruct((1, 1, width), jnp.float32) for width in inputs)
    made = jax.eval_shape(lambda *x: module.init(jax.random.key(0), *x)["params"], *given)
    return jax.tree.map(np.shape, made)


@partial(jax.jit, static_argnums=0)
def _apply(module: Attention, params: Any, a: Activations) -> jax.Array:
    return module.apply({"params": params}, a.query, a.key, mask=a.mask, deterministic=True)  # pyright: ignore[reportReturnType]


def moments_of(activations: Sequence[Activations]) -> Moments:
    """Means and second moments; of keys also about the mean of those that are seen in their row."""
    sums: list[Any] = [sum(part) for part in zip(*map(_sums, activations), strict=True)]
    count, mean, query, keys, about, raw = sums
    mean = mean / count
    return Moments(mean, query / count - np.outer(mean, mean), about / keys, raw / keys)


def _sums(a: Activations) -> tuple[Any, ...]:
    x, y = (np.asarray(part, np.float64) for part in (a.query, a.key))
    seen = np.asarray(a.mask.key_is_seen(x.shape[1], y.shape[1])).reshape(-1, y.shape[1])
    seen = np.broadcast_to(seen, y.shape[:2])
    rows, keys = x[np.asarray(a.valid, bool)], y[seen]
    means = np.einsum("bs,bsn->bn", seen, y) / np.maximum(seen.sum(1), 1)[:, None]
    about = (y - means[:, None])[seen]
    return len(rows), rows.sum(0), rows.T @ rows, len(keys), about.T @ about, keys.T @ keys


def fit_output(module: Attention, params: Any, activations: Sequence[Activations]) -> Any:
    """`params` with W_o (and its bias) fitted to real outputs by least squares.

    `W_o + (FᵀF + λ)⁻¹ Fᵀ (Y - F W_o)`, F the outputs of the heads: an exact W_o stays as it is.
    """
    out = {name: np.asarray(leaf, np.float64) for name, leaf in params["out"].items()}
    H, D, P = out["kernel"].shape
    old = np.concatenate([out[name].reshape(-1, P) for name in ("kernel", "bias") if name in out])
    # The module that gives the outputs of its heads: W_o is the identity.
    alone = {"kernel": jnp.eye(H * D).reshape(H, D, H * D), "bias": jnp.zeros(H * D)}
    wide, heads = module.clone(out_features=H * D), {**params, "out": {n: alone[n] for n in out}}
    gram, right = np.zeros((len(old), len(old))), np.zeros(old.shape)
    for a in activations:
        valid = np.asarray(a.valid, bool)
        F = np.asarray(_apply(wide, heads, a), np.float64)[valid]
        F = np.pad(F, ((0, 0), (0, len(old) - H * D)), constant_values=1)
        gram += F.T @ F
        right += F.T @ (np.asarray(a.output, np.float64)[valid] - F @ old)
    ridge = RIDGE * np.trace(gram) / len(gram)
    new = old + np.linalg.solve(gram + ridge * np.eye(len(gram)), right)
    fitted = {"kernel": new[: H * D].reshape(H, D, P), "bias": new[-1]}
    made = {name: jnp.asarray(fitted[name], leaf.dtype) for name, leaf in params["out"].items()}
    return {**params, "out": made}


def error(module: Attention, params: Any, activations: Sequence[Activations]) -> float:
    """`‖Y - Y'‖ / ‖Y‖` (Frobenius) over the queries that count."""
    missed = whole = 0.0
    for a in activations:
        Y, valid = np.asarray(a.output, np.float64), np.asarray(a.valid, bool)
        missed += np.sum((Y - np.asarray(_apply(module, params, a)))[valid] ** 2)
        whole += np.sum(Y[valid] ** 2)
    return float((missed / max(whole, np.finfo(np.float32).tiny)) ** 0.5)
