"""Language models: GPT-2, and GPT-BigCode, which is GPT-2 with one key and value head.

GPT-BigCode is the home of the kinds that fold to one key and value head (`mqa`, `sha`, `mhe_mul`,
`mhe_add`), GPT-2 that of the others, with keys and values repeated for each head.
"""

import numpy as np

from mhe_jax.config import Config, ModelConfig
from mhe_jax.interchange.huggingface.fields import Fields
from mhe_jax.interchange.huggingface.tables import Slot, Table, Written, modules, output
from mhe_jax.interchange.plain import Tensors

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


def write(config: Config, found: Tensors) -> Written:
    """The parameters of a language model, and what `config.json` says beside `FIELDS`."""
    heads = config.model.attention_for("decoder").num_heads
    values = {"embd_pdrop": config.model.dropout_rate}
    if (one := _with_one_head(found, heads)) is None:
        return found, values | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    values |= {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode"}
    return one, values | {"multi_query": True}


def _with_one_head(tensors: Tensors, heads: int) -> Tensors | None:
    """The parameters with the key and value head that all heads have; None if they differ."""
    found = dict(tensors)
    for name, array in tensors.items():
        if "_attention/key/" in name or "_attention/value/" in name:
            first, *others = np.split(array, heads, -1)
            if not all(np.array_equal(first, other) for other in others):
                return None
            found[name] = first
    return found


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
