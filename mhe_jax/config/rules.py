"""Rules between the fields of a config, checked before anything is compiled.

Each broken rule is one line: the dotted name of a field, its value, and what is allowed. The range
of one field stands in its type.
"""

import math
import re
from functools import partial
from pathlib import PurePath

from mhe_jax.config import FIELDS_OF_KINDS, Config, InputError, MeshConfig
from mhe_jax.config.fields import checked, require, value_of
from mhe_jax.config.files import TABLES, file_format
from mhe_jax.config.places import RUNS, check_scheme, scheme_of


def check(config: Config, *, trains: bool = True) -> None:
    """Raises InputError for the first rule that the config breaks; needs text only if it trains."""
    checked(Config, config)
    _check_model(config)
    _check_attention(config)
    _check_data(config, trains)
    _check_evaluation(config)


def _only(config: Config, name: str, where: object, allowed: str) -> None:
    """`require` of a field that may differ from its default only where the rule holds."""
    require(config, name, where or value_of(config, name) == value_of(Config(), name), allowed)


def _check_model(config: Config) -> None:
    need, may, model = partial(require, config), partial(_only, config), config.model
    task, facts, hashing = f"task {config.task}", config.facts, f"model.hashing {model.hashing}"
    even = model.positions != "sinusoidal" or model.features % 2 == 0
    need("model.features", even, "must be even for model.positions sinusoidal")
    for field in ("rotary_base", "rotary_pairs", "rotary_scaling"):
        may(f"model.{field}", model.positions == "rotary", "takes model.positions rotary")
    for field in ("hashing", "context"):
        may(f"model.{field}", facts.is_encoder, f"only for tasks of an encoder, not {task}")
    packs = facts.packing and model.hashing is None and model.context == "text"
    may("data.packing", packs, f"not for {task}, nor with model.hashing or model.context token")
    free = facts.vocabulary and not facts.is_encoder
    may("model.output_bias", free, f"not for {task}")
    may("data.tokenizer", model.has_pieces, f"must be None: {hashing} has none")
    classes = model.has_table or not facts.vocabulary
    need("model.hashing", classes, f"{task} takes md_emb or lsh_emb, whose words are classes")
    may("model.kronecker.embedding", model.has_table, f"{hashing} has no table")


def _check_attention(config: Config) -> None:
    """Checks what kinds have in common; the class of each checks more: `layers.check_attention`."""
    need, model, roles = partial(require, config), config.model, config.facts.roles
    for role, override in vars(model.attention_by_role).items():
        if role not in roles and override != type(override)():
            has = f"task {config.task} has only {', '.join(roles)}"
            raise InputError(f"model.attention_by_role.{role} is set: {has}")
    for role in roles:
        attention, named = model.attention_for(role), partial(model.attention_field, role)
        for field, kinds in FIELDS_OF_KINDS.items():
            taken = attention.kind in kinds or getattr(attention, field) is None
            need(named(field), taken, f"kinds {', '.join(kinds)} only, not {attention.kind}")
        width = attention.qkv_features or model.features
        name = named("qkv_features") if attention.qkv_features else "model.features"
        need(named("num_heads"), width % attention.num_heads == 0, f"must divide {name}={width}")
        own = getattr(model.attention_by_role, role).rotary_features is not None
        turns = model.positions == "rotary" and not (role == "cross" and own)
        turns = turns or attention.rotary_features is None
        takes = "takes None without model.positions rotary, and for cross"
        need(named("rotary_features"), turns, takes)
    kinds = FIELDS_OF_KINDS["head_embedding_stddev"]
    has = set(kinds) & set(config.kinds.values())
    _only(config, "optimizer.head_embedding_rate", has, f"kinds {', '.join(kinds)} only")


def _check_data(config: Config, trains: bool) -> None:
    """Checks places, sources, lengths and what goes with the task; an imported run has no text."""
    need, may, data = partial(require, config), partial(_only, config), config.data
    facts, task, length = config.facts, f"task {config.task}", data.sequence_length
    check_scheme("workdir", config.workdir, RUNS)
    steps = config.train.profile_steps
    local = len(steps) == 2 and steps[0] <= steps[1] and not scheme_of(config.workdir)
    may("train.profile_steps", local, "takes a first and a last step, and a local workdir")
    most = config.model.max_length
    need("data.sequence_length", length <= most, f"at most model.max_length={most}")
    rows = getattr(data, facts.rows)
    whole = rows % config.optimizer.accumulate_steps == 0
    need("optimizer.accumulate_steps", whole, f"must divide data.{facts.rows}={rows}")
    need("data.train", data.train or not trains, "takes the text to train on")
    scratch = config.train.init_from is None
    may("data.tokenizer", scratch, "must be None: train.init_from has a tokenizer")
    some = facts.content == "text" or not trains
    may("train.eval_batches", some, "must be None: the first batches are no fair sample")
    may("data.dataset", facts.labelled, f"must be own: {task} has no labels")
    may("optimizer.label_smoothing", facts.label_smoothing, f"not for {task}")
    may("data.train_weights", not facts.labelled, f"not for {task}")
    if not facts.labelled:
        pair = facts.content == "pair"
        need("data.fields", pair or len(data.fields) == 1, f"{task} takes one")
        takes = f"takes one source{' or two parallel files' if pair else ''}"
        takes += "; several of data.train need data.train_weights"
        splits = [("train", names) for names, _ in training_sources(config)]
        for split, names in (*splits, ("validation", data.validation), ("test", data.test)):
            need(f"data.{split}", len(names) <= 1 + pair, takes)
    if facts.questions:
        around = 3 if config.model.hashing is None else 4
        room = length - data.question_length - around
        allowed = f"at most data.sequence_length - data.question_length - {around} = {room}"
        need("data.window_stride", data.window_stride <= room, allowed)
    buckets, several = data.length_buckets, not data.packing and facts.content != "text"
    may("data.length_buckets", several, "not where all rows have one length")
    grow = sorted({*buckets}) == [*buckets] and length in buckets[-1:]
    may("data.length_buckets", grow, f"takes growing lengths, the last sequence_length={length}")


