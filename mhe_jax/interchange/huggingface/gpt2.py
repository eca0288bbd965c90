"""Language models: GPT-2, and GPT-BigCode, which is GPT-2 with one key and value head.

GPT-BigCode is the home of the kinds that fold to one key and value head (`mqa`, `sha`, `mhe_mul`,
`mhe_add`), GPT-2 that of the others, with keys and values repeated for each head.
"""

from typing import Any

import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.interchange.huggingface.fields import Fields
from mhe_jax.interchange.plain import Tensors
from mhe_jax.interchange.tables import Slot, Table, modules, output

NAME, ROLE, LAST_NORM = "GPT-2", "decoder", "decoder/norm"
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
NEEDED = {"norm_position": "pre", "norm": "layer", "mlp": "plain", "output_bias": False}
RULES = {
    "scale_attn_by_inverse_layer_idx": (None, False),
    "scale_attn_weights": (None, True),
    "add_cross_attention": (None, False),
}


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


def write(config: Config, found: Tensors) -> dict[str, Any]:
    """Leaves one key and value head where all are the same: what `config.json` says of it."""
    heads = config.model.attention_for("decoder").num_heads
    names = [name for name in found if "_attention/key/" in name or "_attention/value/" in name]
    split = {name: np.split(found[name], heads, -1) for name in names}
    values: dict[str, Any] = {"embd_pdrop": config.model.dropout_rate}
    if any(not np.array_equal(each[0], other) for each in split.values() for other in each):
        return values | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    found |= {name: first for name, (first, *_) in split.items()}
    values |= {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode"}
    return values | {"multi_query": True}


def model_of(fields: Fields) -> ModelConfig:
    """The model that a `config.json` describes, of kind `mha`, or `mqa` if it is GPT-BigCode."""
    fields.values["n_inner"] = fields.get("n_inner", 4 * fields["n_embd"])
    kind = "mqa" if fields["model_type"] == "gpt_bigcode" else "mha"
    return fields.model(FIELDS, attention={"kind": kind})
