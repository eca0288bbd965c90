"""Command lines of train.py, each parsed once: that is most of the time of who plans many runs."""

import functools

from mhe_jax.cli.arguments import parse_train_arguments
from mhe_jax.config import Config


@functools.cache
def parsed(arguments: tuple[str, ...]) -> Config:
    return parse_train_arguments(list(arguments))
