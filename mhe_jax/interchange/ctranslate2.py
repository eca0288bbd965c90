"""Language and translation models for CTranslate2, a server of transformers for CPUs and GPUs.

Kinds that fold to one key and value head become its multi-query attention, those that fold to a few
its grouped one; the others have keys and values for each head. The key bias of `mva` and
`collaborative` becomes one more column of keys. The vocabulary is the run's, so its sentencepiece
model encodes the input and decodes the output.
"""

from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2 import specs
from ctranslate2.specs.attention_spec import RotaryScalingType

from mhe_jax.config import Config, InputError, ModelConfig
from mhe_jax.config.data import BOS, EOS, UNK
from mhe_jax.config.files import TOKENIZER
from mhe_jax.data import JsonTokenizer, Tokenizer
from mhe_jax.evaluation.run import Run
from mhe_jax.interchange import Export
from mhe_jax.interchange.plain import plain, require, require_heads_of_cross, scaled
from mhe_jax.interchange.tables import Slot, Table, lay_out, modules, output

HOME, OF_NORMS = "CTranslate2", ("gamma", "beta")
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
MLPS = {
    "plain": {"ffn.linear_0": "mlp/up"},
    "gated": {"ffn.linear_0": "mlp/gate", "ffn.linear_0_noact": "mlp/up"},
}
LAYER = {
    "self_attention.linear.0": "self_attention/query self_attention/key self_attention/value",
    "self_attention.linear.1": "self_attention/out",
    "self_attention.layer_norm": "self_attention_norm",
    "ffn.layer_norm": "mlp_norm",
    "ffn.linear_1": "mlp/down",
}
CROSS = {
    "attention.linear.0": "cross_attention/query",
    "attention.linear.1": "cross_attention/key cross_attention/value",
    "attention.linear.2": "cross_attention/out",
    "attention.layer_norm": "cross_attention_norm",
}

WHAT = """\
`model.bin`, `config.json` and the vocabulary are a model of CTranslate2 that computes what the run
computes, in float32; `compute_type` asks for other numbers when it is loaded. `tokenizer.model` is
the sentencepiece model that makes its tokens. At most {length:,} tokens are read or written."""
# The search of a run never yields the tokens in `never`; CTranslate2 is told so with each call.
USE = """\
```python
import ctranslate2
import sentencepiece

pieces = sentencepiece.SentencePieceProcessor(model_file="DIRECTORY/tokenizer.model")
never = {{"disable_unk": True, "suppress_sequences": [["<pad>"], ["<s>"], ["<mask>"]]}}
{lines}
```"""
LINES = {
    "translation": """\
translator = ctranslate2.Translator("DIRECTORY", compute_type="int8")
lines = pieces.encode(["a sentence", "and another one"], out_type=str)
lengths = {{"min_decoding_length": {least}, "max_decoding_length": {length}}}
how = {{"beam_size": {beams}, "length_penalty": {penalty}}}
found = translator.translate_batch(lines, **how, **lengths, **never)
print(pieces.decode([translation.hypotheses[0] for translation in found]))""",
    "lm": """\
generator = ctranslate2.Generator("DIRECTORY", compute_type="int8")
prompt = ["<s>", *pieces.encode("the beginning of a text", out_type=str)]
lengths = {{"min_length": {least}, "max_length": {length}}}
found = generator.generate_batch([prompt], sampling_topk=10, **lengths, **never)
print(pieces.decode(found[0].sequences[0][1:]))""",
}


def write(run: Run, directory: Path) -> Export:
    """Writes a run into an empty directory, which `ctranslate2.Translator` or `Generator` loads."""
    config, tokenizer = run.config, run.tokenizer
    if config.task not in LINES:
        raise InputError(f"task is {config.task!r}: {HOME} takes runs of {' or '.join(LINES)}")
    if isinstance(tokenizer, JsonTokenizer):
        raise InputError(f"{tokenizer.name}: {HOME} takes a sentencepiece model; try huggingface")
    assert isinstance(tokenizer, Tokenizer)
    spec, result = convert(config, run.params, tokenizer.vocabulary)
    spec.save(str(directory))
    (directory / TOKENIZER).write_bytes((run.workdir / TOKENIZER).read_bytes())
    longest, e = config.model.max_length, config.evaluation
    search = {"beams": e.beam_size, "penalty": e.length_penalty, "least": e.min_length}
    lines = LINES[config.task].format(length=longest, **search)
    return result, WHAT.format(length=longest), USE.format(lines=lines)


