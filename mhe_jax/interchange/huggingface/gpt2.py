"""Language models: GPT-2, and GPT-BigCode, which is GPT-2 with one key and value head.

GPT-BigCode is the home of the kinds that fold to one key and value head (`mqa`, `sha`, `mhe_mul`,
`mhe_add`), GPT-2 that of the others, with keys and values repeated for each head.
"""

from typing import Any

import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.interchange.huggingface.fields import Fields, written
from mhe_jax.interchange.huggingface.tables import Slot, Table, Written, lay_out, modules, output
from mhe_jax.interchange.plain import plain, require, scaled

LAST_NORM = "decoder/norm"
IGNORED = r"transformer\.h\.\d+\.attn\.(masked_)?bias"  # masks, which older versions saved
LAYER = {
    "ln_1": "self_attention_norm",
    "attn.c_attn": "self_attention/query self_attention/key self_attention/value",
    "attn.c_proj": "self_attention/out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp/up",
    "mlp.c_proj": "mlp/down",
}
FIELDS = {
    "vocab_size": ("vocabulary_size", None),
    "n_positions": ("max_length", None),
    "n_embd": ("features", None),
    "n_layer": ("num_layers", None),
    "n_head": ("attention.num_heads", None),
    "n_inner": ("mlp_features", None),
    "activation_function": ("activation", "gelu_new"),
    "resid_pdrop": ("dropout_rate", 0.1),
    "attn_pdrop": ("attention.dropout_rate", 0.1),
    "layer_norm_epsilon": ("layer_norm_epsilon", 1e-5),
    "tie_word_embeddings": ("tie_embeddings", True),
}


def folds_to_one(model: ModelConfig) -> bool:
    """Whether one key and one value head suffice for all query heads."""
    attention = model.attention_for("decoder")
    one = attention.kind in ("mqa", "sha", "mhe_add", "mhe_mul")
    return (one and (attention.num_groups or 1) == 1) or attention.num_heads == 1


def table(model: ModelConfig, model_type: str, *_: str) -> Table:
    """Where the parameters lie; GPT-2's matrices are [in, out], those of GPT-BigCode [out, in]."""
    found = {
        "transformer.wte.weight": Slot("embeddings/token"),
        "transformer.wpe.weight": Slot("embeddings/position"),
        **modules("transformer.", "decoder/", {"ln_f": "norm"}),
        "lm_head.weight": output(model),
    }
    for i in range(model.num_layers):
        transposed = model_type == "gpt_bigcode"
        found |= modules(f"transformer.h.{i}.", f"decoder/layer_{i}/", LAYER, transposed)
    return found


def write(config: Config, params: Any, rows: np.ndarray | None = None) -> Written:
    """The tensors of a language model, and its `config.json`; see `writing.convert`."""
    model = config.model
    one = folds_to_one(model)
    name = "GPT-BigCode" if one else "GPT-2"
    home = f"{name}, the format for this language model,"
    require(model, home, norm_position="pre", norm="layer", mlp="plain", output_bias=False)
    found = plain(config, params, name, rows=rows, key_heads=1 if one else None)
    found = scaled(model, found, np.float32(model.features**0.5), LAST_NORM)
    model_type = "gpt_bigcode" if one else "gpt2"
    values = {
        "architectures": ["GPTBigCodeForCausalLM" if one else "GPT2LMHeadModel"],
        "model_type": model_type,
        **written(FIELDS, model, "decoder"),
        "embd_pdrop": model.dropout_rate,
    }
    tensors = lay_out(table(model, model_type), found, name)
    return tensors, values | ({"multi_query": True} if one else {})


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` describes, of kind `mha`, or `mqa` if it is multi-query."""
    one = fields.values["model_type"] == "gpt_bigcode"
    if one:
        fields.must("multi_query", True)
    else:
        fields.must("scale_attn_by_inverse_layer_idx", False, None)
    fields.must("scale_attn_weights", True)
    fields.must("add_cross_attention", False, None)
    if fields.values.get("n_inner") is None:
        fields.values["n_inner"] = 4 * fields.size("n_embd")
    return fields.model(FIELDS, {"kind": "mqa" if one else "mha"})
