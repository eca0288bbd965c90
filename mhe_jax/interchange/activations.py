"""Inputs and outputs of a trained model's attention sublayers on rows of its training text."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from mhe_jax import tasks
from mhe_jax.attention import Activations
from mhe_jax.attention.mask import as_mask
from mhe_jax.config import Config
from mhe_jax.config.data import PAD
from mhe_jax.config.fields import set_field
from mhe_jax.data import AnyTokenizer
from mhe_jax.model.stack import ATTENTION

# Where a sublayer is in the parameters: ("decoder", "layer_0", "cross_attention").
Sublayer = tuple[str, ...]


def sublayers(params: Mapping[str, Any], path: Sublayer = ()) -> list[Sublayer]:
    """All attention sublayers of a model with unrolled layers, in the order of computation."""
    found: list[Sublayer] = []
    for name, value in params.items():
        if name in ATTENTION:
            found.append((*path, name))
        elif isinstance(value, Mapping):
            found += sublayers(value, (*path, name))
    if path:
        return found
    return sorted(found, key=lambda p: ("encoder" not in p, int(p[-2][6:]), ATTENTION.index(p[-1])))


def at(tree: Mapping[str, Any], path: Sublayer) -> Any:
    """The subtree at `path`."""
    for name in path:
        tree = tree[name]
    return tree


class _Reached(Exception):
    """All that is asked for has been computed."""


class Recorder:
    """Runs a model with unrolled layers on `rows` rows of training text, or a few more."""

    def __init__(self, config: Config, tokenizer: AnyTokenizer, rows: int, params: Any):
        self.task, self.params = tasks.of(config), params
        config = set_field(set_field(config, "model.scan_layers", False), "model.remat", False)
        config = set_field(config, "data.cache_directory", None)  # as in `evaluate`
        self.model = self.task.model(config.model)
        self.batches: list[dict[str, Any]] = []
        count = 0
        if rows:
            batches = tasks.train_batches(config, tokenizer)
        while count < rows:
            batch = self.task.read(batches.batch(len(self.batches)))
            self.batches.append(batch)
            count += len(batch["weights"])

    def activations(self, path: Sublayer) -> list[Activations]:
        """The activations of one sublayer, one value per batch."""
        return [self._of(path, batch) for batch in self.batches]

    def _of(self, path: Sublayer, batch: dict[str, Any]) -> Activations:
        taken: list[Activations] = []
        tokens = self.task.token_inputs
        own = np.asarray(batch[tokens[0] if "encoder" in path else tokens[-1]])
        valid = own.reshape(-1, own.shape[-1]) != PAD

        def watch(call, args, kwargs, context):
            output = call(*args, **kwargs)
            if context.module.path != path or context.method_name != "__call__":
                return output
            query, key = args[0], args[1] if len(args) > 1 else None
            mask = as_mask(kwargs.get("mask"), query.shape[:1])
            taken.append(Activations(query, key, mask, valid, output))
            raise _Reached

        named = {name: batch[name] for name in self.task.keywords if name in batch}
        inputs = [batch[name] for name in self.task.inputs]
        try:
            with nn.intercept_methods(watch):
                self.model.apply({"params": self.params}, *inputs, **named, deterministic=True)
        except _Reached:
            pass
        return jax.device_get(taken[0])
