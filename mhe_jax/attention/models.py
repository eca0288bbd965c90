"""Models that others wrote, Linen or NNX, with another attention."""

import dataclasses
import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mhe_jax.attention.conversion import Activations, convert
from mhe_jax.attention.fields import FlaxFields
from mhe_jax.attention.kinds import make_attention
from mhe_jax.attention.mask import Mask, as_mask
from mhe_jax.attention.module import Attention
from mhe_jax.attention.nnx import Attention as NNXAttention
from mhe_jax.attention.nnx import make_attention as make_nnx_attention
from mhe_jax.config import InputError

LINEN = nn.MultiHeadDotProductAttention, Attention
NNX = nnx.MultiHeadAttention, NNXAttention
SOFTMAX = None, nn.dot_product_attention, nnx.dot_product_attention
# What a new module takes over; it makes products and softmax by itself.
FIELDS = {field.name for field in dataclasses.fields(FlaxFields)} - {
    "name",
    "parent",
    "attention_fn",
}
FIELDS |= {"engine", "projection", "rotary"}


def convert_model(
    model: Any, params: Any, kind: str, batches: Iterable[Any], **fields: Any
) -> tuple[Any, Any]:
    """The model with each attention of `kind`, and its parameters: a start for training on.

    Each `flax.linen.MultiHeadDotProductAttention`, `flax.nnx.MultiHeadAttention` or module of
    `make_attention` that the batches pass through is converted from what it sees, by `convert`;
    scanned and stacked layers one by one. All else stays: other parameters, names, methods.

    Args:
      model: a Linen or an NNX module; it stays as it is.
      params: of a Linen model, or its variables with other collections; None for NNX.
      kind: of the new attention.
      batches: what the model is called with: for each batch an array, a tuple of arguments, or a
        dictionary of keyword arguments. A few hundred tokens do; padding is better left out.
      fields: of the new modules, as `convert` takes them.

    Returns:
      A Linen module, of a subclass of the model's class, and its parameters or variables; or an NNX
      module, and its `nnx.Param`s.

    Examples:
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.Dense(3)(nn.MultiHeadDotProductAttention(num_heads=2)(x))
      >>> x = jax.random.normal(jax.random.key(0), (4, 6, 8))
      >>> params = Model().init(jax.random.key(1), x)["params"]
      >>> model, params = convert_model(Model(), params, "mva", [x])
      >>> model.apply({"params": params}, x).shape
      (4, 6, 3)

    Raises:
      ValueError: no attention is passed through; one with an `attention_fn` of its own, or whose
        values are of other inputs than its keys; what `convert` raises.
    """
    if isinstance(model, nnx.Module):
        return _convert_nnx(nnx.clone(model), kind, batches, fields)
    variables = params if "params" in params else {"params": params}
    model, converted = _convert_linen(model, variables, kind, batches, fields)
    return model, {**params, "params": converted} if variables is params else converted


