"""Language and translation models for CTranslate2, a server of transformers for CPUs and GPUs.

Kinds that fold to one key and value head (`mqa`, `sha`, `mhe_mul`, `mhe_add`) become its
multi-query attention, self- and cross-attention alike, and `gqa` its grouped one; the others have
keys and values for each head. The key bias of `mva` and `collaborative` becomes one more column of
keys.

The embeddings' √M, the table of positions, the norms' ε and the activation are kept: the model
computes what the run computes. The vocabulary is the run's, so its sentencepiece model encodes the
input and decodes the output.
"""

from collections.abc import Mapping
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
from mhe_jax.interchange.card import card
from mhe_jax.interchange.huggingface.llama import require_keys_that_turn
from mhe_jax.interchange.plain import Tensors, plain, require, require_all

HOME = "CTranslate2"
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}

WHAT = """\
`model.bin`, `config.json` and the vocabulary are a model of CTranslate2 that computes what the run
computes, in float32; `compute_type` asks for other numbers when it is loaded. `tokenizer.model` is
the sentencepiece model that makes its tokens. At most {length:,} tokens are read or written."""
# The search of a run never yields the tokens in `never`; CTranslate2 is told so with each call.
USES = {
    "translation": """\
```python
import ctranslate2
import sentencepiece

pieces = sentencepiece.SentencePieceProcessor(model_file="DIRECTORY/tokenizer.model")
translator = ctranslate2.Translator("DIRECTORY", compute_type="int8")
lines = pieces.encode(["a sentence", "and another one"], out_type=str)
never = {{"disable_unk": True, "suppress_sequences": [["<pad>"], ["<s>"], ["<mask>"]]}}
lengths = {{"max_input_length": {length}, "max_decoding_length": {length}}}
lengths["min_decoding_length"] = {least}
found = translator.translate_batch(lines, beam_size={beams}, **lengths, **never)
print(pieces.decode([translation.hypotheses[0] for translation in found]))
```""",
    "lm": """\
```python
import ctranslate2
import sentencepiece

pieces = sentencepiece.SentencePieceProcessor(model_file="DIRECTORY/tokenizer.model")
generator = ctranslate2.Generator("DIRECTORY", compute_type="int8")
prompt = ["<s>", *pieces.encode("the beginning of a text", out_type=str)]
never = {{"disable_unk": True, "suppress_sequences": [["<pad>"], ["<s>"], ["<mask>"]]}}
lengths = {{"min_length": {least}, "max_length": {length}}}
found = generator.generate_batch([prompt], sampling_topk=10, **lengths, **never)
print(pieces.decode(found[0].sequences[0][1:]))
```""",
}


def write(run: Run, directory: Path) -> dict[str, Any]:
    """Writes a run into an empty directory, which `ctranslate2.Translator` or `Generator` loads.

    Returns:
      The number of `parameters`, and `key_heads` of each role of attention.

    Raises:
      InputError: a run that has no exact home, with the reason.
    """
    config, tokenizer = run.config, run.tokenizer
    if config.task not in USES:
        raise InputError(f"task is {config.task!r}: {HOME} takes runs of {' or '.join(USES)}")
    if isinstance(tokenizer, JsonTokenizer):
        raise InputError(
            f"{tokenizer.name}: the export to {HOME} takes a sentencepiece model; export the run "
            "to huggingface, which CTranslate2 converts itself"
        )
    assert isinstance(tokenizer, Tokenizer)
    spec, result = convert(config, run.params, tokenizer.vocabulary)
    spec.save(str(directory))
    (directory / TOKENIZER).write_bytes((run.workdir / TOKENIZER).read_bytes())
    longest = config.model.max_length
    e = config.evaluation
    use = USES[config.task].format(length=longest, beams=e.beam_size, least=e.min_length)
    text = card(run, "ctranslate2", WHAT.format(length=longest), use)
    (directory / "README.md").write_text(text, encoding="utf-8")
    return result


def convert(
    config: Config, params: Any, vocabulary: list[str]
) -> tuple[specs.ModelSpec, dict[str, Any]]:
    """The model of a run as CTranslate2 saves it, and what to report of it.

    Raises:
      InputError: it has no exact home.
    """
    model, roles = config.model, config.facts.roles
    heads = {role: model.attention_for(role).num_heads for role in roles}
    if heads["decoder"] != heads.get("cross", heads["decoder"]):
        raise InputError(
            f"{HOME} has as many heads in cross-attention as in the decoder: num_heads are "
            f"{heads['cross']} and {heads['decoder']}"
        )
    if model.positions == "rotary":
        for role in roles:
            if role != "cross":
                require_keys_that_turn(model.attention_for(role), HOME)
    require(model, HOME, absent_tokens=())
    found = _Read(plain(config, params, HOME, own=True))
    if model.positions == "learned":
        # Tokens are multiplied by √M there, and positions are not.
        found["embeddings/position"] = found["embeddings/position"] * np.float32(
            model.features**0.5
        )
    decoder = _decoder(model, heads["decoder"], "cross" in roles, found)
    names = {"unk_token": vocabulary[UNK], "bos_token": vocabulary[BOS]}
    names |= {"eos_token": vocabulary[EOS]}
    if "cross" in roles:
        encoder = _encoder(model, heads["encoder"], found)
        spec: Any = specs.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(vocabulary)
        spec.register_target_vocabulary(vocabulary)
        names |= {"decoder_start_token": vocabulary[BOS]}
        spec.config.add_source_eos = True
    else:
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(vocabulary)
    require_all(found, found.names, HOME)
    for name, value in names.items():
        setattr(spec.config, name, value)
    spec.config.layer_norm_epsilon = model.layer_norm_epsilon
    spec.validate()
    spec.optimize()
    key_heads = {
        "encoder": _key_heads(found, "encoder/layer_0/self_attention", heads.get("encoder", 1)),
        "decoder": _key_heads(found, "decoder/layer_0/self_attention", heads["decoder"]),
        "cross": _key_heads(found, "decoder/layer_0/cross_attention", heads["decoder"]),
    }
    return spec, {
        "parameters": sum(array.size for array in found.values()),
        "key_heads": {role: key_heads[role] for role in roles},
    }


