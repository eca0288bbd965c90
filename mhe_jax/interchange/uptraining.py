"""A trained run with another attention: a new run, to be evaluated or trained further (uptraining).

Its parameters are the best of the old run, and those of each attention sublayer are replaced by
parameters of the new kind that compute most nearly the same (`mhe_jax.attention.conversion`).
"""

import dataclasses
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from mhe_jax import tasks
from mhe_jax.attention import Activations, conversion
from mhe_jax.attention.mask import as_mask
from mhe_jax.config import FIELDS_OF_KINDS, Config, ConversionConfig, InputError, ModelConfig
from mhe_jax.config.data import PAD
from mhe_jax.config.fields import set_field
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.data import AnyTokenizer
from mhe_jax.model import count_parameters, stack_layers, unroll_layers
from mhe_jax.model.layers import attention_module, check_attention
from mhe_jax.model.stack import ATTENTION, role_of
from mhe_jax.training import sharding
from mhe_jax.training.from_run import check_new_run, read_run, write_run

# Where a sublayer is in the parameters: ("decoder", "layer_0", "cross_attention").
Sublayer = tuple[str, ...]


def convert(run: str | Path, new: str | Path, wanted: ConversionConfig) -> dict[str, Any]:
    """Makes the run `new` from `run`, as the module says, whole or not at all.

    Returns, besides counts: `errors`, for each sublayer, by its path, ‖Y - Y'‖ / ‖Y‖ (Frobenius), Y
    its output on rows of the training text, `before` and `after` the fit on them (None without
    rows); `use_bias`, True if the run's is or if only biases keep what its attention does.
    """
    run, new = path_of(run), path_of(new)
    old = config_of(run)
    check_new_run(new, run)
    config = _converted(old, new, wanted)
    mesh = sharding.mesh_at_hand(config, "converting")
    params, step, tokenizer = read_run(run, old, mesh)
    params = jax.device_get(params)
    found = unroll_layers(params)
    batches = text_batches(old, tokenizer, wanted.rows)
    made, errors = {}, {}
    for path in sublayers(found):
        made[path], errors["/".join(path)] = conversion.convert_and_fit(
            reduce(getitem, path, found),
            str(wanted.kind),
            source=old.model.attention_for(role_of(path)).kind,
            activations=activations(old, found, batches, path),
            **{f: value for f in conversion.FIELDS if (value := getattr(wanted, f)) is not None},
        )
    biased = any("bias" in one["out"] for one in made.values())
    config = dataclasses.replace(config, model=_with(config.model, {"use_bias": biased}))
    for path, one in made.items():
        reduce(getitem, path[:-1], found)[path[-1]] = _with_zeros(one) if biased else one
    found = stack_layers(found) if old.model.scan_layers else found
    pieces = (run / TOKENIZER).read_bytes() if old.model.has_pieces else None
    write_run(config, found, mesh, tokenizer.key, pieces)
    before, after = (count_parameters(tree)["attention"] for tree in (params, found))
    counts = {"attention_before": before, "attention_after": after}
    return {"step": step, "kind": wanted.kind, "use_bias": biased, **counts, "errors": errors}


def _converted(old: Config, new: Path, wanted: ConversionConfig) -> Config:
    """The config of the new run, without biases of its own."""
    if wanted.kind is None:
        raise InputError("--kind is not set: takes the attention to convert to")
    if wanted.kind not in conversion.TARGETS:
        takes = ", ".join(conversion.TARGETS)
        raise InputError(f"--kind is {wanted.kind}, which nothing is converted to: takes {takes}")
    if wanted.rows and not old.data.train:
        raise InputError(f"data.train of {old.workdir} is not set: --rows is {wanted.rows}, not 0")
    if old.model.kronecker.attention is not None:
        raise InputError(f"{old.workdir} is factorized: takes a run with dense attention")
    if old.model.positions == "rotary":  # what turns cannot be mapped into another basis
        raise InputError(
            f"model.positions is 'rotary' in {old.workdir}: takes a run with learned or sinusoidal"
        )
    for role in old.facts.roles:
        conversion.check_source(attention_module(old.model, role))
    of_kind = dict.fromkeys(FIELDS_OF_KINDS) | {f: getattr(wanted, f) for f in conversion.FIELDS}
    # An engine named for the old kind may refuse every call of the new one.
    model = _with(old.model, {"kind": wanted.kind, "engine": "auto", **of_kind})
    optimizer = old.optimizer
    if wanted.kind not in FIELDS_OF_KINDS["head_embedding_stddev"]:
        optimizer = dataclasses.replace(optimizer, head_embedding_rate=1.0)
    config = dataclasses.replace(old, model=model, optimizer=optimizer, workdir=str(new))
    check(config, trains=False)
    check_attention(config)
    return config


def _with(model: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    """The model with other fields of attention, in all roles."""
    roles = vars(model.attention_by_role)
    same = {role: dataclasses.replace(of, **dict.fromkeys(changes)) for role, of in roles.items()}
    attention = dataclasses.replace(model.attention, **changes)
    by_role = dataclasses.replace(model.attention_by_role, **same)
    return dataclasses.replace(model, attention=attention, attention_by_role=by_role)


def _with_zeros(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of one sublayer with a bias for each projection that can have one."""
    found = dict(params)
    for name, value in params.items() if "bias" not in params["out"] else ():
        if isinstance(value, Mapping) and name != "key_bias":
            shape = value["kernel"].shape[2 if name == "out" else 1 :]
            found[name] = {"bias": jnp.zeros(shape, value["kernel"].dtype), **value}
    return found


def sublayers(params: Mapping[str, Any]) -> list[Sublayer]:
    """All attention sublayers of a model with unrolled layers, in the order of computation."""
    paths: Any = flatten_dict(params)
    found = {path[: i + 1] for path in paths for i, name in enumerate(path) if name in ATTENTION}
    return sorted(found, key=lambda p: ("encoder" not in p, int(p[-2][6:]), ATTENTION.index(p[-1])))


def text_batches(config: Config, tokenizer: AnyTokenizer, rows: int) -> list[dict[str, Any]]:
    """Batches of the training text with `rows` rows, or a few more."""
    found, read = [], tasks.of(config).read
    config = set_field(config, "data.cache_directory", None)  # as in `evaluate`
    batches = tasks.train_batches(config, tokenizer) if rows else None
    while batches is not None and sum(len(batch["weights"]) for batch in found) < rows:
        found.append(read(batches.batch(len(found))))
    return found


def activations(
    config: Config, params: Any, batches: list[dict[str, Any]], path: Sublayer
) -> list[Activations]:
    """Inputs and outputs of one sublayer of a model with unrolled layers, one value per batch."""
    task = tasks.of(config)
    config = set_field(set_field(config, "model.scan_layers", False), "model.remat", False)
    model = task.model(config.model)
    taken: list[Activations] = []

    def watch(call, args, kwargs, context):
        output = call(*args, **kwargs)
        if context.module.path == path and context.method_name == "__call__":
            query, key = args[0], args[1] if len(args) > 1 else None
            mask = as_mask(kwargs.get("mask"), query.shape[:1])
            taken.append(jax.device_get(Activations(query, key, mask, valid, output)))
        return output

    for batch in batches:
        own = np.asarray(batch[task.token_inputs[0 if "encoder" in path else -1]])
        valid = own.reshape(-1, own.shape[-1]) != PAD
        named = {name: batch[name] for name in task.keywords if name in batch}
        inputs = [batch[name] for name in task.inputs]
        with nn.intercept_methods(watch):
            model.apply({"params": params}, *inputs, **named, deterministic=True)
    return taken
