"""The registry of attention kinds: each is a file here and an entry of `mhe_jax.config.kinds`."""

import importlib

from mhe_jax.attention.module import Attention
from mhe_jax.config.kinds import KINDS as ENTRIES


def _class_of(kind: str) -> type[Attention]:
    """The subclass with that `kind` in the file of that name."""
    found = vars(importlib.import_module(f"{__name__}.{kind}")).values()
    classes = (x for x in found if isinstance(x, type) and issubclass(x, Attention))
    return next(cls for cls in classes if vars(cls).get("kind") == kind)


KINDS: dict[str, type[Attention]] = {kind: _class_of(kind) for kind in ENTRIES}