class _Read(Tensors):
    """Tensors, with the `names` of those that have been read."""

    def __init__(self, tensors: Tensors):
        super().__init__(tensors)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.names.add(name)
        return super().__getitem__(name)


def _encoder(model: ModelConfig, heads: int, found: Tensors) -> specs.TransformerEncoderSpec:
    spec: Any = specs.TransformerEncoderSpec(
        model.num_layers, heads, **_fields(model, heads, found, "encoder")
    )
    spec.embeddings[0].weight = found["embeddings/token"]
    _set_stack(spec, model, heads, found, "encoder")
    return spec


def _decoder(
    model: ModelConfig, heads: int, cross: bool, found: Tensors
) -> specs.TransformerDecoderSpec:
    layers = model.decoder_layers if cross else model.num_layers
    spec: Any = specs.TransformerDecoderSpec(
        layers, heads, with_encoder_attention=cross, **_fields(model, heads, found, "decoder")
    )
    spec.embeddings.weight = found["embeddings/token"]
    _set_stack(spec, model, heads, found, "decoder")
    output = found["embeddings/token"]
    if not model.tie_embeddings:
        output = found["embeddings/output"].T
    spec.projection.weight = output
    if model.output_bias:
        spec.projection.bias = found["embeddings/vocabulary_bias"]
    return spec


def _fields(model: ModelConfig, heads: int, found: Tensors, side: str) -> dict[str, Any]:
    """The fields that both sides take, with the heads of self-attention."""
    activation = specs.Activation[ACTIVATIONS[model.activation]]
    attention = f"{side}/layer_0/self_attention"
    key_heads = _key_heads(found, attention, heads)
    fields = {
        "pre_norm": model.norm_position == "pre",
        "activation": activation,
        "ffn_glu": model.mlp == "gated",
        "rms_norm": model.norm == "rms",
        "num_heads_kv": key_heads,
        "multi_query_attention": key_heads == 1,
        "head_dim": _width(found, attention, heads),
    }
    if model.positions == "rotary":
        fields |= {
            "rotary_dim": 0,  # the whole head
            "rotary_interleave": model.rotary_pairs == "interleaved",
            "rotary_base": model.rotary_base,
        }
        if model.rotary_scaling != 1:
            fields["rotary_scaling_type"] = RotaryScalingType.Linear
            fields["rotary_scaling_factor"] = model.rotary_scaling
    return fields


def _set_stack(spec: Any, model: ModelConfig, heads: int, found: Tensors, side: str) -> None:
    """Sets all of one side except its table of tokens and its logits."""
    if model.positions != "rotary":
        spec.position_encodings.encodings = found["embeddings/position"]
    if model.norm_position == "pre":
        _set_norm(spec.layer_norm, found, f"{side}/norm")
    for i, layer in enumerate(spec.layer):
        path = f"{side}/layer_{i}"
        _set_attention(layer.self_attention, found, f"{path}/self_attention", (3, 1), heads)
        if hasattr(layer, "attention"):
            _set_attention(layer.attention, found, f"{path}/cross_attention", (1, 2, 1), heads)
        _set_norm(layer.ffn.layer_norm, found, f"{path}/mlp_norm")
        inner = {"linear_0": "up", "linear_1": "down"}
        if model.mlp == "gated":
            inner = {"linear_0": "gate", "linear_0_noact": "up", "linear_1": "down"}
        for name, part in inner.items():
            _set_linear(getattr(layer.ffn, name), found, [f"{path}/mlp/{part}"])


def _set_attention(
    spec: Any, found: Tensors, path: str, sizes: tuple[int, ...], heads: int
) -> None:
    """`sizes`: how many of query, key, value and out each matrix of `spec` holds."""
    parts = iter(("query", "key", "value", "out"))
    for linear, size in zip(spec.linear, sizes, strict=True):
        _set_linear(linear, found, [f"{path}/{next(parts)}" for _ in range(size)])
    _set_norm(spec.layer_norm, found, f"{path}_norm")
    spec.num_heads_kv = np.int32(_key_heads(found, path, heads))
    spec.head_dim = np.int32(_width(found, path, heads))


def _set_linear(spec: Any, found: Mapping[str, np.ndarray], paths: list[str]) -> None:
    """Matrices [in, out] side by side, kept as [out, in]."""
    kernels = [found[f"{path}/kernel"] for path in paths]
    spec.weight = np.ascontiguousarray(np.concatenate(kernels, 1).T)
    if f"{paths[0]}/bias" in found:
        spec.bias = np.concatenate([found[f"{path}/bias"] for path in paths])


def _set_norm(spec: Any, found: Mapping[str, np.ndarray], path: str) -> None:
    spec.gamma = found[f"{path}/scale"]
    if f"{path}/bias" in found:
        spec.beta = found[f"{path}/bias"]


def _width(found: Tensors, path: str, heads: int) -> int:
    """The width of a head."""
    return found[f"{path}/query/kernel"].shape[1] // heads


def _key_heads(found: Tensors, path: str, heads: int) -> int:
    """K of a sublayer; 0 where there is none."""
    kernel = found.get(f"{path}/key/kernel", np.zeros((0, 0)))
    return kernel.shape[1] // (_width(found, path, heads) if kernel.size else 1)