def training_sources(config: Config) -> list[tuple[tuple[str, ...], float]]:
    """The names of each training source, one or two parallel files, and its weight."""
    data = config.data
    if not data.train_weights:
        return [(data.train, 1.0)]
    sources, names = [], list(data.train)
    each = len(names) == len(data.train_weights)
    while names:
        # Complete by itself, and not one of two parallel files.
        alone = config.facts.content != "pair" or names[0].startswith(("tfds:", "demo:"))
        alone |= file_format(PurePath(names[0])) in TABLES
        alone |= each and not PurePath(names[0]).suffix  # a directory, of whatever files
        sources.append(tuple(names[: 1 if alone else 2]))
        names = names[len(sources[-1]) :]
    takes = f"takes one for each source of data.train, which has {len(sources)}"
    require(config, "data.train_weights", len(sources) == len(data.train_weights), takes)
    return list(zip(sources, data.train_weights, strict=True))


def _check_evaluation(config: Config) -> None:
    need, may, data = partial(require, config), partial(_only, config), config.data
    facts, evaluation, length = config.facts, config.evaluation, data.sequence_length
    sampled = config.task == "translation" and data.validation
    may("train.eval_translate", sampled, "task translation with data.validation only")
    known = re.fullmatch("best|last|[0-9]+", evaluation.checkpoint)
    need("evaluation.checkpoint", known, "takes best, last or a step number")
    may("evaluation.stride", facts.stride, f"not for task {config.task}")
    inside = (evaluation.stride or 1) <= length
    need("evaluation.stride", inside, f"at most data.sequence_length={length}")
    # Where positions in the texts matter, a misspelt word would move them.
    free = facts.labelled and not facts.questions and data.dataset not in ("wic", "wsc")
    noise = f"not for task {config.task} of data.dataset {data.dataset}"
    may("evaluation.spelling_noise", free, noise)
    dense = config.model.kronecker.attention is config.model.kronecker.mlp is None
    may("evaluation.quantize", dense, "takes no model.kronecker.attention and mlp")
    for field in ("top_k", "top_p"):
        drawn = evaluation.temperature > 0
        may(f"evaluation.{field}", drawn, "needs evaluation.temperature above 0")
    kept = config.train.keep_checkpoints
    takes = f"needs evaluation.checkpoint last, and at most train.keep_checkpoints={kept}"
    several = evaluation.checkpoint == "last" and evaluation.average_checkpoints <= kept
    may("evaluation.average_checkpoints", several, takes)


def mesh_shape(mesh: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with the -1 filled in.

    >>> mesh_shape(MeshConfig(data=-1, tensor=2), 8)
    (4, 1, 2)
    """
    sizes = [mesh.data, mesh.fsdp, mesh.tensor]
    rest = num_devices // max(1, math.prod(size for size in sizes if size != -1))
    data, fsdp, tensor = (rest if size == -1 else size for size in sizes)
    if data * fsdp * tensor != num_devices:
        given = f"mesh.data={mesh.data} · mesh.fsdp={mesh.fsdp} · mesh.tensor={mesh.tensor}"
        raise InputError(f"{given} must be the {num_devices} devices; one may be -1: what is left")
    return data, fsdp, tensor


def check_devices(config: Config, num_devices: int) -> None:
    """Raises InputError if the config cannot be laid over this many devices."""
    need, model, data = partial(require, config), config.model, config.data
    axis, fsdp, tensor = mesh_shape(config.mesh, num_devices)
    divisors = (axis, fsdp, config.optimizer.accumulate_steps)
    rows, product = config.facts.rows, " · ".join(map(str, divisors))
    whole = getattr(data, rows) % math.prod(divisors) == 0
    takes = f"must be a multiple of data · fsdp · accumulate_steps = {product}"
    need(f"data.{rows}", whole, takes)
    need("model.features", model.features % fsdp == 0, f"must be a multiple of mesh.fsdp={fsdp}")
    multiple = f"must be a multiple of mesh.tensor={tensor}"
    whole = not model.has_table or model.padded_vocabulary_size % tensor == 0
    padded = f"{multiple}, or be padded to one by model.vocabulary_multiple (128, say)"
    need("model.vocabulary_size", whole, padded)
    need("model.mlp_features", model.mlp_features % tensor == 0, multiple)
    for role in config.facts.roles:
        heads = model.attention_for(role).num_heads
        need(model.attention_field(role, "num_heads"), heads % tensor == 0, multiple)
    if config.mesh.length != "whole":
        # Attention takes two parts of each row on a device.
        parts = tensor * (1 + (config.mesh.length == "everywhere" and tensor > 1))
        takes = f"must be a multiple of {parts} with mesh.length={config.mesh.length}"
        need("data.sequence_length", data.sequence_length % parts == 0, takes)
        whole = all(bucket % parts == 0 for bucket in data.length_buckets)
        known = data.length_buckets or config.facts.content != "pair"
        need("data.length_buckets", whole and known, f"each {takes}")
