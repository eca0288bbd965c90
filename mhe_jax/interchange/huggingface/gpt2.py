"""Language models: GPT-2, and GPT-BigCode, which is GPT-2 with one key and value head.

GPT-BigCode is the home of the kinds that fold to one key and value head (`mqa`, `sha`, `mhe_mul`,
`mhe_add`), GPT-2 that of the others, with keys and values repeated for each head.
"""

import re
from typing import Any

import numpy as np

from mhe_jax.config import AttentionConfig, Config, ModelConfig
from mhe_jax.interchange.huggingface.fields import ACTIVATIONS, Fields
from mhe_jax.interchange.huggingface.tables import Slot, Table, lay_out, linear, norm, output
from mhe_jax.interchange.plain import Tensors, plain, require, unscaled

GPT2, BIGCODE = "GPT-2", "GPT-BigCode"
LAST_NORM = "decoder/norm"


def folds_to_one(model: ModelConfig) -> bool:
    """Whether one key and one value head suffice for all query heads."""
    attention = model.attention_for("decoder")
    one = attention.kind in ("mqa", "sha", "mhe_add", "mhe_mul")
    return (one and (attention.num_groups or 1) == 1) or attention.num_heads == 1


def table(model: ModelConfig, model_type: str, *_: str) -> Table:
    """Where the parameters lie; GPT-2's matrices are [in, out], those of GPT-BigCode [out, in]."""
    found = {
        "transformer.wte.weight": Slot(("embeddings/token",)),
        "transformer.wpe.weight": Slot(("embeddings/position",)),
        **norm("transformer.ln_f", LAST_NORM),
    }
    transposed = model_type == "gpt_bigcode"
    for i in range(model.num_layers):
        theirs, ours = f"transformer.h.{i}", f"decoder/layer_{i}"
        attention = [f"{ours}/self_attention/{name}" for name in ("query", "key", "value")]
        for name, *parts in (
            ("attn.c_attn", *attention),
            ("attn.c_proj", f"{ours}/self_attention/out"),
            ("mlp.c_fc", f"{ours}/mlp/up"),
            ("mlp.c_proj", f"{ours}/mlp/down"),
        ):
            found |= linear(f"{theirs}.{name}", *parts, transposed=transposed)
        found |= norm(f"{theirs}.ln_1", f"{ours}/self_attention_norm")
        found |= norm(f"{theirs}.ln_2", f"{ours}/mlp_norm")
    return found | {"lm_head.weight": output(model)}


def write(
    config: Config, params: Any, rows: np.ndarray | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a language model, and its `config.json`; see `writing.convert`."""
    model = config.model
    attention = model.attention_for("decoder")
    one = folds_to_one(model)
    name = BIGCODE if one else GPT2
    home = f"{name}, the format for this language model,"
    require(model, home, norm_position="pre", norm="layer", mlp="plain", output_bias=False)
    found = plain(config, params, name, rows=rows, key_heads=1 if one else None)
    model_type = "gpt_bigcode" if one else "gpt2"
    tensors = lay_out(table(model, model_type), unscaled(model, found, LAST_NORM), name)
    values = {
        "architectures": ["GPTBigCodeForCausalLM" if one else "GPT2LMHeadModel"],
        "model_type": model_type,
        "vocab_size": len(found["embeddings/token"]),
        "n_positions": model.max_length,
        "n_embd": model.features,
        "n_layer": model.num_layers,
        "n_head": attention.num_heads,
        "n_inner": model.mlp_features,
        "activation_function": ACTIVATIONS[model.activation][0],
        "resid_pdrop": model.dropout_rate,
        "embd_pdrop": model.dropout_rate,
        "attn_pdrop": attention.dropout_rate,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }
    return tensors, values | ({"multi_query": True} if one else {})


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` describes, of kind `mha`, or `mqa` if it is multi-query."""
    one = fields.values["model_type"] == "gpt_bigcode"
    if one:
        fields.must("multi_query", True)
    fields.alias(hidden_size="n_embd", max_position_embeddings="n_positions")
    fields.alias(num_attention_heads="n_head", num_hidden_layers="n_layer")
    fields.must("scale_attn_weights", True)
    if not one:
        fields.must("scale_attn_by_inverse_layer_idx", False, None)
    fields.must("add_cross_attention", False, None)
    width = fields.size("n_embd")
    return ModelConfig(
        vocabulary_size=fields.size("vocab_size"),
        features=width,
        mlp_features=fields.size("n_inner", 4 * width),
        num_layers=fields.size("n_layer"),
        attention=AttentionConfig(
            kind="mqa" if one else "mha",
            num_heads=fields.size("n_head"),
            dropout_rate=fields.get("attn_pdrop", 0.1),
            use_bias=True,
        ),
        activation=fields.activation("activation_function", "gelu_new"),
        norm_position="pre",
        layer_norm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
        positions="learned",
        max_length=fields.size("n_positions"),
        dropout_rate=fields.get("resid_pdrop", 0.1),
        tie_embeddings=fields.get("tie_word_embeddings", True),
    )


def named(fields: Fields, model: ModelConfig, tensors: Tensors, *_: str) -> Tensors:
    """The tensors by the names of the table, without masks, which older versions saved."""
    mask = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")
    return {name: array for name, array in tensors.items() if not mask.fullmatch(name)}
