"""Llama, and Mistral without a window: language models with rotary positions, RMSNorm, gated MLPs.

Kinds whose keys differ from head to head by an embedding have no home: Llama rotates keys after it.
"""

from typing import Any

import numpy as np

from mhe_jax.config import AttentionConfig, Config, InputError, ModelConfig
from mhe_jax.interchange.heads import require_heads
from mhe_jax.interchange.huggingface.fields import ACTIVATIONS, Fields
from mhe_jax.interchange.huggingface.tables import Slot, Table, lay_out, linear, norm, output
from mhe_jax.interchange.plain import Tensors, plain, require, unscaled

LAST_NORM = "decoder/norm"
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
    bias = model.attention_for("decoder").use_bias
    found = {
        "model.embed_tokens.weight": Slot(("embeddings/token",)),
        **norm("model.norm", LAST_NORM, bias=False),
    }
    for i in range(model.num_layers):
        theirs, ours = f"model.layers.{i}", f"decoder/layer_{i}"
        for name, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            part = f"{ours}/self_attention/{part}"
            found |= linear(f"{theirs}.self_attn.{name}_proj", part, bias=bias)
        for name in ("gate", "up", "down"):
            found |= linear(f"{theirs}.mlp.{name}_proj", f"{ours}/mlp/{name}", bias=model.mlp_bias)
        found |= norm(f"{theirs}.input_layernorm", f"{ours}/self_attention_norm", bias=False)
        found |= norm(f"{theirs}.post_attention_layernorm", f"{ours}/mlp_norm", bias=False)
    return found | {"lm_head.weight": output(model)}


def write(
    config: Config, params: Any, rows: np.ndarray | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a language model, and its `config.json`; see `writing.convert`."""
    model = config.model
    home = "Llama, the format for this language model,"
    require(model, home, positions="rotary", norm_position="pre", norm="rms", mlp="gated")
    require(model, home, output_bias=False)
    attention = model.attention_for("decoder")
    H = attention.num_heads
    key_heads = {"mqa": 1, "sha": 1, "gqa": attention.num_kv_heads}.get(attention.kind, H)
    require_keys_that_turn(attention, home)
    width = (attention.qkv_features or model.features) // H
    found = plain(
        config,
        params,
        "Llama",
        rows=rows,
        key_heads=key_heads,
        bias=attention.use_bias,
        mlp_bias=model.mlp_bias,
        width=width,
    )
    if model.rotary_pairs == "interleaved":
        found = {name: _halves(name, array, width) for name, array in found.items()}
    scaling = None
    if model.rotary_scaling != 1:
        scaling = {"rope_type": "linear", "factor": model.rotary_scaling}
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(found["embeddings/token"]),
        "hidden_size": model.features,
        "intermediate_size": model.mlp_features,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": H,
        "num_key_value_heads": key_heads,
        "head_dim": width,
        "hidden_act": ACTIVATIONS[model.activation][0],
        "max_position_embeddings": model.max_length,
        "rms_norm_eps": model.layer_norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
        "attention_bias": attention.use_bias,
        "attention_dropout": attention.dropout_rate,
        "mlp_bias": model.mlp_bias,
        "tie_word_embeddings": model.tie_embeddings,
    }
    return lay_out(table(model), unscaled(model, found, LAST_NORM), "Llama"), values


def require_keys_that_turn(attention: AttentionConfig, home: str) -> None:
    """Raises InputError if keys have embeddings or biases per head, which `home` rotates too."""
    require_heads(attention.kind)
    if attention.kind not in ("mha", "mqa", "gqa", "sha", "skv", "el"):
        raise InputError(
            f"model.attention.kind is {attention.kind!r}: {home} turns keys after their "
            "embeddings or biases, which have no place in it"
        )


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
    elif fields.values.get("use_sliding_window") is False:
        fields.values.pop(WINDOW, None)
    fields.must("rope_interleaved", False, None)
    base, scaling = _rotary(fields)
    length, window = fields.size("max_position_embeddings", 2048), fields.values.get(WINDOW)
    if type(window) is not int or window < length:  # a wider one hides nothing
        fields.must(WINDOW, None)
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    key_heads = fields.size("num_key_value_heads", heads)
    kind = "mha" if key_heads == heads else "mqa" if key_heads == 1 else "gqa"
    return ModelConfig(
        vocabulary_size=fields.size("vocab_size"),
        features=width,
        mlp_features=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        attention=AttentionConfig(
            kind=kind,
            num_heads=heads,
            num_kv_heads=key_heads if kind == "gqa" else None,
            qkv_features=fields.size("head_dim", width // heads) * heads,
            dropout_rate=fields.get("attention_dropout", 0.0),
            use_bias=fields.get("attention_bias", False),
        ),
        mlp="gated",
        mlp_bias=fields.get("mlp_bias", False),
        activation=fields.activation("hidden_act", "silu"),
        norm="rms",
        norm_position="pre",
        layer_norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        positions="rotary",
        rotary_base=base,
        rotary_scaling=scaling,
        max_length=length,
        dropout_rate=0.0,
        tie_embeddings=fields.get("tie_word_embeddings", False),
    )


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


def named(fields: Fields, model: ModelConfig, tensors: Tensors, *_: str) -> Tensors:
    """The tensors by the names of the table."""
    return {n: array for n, array in tensors.items() if not n.endswith("rotary_emb.inv_freq")}