def convert(
    config: Config, params: Any, vocabulary: list[str]
) -> tuple[specs.ModelSpec, dict[str, Any]]:
    """The model of a run as CTranslate2 saves it, and what to report of it."""
    model, roles = config.model, config.facts.roles
    heads = require_heads_of_cross(config, HOME)
    require(model, HOME, absent_tokens=())
    found = plain(config, params, HOME, own=True)
    found = scaled(model, found, np.float32(model.features**0.5), tables=("position",))
    key_heads, widths, fields = {}, {}, {}
    for role in roles:
        side, of = ("decoder", "cross") if role == "cross" else (role, "self")
        query, key = (
            found[f"{side}/layer_0/{of}_attention/{name}/kernel"] for name in ("query", "key")
        )
        widths[role] = query.shape[1] // heads[role]
        key_heads[role] = key.shape[1] // widths[role]
        fields[role] = _fields(model, key_heads[role], widths[role])
    cross = "cross" in roles
    layers = model.decoder_layers if cross else model.num_layers
    decoder: Any = specs.TransformerDecoderSpec(
        layers, heads["decoder"], with_encoder_attention=cross, **fields["decoder"]
    )
    if cross:
        encoder = specs.TransformerEncoderSpec(
            model.num_layers, heads["encoder"], **fields["encoder"]
        )
        spec: Any = specs.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(vocabulary)
        spec.register_target_vocabulary(vocabulary)
        spec.config.decoder_start_token = vocabulary[BOS]
        spec.config.add_source_eos = True
    else:
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(vocabulary)
    for name, array in lay_out(_table(model, cross), found, HOME).items():
        *path, leaf = name.split(".")
        at = reduce(lambda at, key: at[int(key)] if key.isdigit() else getattr(at, key), path, spec)
        setattr(at, leaf, np.ascontiguousarray(array))
    for role in roles:
        for layer in (spec.encoder if role == "encoder" else spec.decoder).layer:
            attention = layer.attention if role == "cross" else layer.self_attention
            attention.num_heads_kv = np.int32(key_heads[role])
            attention.head_dim = np.int32(widths[role])
    spec.config.unk_token = vocabulary[UNK]
    spec.config.bos_token, spec.config.eos_token = vocabulary[BOS], vocabulary[EOS]
    spec.config.layer_norm_epsilon = model.layer_norm_epsilon
    spec.validate()
    spec.optimize()
    count = sum(array.size for array in found.values())
    return spec, {"parameters": count, "key_heads": key_heads}


def _table(model: ModelConfig, cross: bool) -> Table:
    """Where the parameters lie: names are attributes of the specification, and numbers in lists."""
    tokens = Slot("embeddings/token")
    found = {
        "decoder.embeddings.weight": tokens,
        "decoder.projection.weight": output(model)._replace(twin=False),
    }
    if model.output_bias:
        found["decoder.projection.bias"] = Slot("embeddings/vocabulary_bias")
    layers = {"encoder": model.num_layers, "decoder": model.decoder_layers}
    if cross:
        found["encoder.embeddings.0.weight"] = tokens
    else:
        layers = {"decoder": model.num_layers}
    for side, count in layers.items():
        if model.positions != "rotary":
            found[f"{side}.position_encodings.encodings"] = Slot("embeddings/position")
        if model.norm_position == "pre":
            found |= modules(f"{side}.", f"{side}/", {"layer_norm": "norm"}, of_norms=OF_NORMS)
        names = LAYER | MLPS[model.mlp] | (CROSS if cross and side == "decoder" else {})
        for i in range(count):
            theirs, ours = f"{side}.layer.{i}.", f"{side}/layer_{i}/"
            found |= modules(theirs, ours, names, of_norms=OF_NORMS)
    return found


def _fields(model: ModelConfig, key_heads: int, width: int) -> dict[str, Any]:
    """The fields that both sides take, with the heads of self-attention."""
    fields: dict[str, Any] = {
        "pre_norm": model.norm_position == "pre",
        "activation": specs.Activation[ACTIVATIONS[model.activation]],
        "ffn_glu": model.mlp == "gated",
        "rms_norm": model.norm == "rms",
        "num_heads_kv": key_heads,
        "multi_query_attention": key_heads == 1,
        "head_dim": width,
    }
    if model.positions != "rotary":
        return fields
    if model.rotary_scaling != 1:
        fields["rotary_scaling_type"] = RotaryScalingType.Linear
        fields["rotary_scaling_factor"] = model.rotary_scaling
    return fields | {
        "rotary_dim": 0,  # the whole head
        "rotary_interleave": model.rotary_pairs == "interleaved",
        "rotary_base": model.rotary_base,
    }
