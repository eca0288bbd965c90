"""Rules for attention, and for what only some models have."""

from functools import partial

from mhe_jax.config import FIELDS_OF_KINDS, Config, InputError, ModelConfig
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


def check_roles(config: Config) -> None:
    """Checks which fields go with the kind of each role, and that heads divide the width.

    What holds for one kind is checked by its class: `model.layers.check_attention`.
    """
    model, roles = config.model, config.facts.roles
    for role, override in vars(model.attention_by_role).items():
        if role not in roles and override != type(override)():
            has = f"task {config.task} has only {', '.join(roles)}"
            raise InputError(f"model.attention_by_role.{role} is set: {has}")
    for role in roles:
        attention, own = model.attention_for(role), getattr(model.attention_by_role, role)
        kind, named = attention.kind, partial(model.attention_field, role)
        for field, kinds in FIELDS_OF_KINDS.items():
            taken = kind in kinds or getattr(attention, field) is None
            require(config, named(field), taken, f"kinds {', '.join(kinds)} only, not {kind}")
        width = attention.qkv_features or model.features
        name = named("qkv_features") if attention.qkv_features else "model.features"
        whole = width % attention.num_heads == 0
        require(config, named("num_heads"), whole, f"must divide {name}={width}")
        turns = model.positions == "rotary" and (role != "cross" or own.rotary_features is None)
        turns = turns or attention.rotary_features is None
        takes = "takes None without model.positions rotary, and for cross"
        require(config, named("rotary_features"), turns, takes)
    kinds, rate = FIELDS_OF_KINDS["head_embedding_stddev"], "optimizer.head_embedding_rate"
    has = config.optimizer.head_embedding_rate == 1 or set(kinds) & set(config.kinds.values())
    require(config, rate, has, f"kinds {', '.join(kinds)} only")
