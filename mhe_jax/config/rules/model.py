"""Rules for attention, and for what only some models have."""

import functools

from mhe_jax.config import (
    FIELDS_OF_KINDS,
    FORMS_OF_KINDS,
    MHE_KINDS,
    AttentionConfig,
    Config,
    InputError,
    ModelConfig,
)
from mhe_jax.config.data import NUM_SPECIAL
from mhe_jax.config.rules.ranges import ATTENTION_RANGES, check_range, refuse

# Fields of `ModelConfig` for rotary `positions` only.
ROTARY = ("rotary_base", "rotary_pairs", "rotary_scaling")


def check_positions(config: Config) -> None:
    """Refuses rotary fields for other positions; checks the width that `positions` needs."""
    model = config.model
    if model.positions == "sinusoidal" and model.features % 2:
        raise refuse(
            "model.features", model.features, "must be even for model.positions sinusoidal"
        )
    if model.positions == "rotary":
        return
    for field in ROTARY:
        value = getattr(model, field)
        if value != getattr(ModelConfig, field):
            raise refuse(
                f"model.{field}", value, f"model.positions rotary only, not {model.positions}"
            )


def check_attention(config: Config) -> None:
    """Checks every role of the task: widths, heads, and fields of other kinds only."""
    model, roles = config.model, config.facts.roles
    for role in ("encoder", "decoder", "cross"):
        override = getattr(model.attention_by_role, role)
        if role not in roles and override != type(override)():
            raise InputError(
                f"model.attention_by_role.{role} is set: task {config.task} has only "
                f"{', '.join(roles)}"
            )
    for role in roles:
        override = getattr(model.attention_by_role, role)

        def named(field: str, override=override, role=role) -> str:
            # A role of another kind does not take the fields of the common kind alone.
            other = override.kind not in (None, model.attention.kind)
            own = getattr(override, field) is not None or (other and field in FIELDS_OF_KINDS)
            return f"model.attention_by_role.{role}.{field}" if own else f"model.attention.{field}"

        attention = model.attention_for(role)
        _check_one_attention(attention, model.features, named)
        if model.positions == "rotary" and role != "cross":
            _check_rotated(attention, model.features, named)
        if model.positions != "rotary" and attention.rotary_features is not None:
            complaint = f"model.positions rotary only, not {model.positions}"
            raise refuse(named("rotary_features"), attention.rotary_features, complaint)
        if role == "cross" and override.rotary_features is not None:
            complaint = "takes None: cross-attention is not rotated"
            raise refuse(named("rotary_features"), override.rotary_features, complaint)
    rate, kinds = config.optimizer.head_embedding_rate, FIELDS_OF_KINDS["head_embedding_stddev"]
    if rate != 1 and not any(model.attention_for(role).kind in kinds for role in roles):
        raise refuse("optimizer.head_embedding_rate", rate, f"kinds {', '.join(kinds)} only")