class _Seen:
    """What each attention saw: for each batch its calls, in order, and so those of its layers."""

    def __init__(self):
        self.inputs: dict[Any, list[list[Activations]]] = defaultdict(list)

    def run(self, call: Callable[..., Any], batches: Iterable[Any]) -> None:
        for batch in batches:
            self.now: dict[Any, list[Activations]] = defaultdict(list)
            if isinstance(batch, Mapping):
                call(**batch)
            else:
                call(*batch if isinstance(batch, tuple) else (batch,))
            jax.effects_barrier()
            for place, seen in self.now.items():
                self.inputs[place].append(seen)
        if not self.inputs:
            raise InputError("batches: no attention that can be converted was called with them")

    def note(
        self, place, inputs_q, inputs_k=None, inputs_v=None, mask=None, is_causal=False, **_
    ) -> None:
        """Also from inside of a scan or of jit."""
        if inputs_v is not None and inputs_v is not inputs_k:
            raise InputError(f"attention {place}: its values are of other inputs than its keys")
        mask = as_mask(mask, inputs_q.shape[:-2])
        mask = mask & Mask.causal() if is_causal else mask
        x, y = (a if a is None else a.reshape(-1, *a.shape[-2:]) for a in (inputs_q, inputs_k))

        def keep(seen: Activations) -> None:
            self.now[place].append(jax.tree.map(np.asarray, seen))

        jax.debug.callback(keep, Activations(x, y, mask), ordered=True)

    def converted(self, place, params, kind: str, fields: dict, source: str) -> dict[str, Any]:
        """Of one module, or of as many as its parameters have leading axes for."""
        stacked = np.shape(params["out"]["kernel"])[:-3]
        layers, found = math.prod(stacked), []
        flat = jax.tree.map(lambda a: np.reshape(a, (layers, *a.shape[len(stacked) :])), params)
        for layer in range(layers):
            inputs = [seen[len(seen) // layers * layer :] for seen in self.inputs[place]]
            inputs = [a for seen in inputs for a in seen[: len(seen) // (layers - layer)]]
            own = jax.tree.map(lambda a: a[layer], flat)  # noqa: B023
            found.append(convert(own, kind, source=source, activations=inputs, **fields))
        return jax.tree.map(lambda *a: jnp.stack(a).reshape(*stacked, *a[0].shape), *found)


def _fields_of(module: Any, fields: dict[str, Any], use_bias: bool) -> dict[str, Any]:
    """The fields of the module that takes the place of this one."""
    if getattr(module, "attention_fn", None) not in SOFTMAX:
        raise InputError("attention_fn: attention with one of its own is not converted")
    taken = {name: getattr(module, name) for name in FIELDS if hasattr(module, name)}
    if isinstance(module, (LINEN[0], NNX[0])) and taken["broadcast_dropout"]:
        taken["broadcast_dropout"] = "batch"  # what True means there
    return taken | fields | {"use_bias": use_bias}


# Linen: an interceptor of method calls reads the inputs of attention, and later takes its place.


def _at_attention(do: Callable[..., Any]):
    """An interceptor: `do(module, call, arguments)` instead of each call of attention."""
    inside = set()

    def intercept(call, args, kwargs, context):
        module = context.module
        ours = isinstance(module, LINEN) and context.method_name == "__call__"
        if not ours or module.path in inside:  # a subclass calls its base, `do` another module
            return call(*args, **kwargs)
        given = inspect.signature(type(module).__call__).bind(module, *args, **kwargs).arguments
        inside.add(module.path)
        try:
            return do(
                module, functools.partial(call, *args, **kwargs), dict(list(given.items())[1:])
            )
        finally:
            inside.remove(module.path)

    return intercept


def _convert_linen(model: nn.Module, variables, kind: str, batches, fields) -> tuple[Any, Any]:
    seen, modules, biases = _Seen(), {}, {}

    def note(module, call, given):
        if module.decode:
            raise InputError(f"attention {module.path}: takes decode=False while it is converted")
        modules[module.path] = module
        seen.note(module.path, **given)
        return call()

    with nn.intercept_methods(_at_attention(note)):
        apply = functools.partial(model.apply, variables, rngs={"dropout": jax.random.key(0)})
        seen.run(apply, batches)
    params = nn.unbox(variables["params"])
    for path, module in modules.items():
        own = functools.reduce(lambda tree, name: tree[name], path, params)
        converted = seen.converted(path, own, kind, fields, getattr(module, "kind", "mha"))
        params = _replaced(params, path, converted)
        biases[path] = "bias" in converted["out"]
        _fields_of(module, fields, biases[path])  # refuses what is not converted

    def instead(root, module, call, given):
        """With the fields of this call, such as `decode`, which may differ from the last one's."""
        if (use_bias := biases.get(module.path[len(root.path) :])) is None:
            return call()
        fields_now = _fields_of(module, fields, use_bias)
        return make_attention(kind, parent=module.scope, **fields_now)(**given)

    def with_attention(method):
        @functools.wraps(method, updated=())
        def run(self, *args, **kwargs):
            with nn.intercept_methods(_at_attention(functools.partial(instead, self))):
                return method(self, *args, **kwargs)

        return run

    cls = type(model)
    of_model = [c for c in cls.__mro__ if c not in nn.Module.__mro__]
    names = {name for c in of_model for name, x in vars(c).items() if inspect.isfunction(x)}
    names = {n for n in names if n == "__call__" or not n.startswith("_")} - {"setup"}
    own = {name: with_attention(getattr(cls, name)) for name in names}
    given = [f.name for f in dataclasses.fields(model) if f.init and f.name != "parent"]
    return type(cls.__name__, (cls,), own)(**{n: getattr(model, n) for n in given}), params


def _replaced(tree: Mapping[str, Any], path: Sequence[str], new: Any) -> Any:
    return {**tree, path[0]: _replaced(tree[path[0]], path[1:], new)} if path else new


# NNX: a module of attention becomes one that tells its inputs, and later one of the new kind.


def _convert_nnx(model: nnx.Module, kind: str, batches, fields) -> tuple[Any, Any]:
    seen, modules = _Seen(), [m for _, m in nnx.iter_graph(model) if isinstance(m, NNX)]
    for place, module in enumerate(modules):
        module.__class__ = _telling(type(module), functools.partial(seen.note, place))
    seen.run(model, batches)
    for place, old in enumerate(modules):
        old.__class__ = old.__class__.__bases__[0]
        if place not in seen.inputs:
            continue
        if isinstance(old, NNXAttention):
            source = old.linen_class.kind
        else:
            source = "mha" if old.num_kv_heads == old.num_heads else "gqa"
        params = nnx.to_pure_dict(nnx.state(old, nnx.Param))
        converted = seen.converted(place, params, kind, fields, source)
        widths = {name: getattr(old, name) for name in ("in_features", "in_kv_features")}
        own = _fields_of(old, fields, "bias" in converted["out"]) | widths
        new = make_nnx_attention(kind, rngs=nnx.Rngs(0), **own)
        nnx.update(new, converted)
        new.rngs = old.rngs
        # In its place, wherever the model holds it.
        old.__class__ = type(new)  # pyright: ignore[reportAttributeAccessIssue]
        vars(old).clear()
        vars(old).update(vars(new))
    return model, nnx.state(model, nnx.Param)


def _telling(cls: type, note: Callable[..., None]) -> type:
    def call(self, *args, **kwargs):
        given = inspect.signature(cls.__call__).bind(self, *args, **kwargs).arguments
        note(**dict(list(given.items())[1:]))
        return cls.__call__(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call})
