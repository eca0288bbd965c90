"""Marian: the encoder-decoder of translation, where norms come last.

Its norms add 1e-5 in their denominator. A run with another ε has its home too: if the residual
stream is c times as large, c² = 1e-5 / ε, the norms are the same, `LN(c x; c² ε) = LN(x; ε)`.
"""

from typing import Any

import numpy as np

from mhe_jax.config import AttentionConfig, Config, InputError, ModelConfig
from mhe_jax.config.model import AttentionByRole, AttentionOverride
from mhe_jax.interchange.huggingface.fields import ACTIVATIONS, Fields
from mhe_jax.interchange.huggingface.tables import Slot, Table, lay_out, linear, norm, output
from mhe_jax.interchange.plain import Tensors, plain, require

EPSILON = 1e-5
LAST_NORM = None  # tokens are multiplied by √M, as ours


def table(model: ModelConfig, *_: str) -> Table:
    """Where the parameters lie."""
    layers = {"encoder": model.num_layers, "decoder": model.decoder_layers}
    positions = ("embeddings/position",)
    found = {
        "model.shared.weight": Slot(("embeddings/token",)),
        "model.encoder.embed_positions.weight": Slot(positions),
        "model.decoder.embed_positions.weight": Slot(positions),
    }
    if model.output_bias:
        found["final_logits_bias"] = Slot(("embeddings/vocabulary_bias",), row=True)
    for side, count in layers.items():
        for i in range(count):
            theirs, ours = f"model.{side}.layers.{i}", f"{side}/layer_{i}"
            sublayers = {"self_attn": "self_attention", "encoder_attn": "cross_attention"}
            for their, our in list(sublayers.items())[: 1 + (side == "decoder")]:
                for name, part in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "out")):
                    found |= linear(f"{theirs}.{their}.{name}_proj", f"{ours}/{our}/{part}")
                found |= norm(f"{theirs}.{their}_layer_norm", f"{ours}/{our}_norm")
            found |= linear(f"{theirs}.fc1", f"{ours}/mlp/up")
            found |= linear(f"{theirs}.fc2", f"{ours}/mlp/down")
            found |= norm(f"{theirs}.final_layer_norm", f"{ours}/mlp_norm")
    for side in layers:  # transformers ties all, or nothing
        table = Slot(("embeddings/token",), twin=model.tie_embeddings)
        found[f"model.{side}.embed_tokens.weight"] = table
    return found | {"lm_head.weight": output(model)}


def write(
    config: Config, params: Any, rows: np.ndarray | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a translation model, and its `config.json`; see `writing.convert`."""
    model = config.model
    home = "Marian, the format for translation,"
    require(model, home, norm_position="post", norm="layer", mlp="plain")
    heads = {role: model.attention_for(role).num_heads for role in config.facts.roles}
    if heads["decoder"] != heads["cross"]:
        raise InputError(
            f"Marian has as many heads in cross-attention as in the decoder: num_heads are "
            f"{heads['cross']} and {heads['decoder']}"
        )
    found = plain(config, params, "Marian", rows=rows)
    if model.positions == "learned":
        # Marian multiplies tokens by √M, but not positions.
        found["embeddings/position"] = found["embeddings/position"] * np.float32(
            model.features**0.5
        )
    if model.layer_norm_epsilon != EPSILON:
        found = _larger(model, found, np.float32((EPSILON / model.layer_norm_epsilon) ** 0.5))
    values = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": len(found["embeddings/token"]),
        "decoder_vocab_size": len(found["embeddings/token"]),
        "d_model": model.features,
        "encoder_layers": model.num_layers,
        "decoder_layers": model.decoder_layers,
        "encoder_attention_heads": heads["encoder"],
        "decoder_attention_heads": heads["decoder"],
        "encoder_ffn_dim": model.mlp_features,
        "decoder_ffn_dim": model.mlp_features,
        "activation_function": ACTIVATIONS[model.activation][0],
        "dropout": model.dropout_rate,
        "attention_dropout": model.attention.dropout_rate,
        "activation_dropout": 0.0,
        "max_position_embeddings": model.max_length,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "static_position_embeddings": True,
        "normalize_before": False,
        "is_encoder_decoder": True,
        "tie_word_embeddings": model.tie_embeddings,
    }
    return lay_out(table(model), found, "Marian"), values


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` of Marian describes.

    Its positions become learned ones: its sines and cosines are not quite ours.
    """
    fields.alias(hidden_size="d_model", num_hidden_layers="encoder_layers")
    fields.alias(num_attention_heads="encoder_attention_heads")
    vocabulary = fields.size("vocab_size")
    fields.must("decoder_vocab_size", vocabulary, None)
    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        fields.must(name, False, None)
    fields.must("share_encoder_decoder_embeddings", True)
    fields.must("scale_embedding", True, absent=False)
    heads = fields.size("encoder_attention_heads"), fields.size("decoder_attention_heads")
    by_role = AttentionByRole()
    if heads[0] != heads[1]:
        override = AttentionOverride(num_heads=heads[1])
        by_role = AttentionByRole(decoder=override, cross=override)
    width = fields.size("encoder_ffn_dim")
    fields.must("decoder_ffn_dim", width)
    fields.must("is_encoder_decoder", True)
    return ModelConfig(
        vocabulary_size=vocabulary,
        features=fields.size("d_model"),
        mlp_features=width,
        num_layers=fields.size("encoder_layers"),
        num_decoder_layers=fields.size("decoder_layers"),
        attention=AttentionConfig(
            num_heads=heads[0],
            dropout_rate=fields.get("attention_dropout", 0.0),
            use_bias=True,
        ),
        attention_by_role=by_role,
        activation=fields.activation("activation_function", "gelu"),
        norm_position="post",
        layer_norm_epsilon=EPSILON,
        positions="learned",
        max_length=fields.size("max_position_embeddings"),
        output_bias=True,
        dropout_rate=fields.get("dropout", 0.1),
        tie_embeddings=fields.get("tie_word_embeddings", True),
    )


def named(fields: Fields, model: ModelConfig, tensors: Tensors, *_: str) -> Tensors:
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
    found = {}
    last = f"decoder/layer_{model.decoder_layers - 1}/mlp_norm/"
    for name, array in tensors.items():
        if name.startswith("embeddings/"):
            of_stream = name in ("embeddings/token", "embeddings/position")
            found[name] = array * factor if of_stream else array
        elif name.startswith(last):
            # Logits are products with the rows of tokens, which are larger if they are tied.
            found[name] = array / factor if model.tie_embeddings else array
        elif "_norm/" in name or "/out/" in name or "/down/" in name:
            found[name] = array * factor
        else:
            found[name] = array / factor if name.endswith("kernel") else array
    return found