def _check_one_attention(attention: AttentionConfig, features: int, named) -> None:
    """The rules of one role; `named(field)` is the dotted name of where its value comes from."""
    for field, allowed in ATTENTION_RANGES.items():
        check_range(named(field), getattr(attention, field), allowed)
    kind, heads, width = attention.kind, attention.num_heads, attention.qkv_features or features
    if width % heads:
        name = "model.features" if attention.qkv_features is None else named("qkv_features")
        raise refuse(named("num_heads"), heads, f"must divide {name}={width}")
    if kind == "el" and width != features:
        raise refuse(
            named("qkv_features"), width, f"kind el needs model.features={features} (or None)"
        )
    for field, kinds in FIELDS_OF_KINDS.items():
        value = getattr(attention, field)
        if value is not None and kind not in kinds:
            noun = "kind" if len(kinds) == 1 else "kinds"
            raise refuse(named(field), value, f"{noun} {', '.join(kinds)} only, not {kind}")
    if kind in FIELDS_OF_KINDS["num_kv_heads"] and attention.num_kv_heads is None:
        raise InputError(
            f"{named('num_kv_heads')} is not set: kind {kind} needs a divisor of "
            f"{named('num_heads')}={heads}"
        )
    if kind == "gta" and (width // heads) % 2:
        allowed = f"kind gta takes heads of an even width, not {width // heads}"
        raise refuse(named("num_heads"), heads, allowed)
    for field in ("num_kv_heads", "num_groups", "score_groups", "latent_groups"):
        value = getattr(attention, field)
        if value is not None and heads % value:
            raise refuse(named(field), value, f"must divide {named('num_heads')}={heads}")
    if (attention.num_groups or 1) > 1 and (attention.score_groups or 1) > 1:
        raise refuse(
            named("score_groups"),
            attention.score_groups,
            f"not with {named('num_groups')}={attention.num_groups}",
        )
    latent = attention.latent_features or 4 * (width // heads)
    if attention.latent_groups is not None and latent % attention.latent_groups:
        complaint = f"must divide {named('latent_features')}={latent}"
        raise refuse(named("latent_groups"), attention.latent_groups, complaint)
    _check_form(attention, named)


def _check_form(attention: AttentionConfig, named) -> None:
    kind, form = attention.kind, attention.form
    if form is None or form == "auto":
        return
    forms = FORMS_OF_KINDS[kind]
    if form not in forms:
        raise refuse(named("form"), form, f"kind {kind} takes auto, {', '.join(forms)}")
    norms_heads = (*MHE_KINDS, "mla", "tpa")
    if form != "materialized" and kind in norms_heads and attention.normalize_qk:
        raise refuse(named("form"), form, f"not with {named('normalize_qk')}")


def _check_rotated(attention: AttentionConfig, features: int, named) -> None:
    """Checks what rotary positions require of self-attention."""
    heads, field = attention.num_heads, "num_heads"
    width = (attention.qkv_features or features) // heads
    if attention.score_features is not None:
        width, field = attention.score_features, "score_features"
    what = "queries and keys"
    if attention.kind == "gta":  # the other half of a key is part of its value
        what, width = "halves of queries and keys", width // 2
    if attention.kind == "mla":
        # Only the rotary features turn.
        if attention.rotary_features is None:
            width //= 2
        else:
            width, field = attention.rotary_features, "rotary_features"
    if width % 2:
        raise refuse(
            named(field),
            getattr(attention, field),
            f"model.positions rotary takes {what} of an even width, not {width}",
        )
    if attention.kind in MHE_KINDS and attention.form not in (None, "auto", "materialized"):
        do_not = "cancel" if attention.kind == "mhe_add" else "fold into queries"
        raise refuse(
            named("form"),
            attention.form,
            "takes auto or materialized with model.positions rotary, under which key embeddings "
            f"do not {do_not}",
        )


def check_vocabulary(config: Config) -> None:
    """Checks what logits have besides the products with the vocabulary."""
    model, facts = config.model, config.facts
    if model.output_bias and (not facts.vocabulary or facts.is_encoder):
        raise refuse("model.output_bias", True, f"not for task {config.task}")
    if set(model.absent_tokens) - set(range(NUM_SPECIAL)):
        special = f"takes numbers of special tokens, 0 to {NUM_SPECIAL - 1}"
        raise refuse("model.absent_tokens", model.absent_tokens, special)


def check_encoder(config: Config) -> None:
    """Checks fields of encoders only: hashed words, and tokens that see only themselves."""
    model, data, task, facts = config.model, config.data, config.task, config.facts
    for field in ("hashing", "context"):
        value = getattr(model, field)
        if not facts.is_encoder and value not in (None, "text"):
            raise refuse(f"model.{field}", value, f"only for tasks of an encoder, not {task}")
    packs = facts.packing or facts.labelled  # labelled examples have their own rule
    if data.packing and (not packs or model.hashing or model.context == "token"):
        which = "model.hashing or model.context token" if packs else f"task {task}"
        raise refuse("data.packing", data.packing, f"not with {which}")
    if model.hashing is None:
        return
    if not model.has_pieces and data.tokenizer is not None:
        none = f"must be None: model.hashing {model.hashing} has none"
        raise refuse("data.tokenizer", data.tokenizer, none)
    if model.has_table:
        least = NUM_SPECIAL + 2
        if model.vocabulary_size < least:
            raise refuse("model.vocabulary_size", model.vocabulary_size, f"takes {least} or more")
        return
    if facts.vocabulary:
        takes = f"task {task} takes md_emb or lsh_emb, whose words are classes"
        raise refuse("model.hashing", model.hashing, takes)
    for field, default in (("kronecker.embedding", None), ("vocabulary_multiple", 1)):
        value = functools.reduce(getattr, field.split("."), model)
        if value != default:
            raise refuse(f"model.{field}", value, f"model.hashing {model.hashing} has no table")
