"""Llama, and Mistral without a window: language models with rotary positions, RMSNorm, gated MLPs.

Kinds whose keys differ from head to head by an embedding have no home: Llama rotates keys after it.
"""

from typing import Any

import numpy as np

from mhe_jax.config import Config, InputError, ModelConfig
from mhe_jax.interchange.huggingface.fields import Fields
from mhe_jax.interchange.huggingface.tables import Slot, Table, Written, modules, output
from mhe_jax.interchange.plain import Tensors

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
WINDOW = "sliding_window"
ROPE_TYPES = ("default", "linear")
# What a file of Mistral may leave out, and what Mistral has none of, whatever a file says.
MISTRAL = {WINDOW: 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8}
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


def write(config: Config, found: Tensors) -> Written:
    """The parameters of a language model, and what `config.json` says beside `FIELDS`."""
    model, attention = config.model, config.model.attention_for("decoder")
    width = (attention.qkv_features or model.features) // attention.num_heads
    if model.rotary_pairs == "interleaved":
        found = {name: _halves(name, array, width) for name, array in found.items()}
    key = found["decoder/layer_0/self_attention/key/kernel"]
    scaling = {"rope_type": "linear", "factor": model.rotary_scaling}
    return found, {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": key.shape[1] // width,
        "head_dim": width,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling if model.rotary_scaling != 1 else None,
    }


def _halves(name: str, array: np.ndarray, width: int) -> np.ndarray:
    """Queries and keys that pair features i and i + D/2, from those that pair 2i and 2i + 1."""
    if not ("/query/" in name or "/key/" in name):
        return array
    pairs = array.reshape(*array.shape[:-1], -1, width // 2, 2)
    return np.swapaxes(pairs, -1, -2).reshape(array.shape)


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` describes."""
    if fields.values.get("model_type") == "mistral":
        fields.values = MISTRAL | fields.values | WITHOUT_BIAS
    base, scaling = _rotary(fields)
    heads = fields.size("num_attention_heads")
    K = fields.size("num_key_value_heads", heads)
    kind = "mha" if heads == K else "mqa" if K == 1 else "gqa"
    attention = {
        "kind": kind,
        "num_kv_heads": K if kind == "gqa" else None,
        "qkv_features": fields.size("head_dim", fields.size("hidden_size") // heads) * heads,
    }
    rotary = {"rotary_base": base, "rotary_scaling": scaling}
    model = fields.model(FIELDS, attention, **FIXED, **rotary, dropout_rate=0.0)
    window = fields.values.get(WINDOW)
    if type(window) is not int or window < model.max_length:  # a wider one hides nothing
        fields.must(WINDOW, None)
    return model


def _rotary(fields: Fields) -> tuple[float, float]:
    """Base and scaling, which newer files keep in one place and older ones in two."""
    said = fields.values
    home = "rope_scaling" if said.get("rope_scaling") else "rope_parameters"
    rope: Any = said.get(home) or {}
    if not isinstance(rope, dict):
        raise InputError(f"{fields.path}: {home} is {rope!r}: takes an object")
    kinds = [rope[name] for name in ("rope_type", "type") if name in rope]
    whole = all(x.get("partial_rotary_factor") in (None, 1) for x in (rope, said))
    nested = any(isinstance(value, dict) for value in rope.values())
    if not any(kinds == [k] * len(kinds) for k in ROPE_TYPES) or nested or not whole:
        raise InputError(
            f"{fields.path}: {home} is {rope!r}: takes a rope_type of {' or '.join(ROPE_TYPES)}, "
            "the same in all layers, and whole heads"
        )
    base = rope.get("rope_theta", said.get("rope_theta", 10000.0))
    factor: Any = rope.get("factor") if "linear" in kinds else 1.0
    for name, value in (("rope_theta", base), ("factor of rotary positions", factor)):
        if type(value) not in (int, float) or not value > 0:
            raise InputError(f"{fields.path}: {name} is {value!r}: takes a number above 0")
    return float(base), float(factor)
