"""Marian: the encoder-decoder of translation, where norms come last.

Its norms add 1e-5 in their denominator. A run with another ε has its home too: if the residual
stream is c times as large, c² = 1e-5 / ε, the norms are the same, `LN(c x; c² ε) = LN(x; ε)`.
"""

import re
from typing import Any

import numpy as np

from mhe_jax.config import AttentionByRole, AttentionOverride, Config, ModelConfig
from mhe_jax.interchange.huggingface.fields import Fields
from mhe_jax.interchange.plain import Tensors, require_heads_of_cross
from mhe_jax.interchange.tables import Slot, Table, modules, output

EPSILON = 1e-5
IGNORED = r""
NAME, ROLE = "Marian", "encoder"
LAST_NORM = None  # tokens are multiplied by √M, as ours
ENCODER = {
    "self_attn.q_proj": "self_attention/query",
    "self_attn.k_proj": "self_attention/key",
    "self_attn.v_proj": "self_attention/value",
    "self_attn.out_proj": "self_attention/out",
    "self_attn_layer_norm": "self_attention_norm",
    "fc1": "mlp/up",
    "fc2": "mlp/down",
    "final_layer_norm": "mlp_norm",
}
DECODER = ENCODER | {
    name.replace("self_attn", "encoder_attn"): part.replace("self", "cross")
    for name, part in ENCODER.items()
    if "self" in name
}
FIELDS = {
    "vocab_size": ("vocabulary_size", None),
    "d_model": ("features", None),
    "encoder_layers": ("num_layers", None),
    "decoder_layers": ("num_decoder_layers", None),
    "encoder_attention_heads": ("attention.num_heads", None),
    "encoder_ffn_dim": ("mlp_features", None),
    "activation_function": ("activation", "gelu"),
    "dropout": ("dropout_rate", 0.1),
    "attention_dropout": ("attention.dropout_rate", 0.0),
    "max_position_embeddings": ("max_length", None),
    "tie_word_embeddings": ("tie_embeddings", True),
}
FIXED = NEEDED = {"norm_position": "post", "norm": "layer", "mlp": "plain"}
RULES = {
    "scale_embedding": (True,),
    "share_encoder_decoder_embeddings": (None, True),
    "normalize_before": (None, False),
    "normalize_embedding": (None, False),
    "add_final_layer_norm": (None, False),
}


def table(model: ModelConfig, *_: str) -> Table:
    """Where the parameters lie."""
    found = {
        "model.shared.weight": Slot("embeddings/token"),
        "model.encoder.embed_positions.weight": Slot("embeddings/position"),
        "model.decoder.embed_positions.weight": Slot("embeddings/position"),
    }
    if model.output_bias:
        found["final_logits_bias"] = Slot("embeddings/vocabulary_bias", row=True)
    for i in range(model.num_layers):
        found |= modules(f"model.encoder.layers.{i}.", f"encoder/layer_{i}/", ENCODER)
    for i in range(model.decoder_layers):
        found |= modules(f"model.decoder.layers.{i}.", f"decoder/layer_{i}/", DECODER)
    for side in ("encoder", "decoder"):  # transformers ties all, or nothing
        tokens = Slot("embeddings/token", twin=model.tie_embeddings)
        found[f"model.{side}.embed_tokens.weight"] = tokens
    return found | {"lm_head.weight": output(model)}


def write(config: Config, found: Tensors) -> dict[str, Any]:
    """Gives norms Marian's ε: what `config.json` says beside `FIELDS`."""
    model = config.model
    found |= _larger(model, found, np.float32((EPSILON / model.layer_norm_epsilon) ** 0.5))
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "decoder_layers": model.decoder_layers,
        "decoder_attention_heads": require_heads_of_cross(config, NAME)["decoder"],
        "decoder_ffn_dim": model.mlp_features,
        "attention_dropout": model.attention.dropout_rate,
        "activation_dropout": 0.0,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "static_position_embeddings": True,
        "normalize_before": False,
        "is_encoder_decoder": True,
    }


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` of Marian describes.

    Its positions become learned ones: its sines and cosines are not quite ours.
    """
    heads, other = fields["decoder_attention_heads"], AttentionOverride()
    if heads != fields["encoder_attention_heads"]:
        other = AttentionOverride(num_heads=heads)
    return fields.model(
        FIELDS,
        attention_by_role=AttentionByRole(decoder=other, cross=other),
        layer_norm_epsilon=EPSILON,
        output_bias=True,
        **FIXED,
    )


def named(fields: Fields, model: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors by the names of the table, with the positions, which most files leave out."""
    found = dict(tensors)
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        positions = found.get(name, _sinusoids(model.max_length, model.features))
        # Positions are not multiplied by √M there.
        found[name] = positions.astype(np.float32) / np.float32(model.features**0.5)
    found.setdefault("final_logits_bias", np.zeros((1, model.vocabulary_size), np.float32))
    return found


def _sinusoids(length: int, features: int) -> np.ndarray:
    """Marian's positions: `[sin(p ω_i), cos(p ω_i)]`, ω_i = 10000^(-2i/M), i < M/2."""
    rates = 10000.0 ** (-2 * np.arange(-(-features // 2)) / features)
    angles = np.arange(length)[:, None] * rates[None]
    found = np.concatenate([np.sin(angles), np.cos(angles)[:, : features // 2]], -1)
    return found.astype(np.float32)


def _larger(model: ModelConfig, tensors: Tensors, factor: np.float32) -> Tensors:
    """The same function with a residual stream `factor` times as large."""
    larger = re.compile(r"embeddings/(token|position)|.*(_norm|/out|/down)/.*")
    last = f"decoder/layer_{model.decoder_layers - 1}/mlp_norm/"
    found = {}
    for name, array in tensors.items():
        if name.startswith(last):
            # Logits are products with the rows of tokens, which are larger if they are tied.
            found[name] = array / factor if model.tie_embeddings else array
        elif larger.fullmatch(name):
            found[name] = array * factor
        else:
            found[name] = array / factor if name.endswith("kernel") else array
    return found
