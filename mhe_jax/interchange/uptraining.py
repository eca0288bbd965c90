"""A trained run with another attention: a new run, to be evaluated or trained further (uptraining).

The new run has the config of the old one with the new kind, its tokenizer, and a checkpoint of step
0: a fresh optimizer, and the best parameters of the old run. Those of each attention sublayer are
replaced by parameters of the new kind that compute most nearly the same
(`mhe_jax.attention.conversion`).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mhe_jax.attention import conversion
from mhe_jax.config import FIELDS_OF_KINDS, Config, ConversionConfig, InputError
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
    """Makes the run `new` from `run`, as the module says.

    Returns:
      `errors`: for each sublayer, by its path, ‖Y - Y'‖ / ‖Y‖ (Frobenius), Y its output on rows of
      the training text, `before` and `after` the fit on them (None without rows); the numbers of
      parameters in attention, `attention_before` and `attention_after`; `use_bias`, True if the
      run's is or if only biases keep what its attention does; the `kind`; the `step` of the run.

    Raises:
      InputError: there is no such run, or its checkpoint cannot be read or is of another
        tokenizer; `new` exists already; what is asked for is not allowed, or cannot be made from
        this run; its text cannot be read. Nothing has been written.
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
    config = _with_biases(config, biased)
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

    def make(*fitted) -> dict[str, Any]:
        return conversion.convert(given, kind, source=source, activations=fitted, **fields)

    def missed(params: dict[str, Any]) -> float:
        return conversion.error(conversion.module_of(params, kind), params, activations)

    first = make()
    if not activations:
        return first, {"before": None, "after": None}
    best = make(*activations)
    return best, {"before": missed(first), "after": missed(best)}


def _converted(old: Config, new: Path, wanted: ConversionConfig) -> Config:
    """The config of the new run, without biases of its own."""
    if wanted.kind is None:
        raise InputError(f"--kind is not set: takes one of {', '.join(conversion.TARGETS)}")
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
    attention = dataclasses.replace(old.model.attention, kind=wanted.kind, engine="auto", **of_kind)
    roles = {
        role: dataclasses.replace(given, kind=None, engine=None, **dict.fromkeys(FIELDS_OF_KINDS))
        for role, given in vars(old.model.attention_by_role).items()
    }
    by_role = type(old.model.attention_by_role)(**roles)
    model = dataclasses.replace(old.model, attention=attention, attention_by_role=by_role)
    optimizer = old.optimizer
    if wanted.kind not in FIELDS_OF_KINDS["head_embedding_stddev"]:
        optimizer = dataclasses.replace(optimizer, head_embedding_rate=1.0)
    config = dataclasses.replace(old, model=model, optimizer=optimizer, workdir=str(new))
    check(config, trains=False)
    return config


def _with_biases(config: Config, biased: bool) -> Config:
    attention = dataclasses.replace(config.model.attention, use_bias=biased)
    roles = {
        role: dataclasses.replace(given, use_bias=None)
        for role, given in vars(config.model.attention_by_role).items()
    }
    by_role = type(config.model.attention_by_role)(**roles)
    model = dataclasses.replace(config.model, attention=attention, attention_by_role=by_role)
    return dataclasses.replace(config, model=model)


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
