"""Rules between the fields of a config, checked before anything is compiled.

Each broken rule is one line: the dotted name of a field, its value, and what is allowed.
"""

import math
from typing import Any

from mhe_jax.config import (
    FIELDS_OF_KINDS,
    AttentionConfig,
    Config,
    InputError,
    MeshConfig,
    Role,
    Task,
)

ROLES: dict[Task, tuple[Role, ...]] = {
    "mlm": ("encoder",),
    "lm": ("decoder",),
    "translation": ("encoder", "decoder", "cross"),
}
PAIR_SUFFIXES = (".tsv", ".tsv.gz", ".tsv.xz")


def check(config: Config) -> None:
    """Raises InputError for the first rule that the config breaks."""
    _check_ranges(config)
    _check_attention(config)
    _check_data(config)
    _check_evaluation(config)


def _refuse(name: str, value: Any, allowed: str) -> InputError:
    return InputError(f"{name} is {value!r}: {allowed}")


# name -> (what is allowed, in words; the test). None means not given, and passes.
AT_LEAST_1 = ("takes 1 or more", lambda x: x >= 1)
AT_LEAST_0 = ("takes 0 or more", lambda x: x >= 0)
POSITIVE = ("takes a finite number above 0", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = ("takes a finite number, 0 or more", lambda x: 0 <= x < math.inf)
SHARE = ("takes a number from 0 to below 1", lambda x: 0 <= x < 1)
INSIDE_0_1 = ("takes a number above 0 and below 1", lambda x: 0 < x < 1)
RANGES = {
    "model.vocabulary_size": AT_LEAST_1,
    "model.features": AT_LEAST_1,
    "model.mlp_features": AT_LEAST_1,
    "model.num_layers": AT_LEAST_1,
    "model.num_decoder_layers": AT_LEAST_1,
    "model.layer_norm_epsilon": POSITIVE,
    "model.max_length": AT_LEAST_1,
    "model.num_token_types": AT_LEAST_0,
    "model.dropout_rate": SHARE,
    "data.sequence_length": AT_LEAST_1,
    "data.batch_size": AT_LEAST_1,
    "data.tokens_per_batch": AT_LEAST_1,
    "data.row_multiple": AT_LEAST_1,
    "data.mask_rate": INSIDE_0_1,
    "optimizer.learning_rate": POSITIVE,
    "optimizer.warmup_steps": AT_LEAST_0,
    "optimizer.beta1": SHARE,
    "optimizer.beta2": SHARE,
    "optimizer.epsilon": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.clip_norm": POSITIVE,
    "optimizer.accumulate_steps": AT_LEAST_1,
    "optimizer.ema_decay": INSIDE_0_1,
    "optimizer.label_smoothing": SHARE,
    "train.num_steps": AT_LEAST_1,
    "train.seed": AT_LEAST_0,
    "train.eval_every": AT_LEAST_1,
    "train.eval_batches": AT_LEAST_1,
    "train.checkpoint_every": AT_LEAST_1,
    "train.keep_checkpoints": AT_LEAST_1,
    "train.log_every": AT_LEAST_1,
    "evaluation.average_checkpoints": AT_LEAST_1,
    "evaluation.batch_size": AT_LEAST_1,
    "evaluation.beam_size": AT_LEAST_1,
    "evaluation.length_penalty": NOT_NEGATIVE,
    "evaluation.extra_length": AT_LEAST_0,
    "evaluation.stride": AT_LEAST_1,
    "evaluation.temperature": NOT_NEGATIVE,
    "evaluation.top_k": AT_LEAST_1,
    "evaluation.top_p": ("takes a number above 0, at most 1", lambda x: 0 < x <= 1),
    "evaluation.seed": AT_LEAST_0,
}
ATTENTION_RANGES = {
    "num_heads": AT_LEAST_1,
    "num_kv_heads": AT_LEAST_1,
    "num_groups": AT_LEAST_1,
    "score_groups": AT_LEAST_1,
    "score_features": AT_LEAST_1,
    "qkv_features": AT_LEAST_1,
    "head_embedding_stddev": NOT_NEGATIVE,
    "dropout_rate": SHARE,
}


def _check_ranges(config: Config) -> None:
    for name, (allowed, fits) in RANGES.items():
        part, field = name.split(".")
        value = getattr(getattr(config, part), field)
        if value is not None and not fits(value):
            raise _refuse(name, value, allowed)
    if config.model.positions == "sinusoidal" and config.model.features % 2:
        raise _refuse(
            "model.features", config.model.features, "sinusoidal positions take even ones"
        )
    if not config.workdir:
        raise InputError("workdir is empty: takes a directory")


def _check_attention(config: Config) -> None:
    model = config.model
    for role in ("encoder", "decoder", "cross"):
        override = getattr(model.attention_by_role, role)
        if role not in ROLES[config.task] and override != type(override)():
            raise InputError(
                f"model.attention_by_role.{role} is set: task {config.task} has only "
                f"{', '.join(ROLES[config.task])}"
            )
    for role in ROLES[config.task]:
        override = getattr(model.attention_by_role, role)

        def named(field: str, override=override, role=role) -> str:
            own = getattr(override, field) is not None
            return f"model.attention_by_role.{role}.{field}" if own else f"model.attention.{field}"

        _check_one_attention(model.attention_for(role), model.features, named)


def _check_one_attention(attention: AttentionConfig, features: int, named) -> None:
    """The rules of one role; `named(field)` is the dotted name of where its value comes from."""
    for field, (allowed, fits) in ATTENTION_RANGES.items():
        value = getattr(attention, field)
        if value is not None and not fits(value):
            raise _refuse(named(field), value, allowed)
    kind, heads, width = attention.kind, attention.num_heads, attention.qkv_features or features
    if width % heads:
        name = "model.features" if attention.qkv_features is None else named("qkv_features")
        raise _refuse(named("num_heads"), heads, f"must divide {name}={width}")
    if kind == "el" and width != features:
        raise _refuse(
            named("qkv_features"), width, f"kind el needs model.features={features} (or None)"
        )
    for field, kinds in FIELDS_OF_KINDS.items():
        value = getattr(attention, field)
        if value is not None and kind not in kinds:
            noun = "kind" if len(kinds) == 1 else "kinds"
            raise _refuse(named(field), value, f"{noun} {', '.join(kinds)} only, not {kind}")
    if kind == "gqa" and attention.num_kv_heads is None:
        raise InputError(
            f"{named('num_kv_heads')} is not set: kind gqa needs a divisor of "
            f"{named('num_heads')}={heads}"
        )
    for field in ("num_kv_heads", "num_groups", "score_groups"):
        value = getattr(attention, field)
        if value is not None and heads % value:
            raise _refuse(named(field), value, f"must divide {named('num_heads')}={heads}")
    if (attention.num_groups or 1) > 1 and (attention.score_groups or 1) > 1:
        raise _refuse(
            named("score_groups"),
            attention.score_groups,
            f"not with {named('num_groups')}={attention.num_groups}",
        )
    _check_form(attention, named)


def _check_form(attention: AttentionConfig, named) -> None:
    kind, form = attention.kind, attention.form
    if form is None or form == "auto":
        return
    forms = {
        "mhe_add": ("materialized", "folded", "shared"),
        "mhe_mul": ("materialized", "folded"),
        "mva": ("materialized", "shared"),
    }[kind]
    if form not in forms:
        raise _refuse(named("form"), form, f"kind {kind} takes auto, {', '.join(forms)}")
    if form != "materialized" and kind != "mva" and attention.normalize_qk:
        raise _refuse(named("form"), form, f"not with {named('normalize_qk')}")


def _check_data(config: Config) -> None:
    data, task = config.data, config.task
    if data.sequence_length > config.model.max_length:
        raise _refuse(
            "data.sequence_length",
            data.sequence_length,
            f"at most model.max_length={config.model.max_length}",
        )
    rows = "row_multiple" if task == "translation" else "batch_size"
    if getattr(data, rows) % config.optimizer.accumulate_steps:
        raise _refuse(
            "optimizer.accumulate_steps",
            config.optimizer.accumulate_steps,
            f"must divide data.{rows}={getattr(data, rows)}",
        )
    if not data.train:
        raise InputError("data.train is not set: takes the text to train on")
    for split in ("train", "validation", "test"):
        _check_source(config, split)
    buckets = data.length_buckets
    if not buckets:
        return
    if task != "translation":
        raise _refuse("data.length_buckets", buckets, f"translation only, not {task}")
    if buckets[0] < 1 or any(a >= b for a, b in zip(buckets, buckets[1:], strict=False)):
        raise _refuse("data.length_buckets", buckets, "takes lengths above 0, each above the last")
    if buckets[-1] != data.sequence_length:
        raise _refuse(
            "data.length_buckets",
            buckets,
            f"the last must be data.sequence_length={data.sequence_length}",
        )


def _check_source(config: Config, split: str) -> None:
    data = config.data
    sources, name = getattr(data, split), f"data.{split}"
    if not sources:
        return
    if config.task != "translation":
        if len(sources) > 1:
            raise _refuse(name, sources, f"takes one source; task {config.task} has no second text")
        if len(data.fields) != 1:
            raise _refuse("data.fields", data.fields, f"task {config.task} takes one")
        return
    if len(sources) > 2:
        raise _refuse(name, sources, "takes one source or two parallel files")
    has_pairs = sources[0].endswith(PAIR_SUFFIXES) or sources[0].startswith("demo:")
    if len(sources) == 1 and not has_pairs and len(data.fields) != 2:
        raise _refuse(
            name, sources, f"translation takes two files, a .tsv, or two data.fields, {data.fields}"
        )


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    name = evaluation.checkpoint
    if name not in ("best", "last") and not (name.isascii() and name.isdigit()):
        raise _refuse("evaluation.checkpoint", name, "takes best, last or a step number")
    if evaluation.stride is not None:
        if config.task != "lm":
            raise _refuse("evaluation.stride", evaluation.stride, f"lm only, not {config.task}")
        if evaluation.stride > config.data.sequence_length:
            raise _refuse(
                "evaluation.stride",
                evaluation.stride,
                f"at most data.sequence_length={config.data.sequence_length}",
            )
    for field in ("top_k", "top_p"):
        value = getattr(evaluation, field)
        if value is not None and not evaluation.temperature:
            raise _refuse(f"evaluation.{field}", value, "needs evaluation.temperature above 0")
    if evaluation.average_checkpoints > 1:
        if name != "last":
            raise _refuse(
                "evaluation.average_checkpoints",
                evaluation.average_checkpoints,
                f"needs evaluation.checkpoint last, not {name}",
            )
        if evaluation.average_checkpoints > config.train.keep_checkpoints:
            raise _refuse(
                "evaluation.average_checkpoints",
                evaluation.average_checkpoints,
                f"at most train.keep_checkpoints={config.train.keep_checkpoints}",
            )


def mesh_shape(mesh: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with the -1 filled in.

    >>> mesh_shape(MeshConfig(data=-1, tensor=2), 8)
    (4, 1, 2)
    """
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise _refuse(f"mesh.{axis}", size, "takes 1 or more, or -1 for all that are left")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise InputError(f"mesh.{free[0]} and mesh.{free[1]} are both -1: one at most")
    given = math.prod(size for size in sizes.values() if size != -1)
    asked = " · ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != -1)
    if free:
        if num_devices % given:
            raise InputError(f"{asked} is {given}: must divide the {num_devices} devices there are")
        sizes[free[0]] = num_devices // given
    elif given != num_devices:
        raise InputError(f"{asked} is {given}: there are {num_devices} devices")
    return sizes["data"], sizes["fsdp"], sizes["tensor"]


def check_devices(config: Config, num_devices: int) -> None:
    """Raises InputError where the config cannot be laid over so many devices.

    Rows must divide over `data` and `fsdp` in each accumulated part, the model's width over `fsdp`,
    and heads, MLP and vocabulary over `tensor`.
    """
    data, fsdp, tensor = mesh_shape(config.mesh, num_devices)
    model = config.model
    rows = "row_multiple" if config.task == "translation" else "batch_size"
    parts = data * fsdp * config.optimizer.accumulate_steps
    if getattr(config.data, rows) % parts:
        raise _refuse(
            f"data.{rows}",
            getattr(config.data, rows),
            f"must be a multiple of data · fsdp · accumulate_steps = {data} · {fsdp} · "
            f"{config.optimizer.accumulate_steps} = {parts}",
        )
    if model.features % fsdp:
        raise _refuse("model.features", model.features, f"must be a multiple of mesh.fsdp={fsdp}")
    split = {
        "model.mlp_features": model.mlp_features,
        "model.vocabulary_size": model.vocabulary_size,
    }
    for role in ROLES[config.task]:
        own = getattr(model.attention_by_role, role).num_heads is not None
        name = f"attention_by_role.{role}" if own else "attention"
        split[f"model.{name}.num_heads"] = model.attention_for(role).num_heads
    for name, size in split.items():
        if size % tensor:
            raise _refuse(name, size, f"must be a multiple of mesh.tensor={tensor}")
