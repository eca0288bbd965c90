"""The kinds of attention: a class in a file here, and an entry of `mhe_jax.config.model`."""

import dataclasses
import importlib
import pkgutil

from mhe_jax.attention.module import Attention
from mhe_jax.config import InputError
from mhe_jax.config.model import KINDS as ENTRIES


def _classes() -> dict[str, type[Attention]]:
    """The subclasses of `Attention` in the files here, by their `kind`."""
    found = {}
    for file in pkgutil.iter_modules(__path__):
        for x in vars(importlib.import_module(f"{__name__}.{file.name}")).values():
            if isinstance(x, type) and issubclass(x, Attention) and "kind" in vars(x):
                found[x.kind] = x
    return {kind: found[kind] for kind in ENTRIES}


KINDS = _classes()


def make_attention(kind: str, **fields) -> Attention:
    """The module of `kind`, with `fields` as in `flax.linen.MultiHeadDotProductAttention`.

    Raises:
      InputError: an unknown kind, or a field that the kind does not have.
    """
    if kind not in KINDS:
        raise InputError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    allowed = [f.name for f in dataclasses.fields(KINDS[kind]) if f.init]
    for field in fields:
        if field not in allowed:
            owners = [k for k, m in KINDS.items() if field in m.__dataclass_fields__]
            whose = f"it belongs to {', '.join(owners)}" if owners else f"it has {allowed}"
            raise InputError(f"{kind} has no field {field!r}; {whose}")
    return KINDS[kind](**fields)
