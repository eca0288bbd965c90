"""Parameter-efficient attention in JAX and Flax, and the training code around it.

    mhe_jax.load("runs/multi30k")                      # a trained run: translate, generate, ...
    mhe_jax.make_attention("mhe_mul", num_heads=12)    # a module for your own model
    mhe_jax.InputError                                 # a user's mistake, in one line

`python -m mhe_jax --help` lists the commands. Importing this package loads nothing else; the names
above are loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhe_jax.attention import make_attention
    from mhe_jax.config import InputError
    from mhe_jax.evaluation import load

__version__ = "0.1.0"

__all__ = ["InputError", "load", "make_attention"]

_HOMES = {
    "InputError": "mhe_jax.config",
    "load": "mhe_jax.evaluation",
    "make_attention": "mhe_jax.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
