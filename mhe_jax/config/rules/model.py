"""Rules for attention, and for what only some models have."""

from functools import partial

from mhe_jax.config import (
    FIELDS_OF_KINDS,
    FORMS_OF_KINDS,
    MHE_KINDS,
    AttentionConfig,
    Config,
    InputError,
    ModelConfig,
    Role,
)
from mhe_jax.config.fields import require


def check_model(config: Config) -> None:
    """Checks positions, hashed words, and what goes with the task."""
    need, model, task, facts = partial(require, config), config.model, config.task, config.facts
    hashing, packing, tokenizer = model.hashing, config.data.packing, config.data.tokenizer
    even = model.positions != "sinusoidal" or model.features % 2 == 0
    need("model.features", even, "must be even for model.positions sinusoidal")
    only = f"model.positions rotary only, not {model.positions}"
    for field in ("rotary_base", "rotary_pairs", "rotary_scaling"):
        usual = getattr(model, field) == getattr(ModelConfig, field)
        need(f"model.{field}", usual or model.positions == "rotary", only)
    only = f"only for tasks of an encoder, not {task}"
    need("model.hashing", facts.is_encoder or hashing is None, only)
    need("model.context", facts.is_encoder or model.context == "text", only)
    packs = facts.packing and hashing is None and model.context == "text"
    which = f"not for task {task}, nor with model.hashing or model.context token"
    need("data.packing", packs or not packing, which)
    takes = facts.vocabulary and not facts.is_encoder
    need("model.output_bias", takes or not model.output_bias, f"not for task {task}")
    none = f"must be None: model.hashing {hashing} has none"
    need("data.tokenizer", model.has_pieces or tokenizer is None, none)
    takes = f"task {task} takes md_emb or lsh_emb, whose words are classes"
    need("model.hashing", model.has_table or not facts.vocabulary, takes)
    dense = model.has_table or model.kronecker.embedding is None
    need("model.kronecker.embedding", dense, f"model.hashing {hashing} has no table")


def check_attention(config: Config) -> None:
    """Checks every role of the task: widths, heads, and fields of other kinds only."""
    model, roles = config.model, config.facts.roles
    for role, override in vars(model.attention_by_role).items():
        if role not in roles and override != type(override)():
            has = f"task {config.task} has only {', '.join(roles)}"
            raise InputError(f"model.attention_by_role.{role} is set: {has}")
    for role in roles:
        _check_role(config, role)
    kinds, rate = FIELDS_OF_KINDS["head_embedding_stddev"], "optimizer.head_embedding_rate"
    has = config.optimizer.head_embedding_rate == 1 or set(kinds) & set(config.kinds.values())
    require(config, rate, has, f"kinds {', '.join(kinds)} only")


def _check_role(config: Config, role: Role) -> None:
    model = config.model
    attention, override = model.attention_for(role), getattr(model.attention_by_role, role)
    kind, heads, form = attention.kind, attention.num_heads, attention.form
    head = (attention.qkv_features or model.features) // heads
    rotary = model.positions == "rotary" and role != "cross"

    def named(field: str) -> str:
        # A role of another kind does not take the fields of the common kind alone.
        other = override.kind not in (None, model.attention.kind) and field in FIELDS_OF_KINDS
        own = other or getattr(override, field) is not None
        return f"model.attention_by_role.{role}.{field}" if own else f"model.attention.{field}"

    def need(field: str, holds: object, allowed: str) -> None:
        require(config, named(field), holds, allowed)

    for field, kinds in FIELDS_OF_KINDS.items():
        others = kind in kinds or getattr(attention, field) is None
        need(field, others, f"kinds {', '.join(kinds)} only, not {kind}")
    own, width = attention.qkv_features, attention.qkv_features or model.features
    name = "model.features" if own is None else named("qkv_features")
    need("num_heads", width % heads == 0, f"must divide {name}={width}")
    whole = kind != "el" or width == model.features
    need("qkv_features", whole, f"kind el needs model.features={model.features} (or None)")
    divisor = f"{named('num_heads')}={heads}"
    given = kind not in FIELDS_OF_KINDS["num_kv_heads"] or attention.num_kv_heads
    need("num_kv_heads", given, f"kind {kind} needs a divisor of {divisor}")
    for field in ("num_kv_heads", "num_groups", "score_groups", "latent_groups"):
        need(field, heads % (getattr(attention, field) or 1) == 0, f"must divide {divisor}")
    even = kind != "gta" or head % 2 == 0
    need("num_heads", even, f"kind gta takes heads of an even width, not {head}")
    one = 1 in (attention.num_groups or 1, attention.score_groups or 1)
    need("score_groups", one, f"not with {named('num_groups')}={attention.num_groups}")
    latent = attention.latent_features or 4 * head
    divides = latent % (attention.latent_groups or 1) == 0
    need("latent_groups", divides, f"must divide {named('latent_features')}={latent}")
    forms = ("auto", *FORMS_OF_KINDS.get(kind, ()))
    need("form", form is None or form in forms, f"kind {kind} takes {', '.join(forms)}")
    free = form in (None, "auto", "materialized")
    plain = free or not attention.normalize_qk or kind not in (*MHE_KINDS, "mla", "tpa")
    need("form", plain, f"not with {named('normalize_qk')}")
    if rotary:
        need("form", free or kind not in MHE_KINDS, "not with model.positions rotary")
        field, turned = _rotated(attention, head)
        takes = f"model.positions rotary turns an even number of features, not {turned}"
        need(field, turned % 2 == 0, takes)
    turns = model.positions == "rotary" and (role != "cross" or override.rotary_features is None)
    none = turns or attention.rotary_features is None
    need("rotary_features", none, "takes None without model.positions rotary, and for cross")


def _rotated(attention: AttentionConfig, head: int) -> tuple[str, int]:
    """How many features of a query rotary positions turn, and the field that says so."""
    if attention.score_features is not None:
        return "score_features", attention.score_features
    if attention.rotary_features is not None:
        return "rotary_features", attention.rotary_features
    # The other half of a key of `gta` is part of its value; `mla` turns half of a head.
    return "num_heads", head // 2 if attention.kind in ("gta", "mla") else head
