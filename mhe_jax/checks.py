"""Rules between the fields of a config, checked before anything is compiled.

Each broken rule is one line: the dotted name of a field, its value, and what is allowed.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

from mhe_jax.config import (
    FIELDS_OF_KINDS,
    LABELLED,
    AttentionConfig,
    Config,
    InputError,
    MeshConfig,
    Role,
    Task,
)

ROLES: dict[Task, tuple[Role, ...]] = {
    "mlm": ("encoder",),
    "shuffle_random": ("encoder",),
    "lm": ("decoder",),
    "translation": ("encoder", "decoder", "cross"),
    **dict.fromkeys(LABELLED, ("encoder",)),
}
PAIR_SUFFIXES = (".tsv", ".tsv.gz", ".tsv.xz")


def check(config: Config) -> None:
    """Raises InputError for the first rule that the config breaks."""
    _check_ranges(config)
    _check_attention(config)
    _check_encoder(config)
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
SEED = ("takes 0 or more, below 2**63", lambda x: 0 <= x < 1 << 63)
INSIDE_0_1 = ("takes a number above 0 and below 1", lambda x: 0 < x < 1)
RANGES = {
    "model.vocabulary_size": AT_LEAST_1,
    "model.vocabulary_multiple": AT_LEAST_1,
    "model.features": AT_LEAST_1,
    "model.mlp_features": AT_LEAST_1,
    "model.num_layers": AT_LEAST_1,
    "model.num_decoder_layers": AT_LEAST_1,
    "model.layer_norm_epsilon": POSITIVE,
    "model.max_length": AT_LEAST_1,
    "model.num_token_types": AT_LEAST_0,
    "model.dropout_rate": SHARE,
    "model.kronecker.attention": AT_LEAST_1,
    "model.kronecker.mlp": AT_LEAST_1,
    "model.kronecker.embedding": AT_LEAST_1,
    "data.sequence_length": AT_LEAST_1,
    "data.batch_size": AT_LEAST_1,
    "data.tokens_per_batch": AT_LEAST_1,
    "data.row_multiple": AT_LEAST_1,
    "data.mask_rate": INSIDE_0_1,
    "data.corruption_rate": INSIDE_0_1,
    "data.lsh_pieces": AT_LEAST_1,
    "data.window_stride": AT_LEAST_1,
    "data.question_length": AT_LEAST_1,
    "model.num_classes": AT_LEAST_1,
    "model.num_spans": AT_LEAST_0,
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
    "train.seed": SEED,
    "train.eval_every": AT_LEAST_1,
    "train.eval_batches": AT_LEAST_1,
    "train.checkpoint_every": AT_LEAST_1,
    "train.keep_checkpoints": AT_LEAST_1,
    "train.log_every": AT_LEAST_1,
    "train.skip_nonfinite": AT_LEAST_0,
    "evaluation.average_checkpoints": AT_LEAST_1,
    "evaluation.batch_size": AT_LEAST_1,
    "evaluation.beam_size": AT_LEAST_1,
    "evaluation.length_penalty": NOT_NEGATIVE,
    "evaluation.extra_length": AT_LEAST_0,
    "evaluation.stride": AT_LEAST_1,
    "evaluation.temperature": NOT_NEGATIVE,
    "evaluation.top_k": AT_LEAST_1,
    "evaluation.top_p": ("takes a number above 0, at most 1", lambda x: 0 < x <= 1),
    "evaluation.seed": SEED,
    "evaluation.spelling_noise": ("takes a number from 0 to 1", lambda x: 0 <= x <= 1),
    "evaluation.answer_length": AT_LEAST_1,
    "evaluation.no_answer_threshold": ("takes a finite number", math.isfinite),
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
        value = functools.reduce(getattr, name.split("."), config)
        if value is not None and not fits(value):
            raise _refuse(name, value, allowed)
    if config.model.positions == "sinusoidal" and config.model.features % 2:
        raise _refuse(
            "model.features", config.model.features, "sinusoidal positions take even ones"
        )
    steps = config.train.profile_steps
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        raise _refuse("train.profile_steps", steps, "takes a first and a last step, or nothing")
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


def _check_encoder(config: Config) -> None:
    """What goes with encoders only: hashed words, and tokens that see nothing else."""
    model, data, task = config.model, config.data, config.task
    encoders = [name for name, roles in ROLES.items() if roles == ("encoder",)]
    for field in ("hashing", "context"):
        value = getattr(model, field)
        if task not in encoders and value not in (None, "text"):
            raise _refuse(
                f"model.{field}", value, f"not for task {task}: only for those of an encoder"
            )
    if data.packing and (task == "shuffle_random" or model.hashing or model.context == "token"):
        which = "task shuffle_random" if task == "shuffle_random" else "model.hashing or context"
        raise _refuse("data.packing", data.packing, f"not with {which}")
    if model.hashing is None:
        return
    if not model.has_pieces and data.tokenizer is not None:
        raise _refuse("data.tokenizer", data.tokenizer, f"model.hashing {model.hashing} has none")
    if model.has_table:
        if model.vocabulary_size < 7:
            raise _refuse("model.vocabulary_size", model.vocabulary_size, "takes 7 or more")
        return
    if task == "mlm":
        raise _refuse(
            "model.hashing", model.hashing, "task mlm needs the classes of md_emb, lsh_emb"
        )
    for field, default in (("kronecker.embedding", None), ("vocabulary_multiple", 1)):
        value = functools.reduce(getattr, field.split("."), model)
        if value != default:
            raise _refuse(f"model.{field}", value, f"model.hashing {model.hashing} has no table")


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
    if config.train.init_from is not None and data.tokenizer is not None:
        raise _refuse("data.tokenizer", data.tokenizer, "that of train.init_from is taken")
    _check_labelled(config)
    for sources, _ in training_sources(config):
        _check_source(config, "train", sources)
    for split in ("validation", "test"):
        _check_source(config, split, getattr(data, split))
    buckets = data.length_buckets
    if not buckets:
        return
    if data.packing:
        raise _refuse("data.length_buckets", buckets, "not with data.packing: its rows are alike")
    if task not in ("translation", *LABELLED):
        raise _refuse("data.length_buckets", buckets, f"not for task {task}: all rows are whole")
    if buckets[0] < 1 or any(a >= b for a, b in zip(buckets, buckets[1:], strict=False)):
        raise _refuse("data.length_buckets", buckets, "takes lengths above 0, each above the last")
    if buckets[-1] != data.sequence_length:
        raise _refuse(
            "data.length_buckets",
            buckets,
            f"the last must be data.sequence_length={data.sequence_length}",
        )


def _check_labelled(config: Config) -> None:
    data, task = config.data, config.task
    if task not in LABELLED:
        if config.train.init_from is not None and task not in ("mlm", "shuffle_random"):
            raise _refuse("train.init_from", config.train.init_from, f"not for task {task}")
        if data.dataset != "own":
            raise _refuse("data.dataset", data.dataset, f"task {task} has no labels")
        return
    for field in ("packing", "train_weights"):
        if getattr(data, field):
            raise _refuse(f"data.{field}", getattr(data, field), f"not for task {task}")
    if config.train.eval_batches is not None:
        raise _refuse("train.eval_batches", config.train.eval_batches, "official scores take all")
    if config.optimizer.label_smoothing and task in ("regression", "span"):
        raise _refuse(
            "optimizer.label_smoothing", config.optimizer.label_smoothing, f"not for {task}"
        )
    if task == "span":
        around = 3 if config.model.hashing is None else 4
        room = data.sequence_length - data.question_length - around
        if data.window_stride > room:
            raise _refuse(
                "data.window_stride",
                data.window_stride,
                f"at most data.sequence_length - data.question_length - {around} = {room}",
            )
    elif data.sequence_length < 8:
        raise _refuse("data.sequence_length", data.sequence_length, f"task {task} takes 8 or more")


def training_sources(config: Config) -> list[tuple[tuple[str, ...], float]]:
    """The names of each training source, one or two parallel files, and its weight.

    Raises:
      InputError: `data.train_weights` has another number of weights, or one that is not above 0.
    """
    data = config.data
    if not data.train_weights:
        return [(data.train, 1.0)]
    for weight in data.train_weights:
        if not 0 < weight < math.inf:
            raise _refuse("data.train_weights", data.train_weights, "takes finite numbers above 0")
    sources, names = [], list(data.train)
    while names:
        alone = config.task != "translation" or _is_whole(names[0])
        sources.append(tuple(names[: 1 if alone else 2]))
        names = names[len(sources[-1]) :]
    if len(sources) != len(data.train_weights):
        raise _refuse(
            "data.train_weights",
            data.train_weights,
            f"takes one for each source of data.train, which has {len(sources)}",
        )
    return list(zip(sources, data.train_weights, strict=True))


def _is_whole(name: str) -> bool:
    """Whether a source of pairs is so by itself, and not one of two parallel files."""
    suffixes = (*PAIR_SUFFIXES, ".jsonl", ".jsonl.gz", ".jsonl.xz")
    return name.endswith(suffixes) or name.startswith(("tfds:", "demo:"))


def _check_source(config: Config, split: str, sources: Sequence[str]) -> None:
    data, name = config.data, f"data.{split}"
    if not sources or config.task in LABELLED:
        return
    if config.task != "translation":
        if len(sources) > 1:
            raise _refuse(
                name,
                sources,
                f"takes one source; task {config.task} has no second text"
                + ("; several need data.train_weights" if split == "train" else ""),
            )
        if len(data.fields) != 1:
            raise _refuse("data.fields", data.fields, f"task {config.task} takes one")
        return
    if len(sources) > 2:
        several = "; more need data.train_weights" if split == "train" else ""
        raise _refuse(name, sources, f"takes one source or two parallel files{several}")
    has_pairs = sources[0].endswith(PAIR_SUFFIXES) or sources[0].startswith("demo:")
    if len(sources) == 1 and not has_pairs and len(data.fields) != 2:
        raise _refuse(
            name, sources, f"translation takes two files, a .tsv, or two data.fields, {data.fields}"
        )


def _has_spans(config: Config) -> bool:
    """Whether places in the texts matter."""
    return config.task == "span" or config.data.dataset in ("wic", "wsc")


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
    if evaluation.spelling_noise and (config.task not in LABELLED or _has_spans(config)):
        what = (
            f"data.dataset {config.data.dataset}" if _has_spans(config) else f"task {config.task}"
        )
        raise _refuse("evaluation.spelling_noise", evaluation.spelling_noise, f"not for {what}")
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
    and heads, MLP and vocabulary over `tensor`; with `mesh.length` so must the lengths of rows.
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
    if model.has_table and model.padded_vocabulary_size % tensor:
        raise _refuse(
            "model.vocabulary_size",
            model.vocabulary_size,
            f"must be a multiple of mesh.tensor={tensor}, or be padded to one by "
            "model.vocabulary_multiple (128, say)",
        )
    split = {"model.mlp_features": model.mlp_features}
    if config.mesh.length == "tensor":
        if config.task == "translation" and not config.data.length_buckets:
            raise InputError("data.length_buckets is not set: mesh.length=tensor needs it")
        split["data.sequence_length"] = config.data.sequence_length
        for i, length in enumerate(config.data.length_buckets):
            split[f"data.length_buckets[{i}]"] = length
    for role in ROLES[config.task]:
        own = getattr(model.attention_by_role, role).num_heads is not None
        name = f"attention_by_role.{role}" if own else "attention"
        split[f"model.{name}.num_heads"] = model.attention_for(role).num_heads
    for name, size in split.items():
        if size % tensor:
            raise _refuse(name, size, f"must be a multiple of mesh.tensor={tensor}")
