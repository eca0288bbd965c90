"""A trained run with another attention: a new run, to be evaluated or trained further (uptraining).

The new run has the config of the old one with the new kind, its tokenizer, and a checkpoint of step
0: a fresh optimizer, and the best parameters of the old run. Those of each attention sublayer are
replaced by parameters of the new kind that compute most nearly the same
(`mhe_jax.attention.conversion`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mhe_jax.attention import KINDS, conversion
from mhe_jax.config import FIELDS_OF_KINDS, Config, ConversionConfig, InputError, ModelConfig
from mhe_jax.config.files import TOKENIZER
from mhe_jax.config.loading import config_of
from mhe_jax.config.places import path_of
from mhe_jax.config.rules import check
from mhe_jax.interchange.activations import Recorder, Sublayer, at, sublayers
from mhe_jax.model.stack import count_parameters, role_of, stack_layers, unroll_layers
from mhe_jax.training import sharding
from mhe_jax.training.run.fresh import check_new_run, write_run
from mhe_jax.training.run.warm_start import read_run


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
    recorder = Recorder(old, tokenizer, wanted.rows, found)
    fields = {f: value for f in conversion.FIELDS if (value := getattr(wanted, f)) is not None}
    made: dict[Sublayer, Any] = {}
    errors: dict[str, Any] = {}
    for path in sublayers(found):
        given, source = at(found, path), old.model.attention_for(role_of(path)).kind
        made[path], errors["/".join(path)] = _sublayer(
            given, str(wanted.kind), source, recorder.activations(path), fields
        )
    biased = any("bias" in one["out"] for one in made.values())
    model = _with_attention(config.model, {"use_bias": biased})
    config = dataclasses.replace(config, model=model)
    for path, one in made.items():
        at(found, path[:-1])[path[-1]] = _with_zeros(one) if biased else one
    found = stack_layers(found) if old.model.scan_layers else found
    pieces = (run / TOKENIZER).read_bytes() if old.model.has_pieces else None
    write_run(config, found, mesh, tokenizer.key, pieces)
    before, after = (count_parameters(tree)["attention"] for tree in (params, found))
    counts = {"attention_before": before, "attention_after": after}
    return {"step": step, "kind": wanted.kind, "use_bias": biased, **counts, "errors": errors}


def _sublayer(
    given: Mapping[str, Any], kind: str, source: str, activations: list, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, float | None]]:
    """The parameters of one sublayer, and its errors before and after the fit."""
    convert = functools.partial(conversion.convert, given, kind, source=source, **fields)
    first = convert()
    if not activations:
        return first, {"before": None, "after": None}
    best = convert(activations=activations)
    before, after = (
        conversion.error(conversion.module_of(params, kind), params, activations)
        for params in (first, best)
    )
    return best, {"before": before, "after": after}


def _converted(old: Config, new: Path, wanted: ConversionConfig) -> Config:
    """The config of the new run, without biases of its own."""
    if wanted.kind is None:
        raise InputError(f"--kind is not set: takes one of {', '.join(KINDS)}")
    conversion.check_target(wanted.kind)
    for kind in old.kinds.values():
        conversion.check_source(kind)
    if wanted.rows < 0:
        raise InputError(f"--rows is {wanted.rows}: takes 0 or more")
    if wanted.rows and not old.data.train:
        raise InputError(
            f"data.train of {old.workdir} is not set, and --rows is {wanted.rows}: without a text "
            "it takes --rows 0"
        )
    if old.model.kronecker.attention is not None:
        raise InputError(f"{old.workdir} is factorized: takes a run with dense attention")
    for role in old.facts.roles:
        if old.model.attention_for(role).normalize_qk:
            raise InputError(
                f"{old.workdir} has normalize_qk: its LayerNorm lies between the projections and "
                "the scores, and no other kind has the same"
            )
    if str(old.model.positions) == "rotary":
        raise InputError(
            f"model.positions is 'rotary' in {old.workdir}: takes a run with learned or sinusoidal "
            "positions; queries and keys that turn cannot be mapped into each other's bases"
        )
    taken = {f: getattr(wanted, f) for f in conversion.FIELDS}
    of_kind = {**dict.fromkeys(FIELDS_OF_KINDS), **taken}
    # An engine named for the old kind may refuse every call of the new one.
    model = _with_attention(old.model, {"kind": wanted.kind, "engine": "auto", **of_kind})
    optimizer = old.optimizer
    if wanted.kind not in FIELDS_OF_KINDS["head_embedding_stddev"]:
        optimizer = dataclasses.replace(optimizer, head_embedding_rate=1.0)
    config = dataclasses.replace(old, model=model, optimizer=optimizer, workdir=str(new))
    check(config, trains=False)
    return config


def _with_attention(model: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    """The model with other fields of attention, in all roles."""
    roles = vars(model.attention_by_role)
    same = {role: dataclasses.replace(of, **dict.fromkeys(changes)) for role, of in roles.items()}
    attention = dataclasses.replace(model.attention, **changes)
    by_role = dataclasses.replace(model.attention_by_role, **same)
    return dataclasses.replace(model, attention=attention, attention_by_role=by_role)


def _with_zeros(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of one sublayer with a bias for each projection that can have one."""
    if "bias" in params["out"]:
        return dict(params)
    result = {}
    for name, value in params.items():
        if isinstance(value, Mapping) and name != "key_bias" and "bias" not in value:
            shape = value["kernel"].shape[2 if name == "out" else 1 :]
            value = {**value, "bias": jnp.zeros(shape, value["kernel"].dtype)}
        result[name] = value
    return result
