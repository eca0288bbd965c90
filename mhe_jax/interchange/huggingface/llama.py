"""Llama, and Mistral without a window: language models with rotary positions, RMSNorm, gated MLPs.

Kinds whose keys differ from head to head by an embedding have no home: Llama rotates keys after it.
"""

from typing import Any

from mhe_jax.config import Config, InputError, ModelConfig
from mhe_jax.interchange.huggingface.fields import Fields
from mhe_jax.interchange.plain import Tensors
from mhe_jax.interchange.tables import Slot, Table, modules, output

NAME, ROLE, LAST_NORM = "Llama", "decoder", "decoder/norm"
IGNORED = r".*rotary_emb\.inv_freq"  # angles, which older versions saved
LAYER = {
    "input_layernorm": "self_attention_norm",
    "self_attn.q_proj": "self_attention/query",
    "self_attn.k_proj": "self_attention/key",
    "self_attn.v_proj": "self_attention/value",
    "self_attn.o_proj": "self_attention/out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp/gate",
    "mlp.up_proj": "mlp/up",
    "mlp.down_proj": "mlp/down",
}
FIELDS = {
    "vocab_size": ("vocabulary_size", None),
    "hidden_size": ("features", None),
    "intermediate_size": ("mlp_features", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("attention.num_heads", None),
    "hidden_act": ("activation", "silu"),
    "max_position_embeddings": ("max_length", 2048),
    "rms_norm_eps": ("layer_norm_epsilon", 1e-6),
    "attention_bias": ("attention.use_bias", False),
    "attention_dropout": ("attention.dropout_rate", 0.0),
    "mlp_bias": ("mlp_bias", False),
    "tie_word_embeddings": ("tie_embeddings", False),
}
FIXED = {"positions": "rotary", "norm_position": "pre", "norm": "rms", "mlp": "gated"}
NEEDED = {**FIXED, "output_bias": False}
# Of `plain`: key and value heads as they are, and biases where the run has them.
PLAIN = {"own": True, "biases": False}
RULES = {"partial_rotary_factor": (None, 1, 1.0)}
# What a file of Mistral may leave out, and what Mistral has none of, whatever a file says.
MISTRAL = {"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8}
WITHOUT_BIAS = {"attention_bias": False, "mlp_bias": False}


def is_home_of(model: ModelConfig) -> bool:
    """Whether a language model has something that only Llama has."""
    return model.positions == "rotary" or model.norm == "rms" or model.mlp == "gated"


def table(model: ModelConfig, *_: str) -> Table:
    """Where the parameters lie."""
    found = {
        "model.embed_tokens.weight": Slot("embeddings/token"),
        **modules("model.", "decoder/", {"norm": "norm"}),
        "lm_head.weight": output(model),
    }
    for i in range(model.num_layers):
        found |= modules(f"model.layers.{i}.", f"decoder/layer_{i}/", LAYER)
    return found


def write(config: Config, found: Tensors) -> dict[str, Any]:
    """Makes queries and keys turn in halves: what `config.json` says beside `FIELDS`."""
    model, attention = config.model, config.model.attention_for("decoder")
    width = (attention.qkv_features or model.features) // attention.num_heads
    if model.rotary_pairs == "interleaved":  # features 2i and 2i + 1 become i and i + D/2
        for name in (name for name in found if "/query/" in name or "/key/" in name):
            pairs = found[name].reshape(*found[name].shape[:-1], -1, width // 2, 2)
            found[name] = pairs.swapaxes(-1, -2).reshape(found[name].shape)
    key = found["decoder/layer_0/self_attention/key/kernel"]
    scaling = {"rope_type": "linear", "factor": model.rotary_scaling}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": key.shape[1] // width,
        "head_dim": width,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling if model.rotary_scaling != 1 else None,
    }


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` describes; rotary positions stand in one place or in two."""
    if fields["model_type"] == "mistral":
        fields.values = MISTRAL | fields.values | WITHOUT_BIAS
    rope = fields.get("rope_scaling") or fields.get("rope_parameters", {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear"):
        raise InputError(f"{fields.path}: rope_type is {kind!r}: takes default or linear")
    heads = fields["num_attention_heads"]
    K = fields.get("num_key_value_heads", heads)
    attention = {
        "kind": "mha" if heads == K else "mqa" if K == 1 else "gqa",
        "num_kv_heads": K if 1 < K < heads else None,
        "qkv_features": fields.get("head_dim", fields["hidden_size"] // heads) * heads,
    }
    rotary = {
        "rotary_base": float(rope.get("rope_theta", fields.get("rope_theta", 10000))),
        "rotary_scaling": rope.get("factor") if kind == "linear" else 1.0,
    }
    model = fields.model(FIELDS, attention=attention, **FIXED, **rotary, dropout_rate=0.0)
    if fields.get("sliding_window", model.max_length) < model.max_length:
        fields.must("sliding_window", (None,))
    return model
