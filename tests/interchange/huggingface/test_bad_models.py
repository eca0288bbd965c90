"""Directories that are no model of ours: one line that says why, and nothing written."""

import json
import pickle
from pathlib import Path

import jax
import numpy as np
import pytest
from foreign_models import foreign

from mhe_jax.cli import convert as command
from mhe_jax.config import InputError
from mhe_jax.interchange.huggingface import read
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors, write_tensors

pytest.importorskip("tokenizers", reason="needs the extra `export`")
pytest.importorskip("safetensors", reason="needs the extra `export`")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """`good(name)`: a directory with a model that comes in, made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("good") / name
            foreign(name, made[name])
        return made[name]

    return make


@pytest.fixture
def spoilt(good, tmp_path, monkeypatch):
    """`spoilt(name)`: a copy of it, named `source`, in the directory where the command runs."""
    monkeypatch.chdir(tmp_path)

    def make(name="gpt2"):
        directory = tmp_path / "source"
        directory.mkdir()
        for file in good(name).iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        return directory

    return make


def change(path, **fields):
    """Other fields in a file of JSON; of None one less."""
    values = json.loads(path.read_text()) | fields
    kept = {name: value for name, value in values.items() if value is not ...}
    path.write_text(json.dumps(kept))


def refused(says, *flags, source="source"):
    """Runs the command, which must say one line and leave everything as it was."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=says) as caught:
        command.main([source, "new", *flags])
    assert "\n" not in str(caught.value)
    assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_the_good_ones_come_in(spoilt):
    spoilt()
    command.main(["source", "new"])
    assert sorted(path.name for path in Path().iterdir()) == ["new", "source"]


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_weights_that_are_cut(spoilt, size):
    path = spoilt() / WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    refused("^source/model.safetensors: cannot be read: ")


LAYER = "transformer.h.1.mlp.c_fc.weight"
WORDS, HEAD = "transformer.wte.weight", "lm_head.weight"


def without(tensors):
    del tensors[LAYER]


def without_words(tensors):
    del tensors[WORDS]


def of_another_shape(tensors):
    tensors[LAYER] = tensors[LAYER].T


def one_more(tensors):
    tensors["transformer.h.2.mlp.c_fc.weight"] = tensors[LAYER]


def not_a_number(tensors):
    tensors[LAYER] = np.where(np.eye(*tensors[LAYER].shape) > 0, np.nan, tensors[LAYER])


def whole_numbers(tensors):
    tensors[LAYER] = np.ones(tensors[LAYER].shape, np.int8)


def untied(tensors):
    tensors[HEAD] = tensors[WORDS] + 1


FAULTS = {
    without: f"has no tensor {LAYER}$",
    without_words: f"has no tensor {WORDS} or {HEAD}$",
    of_another_shape: rf"{LAYER} has shape \(23, 16\): config.json asks for \(16, 23\)$",
    one_more: "has a tensor transformer.h.2.mlp.c_fc.weight, for which the model has no place$",
    not_a_number: f"{LAYER} holds NaN or infinity$",
    whole_numbers: f"{LAYER} is int8: takes floats$",
    untied: f"{HEAD} differs from {WORDS}, ",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_tensors_that_do_not_fit(spoilt, fault):
    path = spoilt() / WEIGHTS
    tensors, metadata = read_tensors(path)
    fault(tensors)
    write_tensors(path, tensors, metadata)
    refused(f"^source: {FAULTS[fault]}")


def test_weights_in_bfloat16_come_in(spoilt):
    """Most models of today have them."""
    path = spoilt() / WEIGHTS
    tensors, metadata = read_tensors(path)
    half = {name: np.asarray(jax.numpy.asarray(x, "bfloat16")) for name, x in tensors.items()}
    write_tensors(path, half, metadata)
    command.main(["source", "new"])


class Trap:
    """What a pickle executes when it is opened."""

    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt"])
def test_pickles_are_not_opened(spoilt, name):
    directory = spoilt()
    (directory / WEIGHTS).unlink()
    (directory / name).write_bytes(pickle.dumps(Trap()))
    refused(f"^source: has no {WEIGHTS}, and {name} would execute what it holds: save it as")
    assert not Path("sprung").exists()
    pickle.loads((directory / name).read_bytes())
    assert Path("sprung").exists()


def test_no_weights(spoilt):
    (spoilt() / WEIGHTS).unlink()
    refused(f"^source: has no {WEIGHTS}$")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[", "source/model.safetensors.index.json: not JSON"),
        ({}, "has no weight_map of files"),
        ({"weight_map": {"x": 3}}, "has no weight_map of files"),
        ({"weight_map": {"x": "../model.safetensors"}}, "is not the name of a file beside it"),
        ({"weight_map": {"x": "/etc/passwd"}}, "is not the name of a file beside it"),
        ({"weight_map": {"x": ".."}}, "cannot be read"),
        ({"weight_map": {"x": "none.safetensors"}}, "none.safetensors: cannot be read"),
        ({"weight_map": {"x": "part.safetensors"}}, "part.safetensors: has no tensor x"),
    ],
    ids=str,
)
def test_several_files(spoilt, index, says):
    directory = spoilt()
    (directory / WEIGHTS).rename(directory / "part.safetensors")
    path = directory / "model.safetensors.index.json"
    path.write_text(index if isinstance(index, str) else json.dumps(index))
    refused(says)


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
CONFIGS = {
    "unknown architecture": (
        "gpt2",
        {"architectures": ["GPT2LMHead"]},
        "architectures is 'GPT2LMHead': takes one of GPT2LMHeadModel, .*mean GPT2LMHeadModel",
    ),
    "no architecture": ("gpt2", {"architectures": ...}, "architectures is 'none': takes one of"),
    "a name alone": ("gpt2", {"architectures": "GPT"}, "architectures is 'GPT': takes"),
    "a list in a list": ("gpt2", {"architectures": [["x"]]}, "architectures is .*: takes one of"),
    "a number": ("gpt2", {"architectures": 5}, "architectures is 5: takes one of"),
    "another type": ("gpt2", {"model_type": "bert"}, "model_type is 'bert': takes 'gpt2'"),
    "two names of one size": (
        "gpt2",
        {"num_attention_heads": 2},
        "num_attention_heads is 2: takes 4",
    ),
    "two numbers of labels": ("labels", {"num_labels": 2}, "num_labels is 2: takes 3"),
    "numbers in pieces": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is"),
    "heads taken out": ("bert", {"pruned_heads": {"0": [1]}}, "pruned_heads is"),
    "layers that differ": ("bert", {"per_layer_config": {"0": {"x": 1}}}, "per_layer_config is"),
    "other weights": ("gpt2", {"transformers_weights": "b.safetensors"}, "transformers_weights is"),
    "layers with a window": (
        "llama",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types is",
    ),
    "a decoder": ("bert", {"is_decoder": True}, "is_decoder is True"),
    "pairs side by side": ("llama", {"rope_interleaved": True}, "rope_interleaved is True"),
    "positions by distance": (
        "bert",
        {"position_embedding_type": "relative_key"},
        "position_embedding_type is",
    ),
    "scores without a scale": ("gpt2", {"scale_attn_weights": None}, "scale_attn_weights is None"),
    "norms first": ("marian", {"normalize_before": True}, "normalize_before is True"),
    "half of a head": ("llama", {"partial_rotary_factor": 0.5}, "'?default"),
    "a base of each sort of layer": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters is",
    ),
    "scaled twice": (
        "llama",
        {"rope_scaling": {"type": "linear", "rope_type": "default"}},
        "rope_scaling is",
    ),
    "no factor": (
        "llama",
        {"rope_scaling": {"type": "linear"}},
        "factor of rotary positions is None",
    ),
    "several ends": (
        "gpt2",
        {"eos_token_id": [7, 8]},
        r"has 1 as eos, and source/config.json has \[7, 8\]$",
    ),
    "no size": ("gpt2", {"n_embd": ...}, "n_embd is None: takes a whole number above 0$"),
    "a size in words": ("gpt2", {"n_embd": "16"}, "n_embd is '16': takes a whole number above 0$"),
    "heads that do not divide": (
        "gpt2",
        {"n_head": 5},
        "cannot be converted: model.attention.num_heads is 5: must divide model.features=16$",
    ),
    "a rate": ("gpt2", {"resid_pdrop": 2.0}, "cannot be converted: model.dropout_rate is 2.0"),
    "activation": ("gpt2", {"activation_function": "mish"}, "is 'mish': takes one of relu, gelu"),
    "scores by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx is True",
    ),
    "a window": ("llama", {"sliding_window": 9}, "sliding_window is 9: takes"),
    "a window that is not named": (
        "llama",
        {**MISTRAL, "max_position_embeddings": 4097},
        "sliding_window is 4096: takes None$",
    ),
    "a scale that is not named": (
        "marian",
        {"scale_embedding": ...},
        "scale_embedding is False: takes True$",
    ),
    "other scaling": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling is .*llama3.*: takes .*default",
    ),
    "no object": ("llama", {"rope_scaling": [1]}, r"rope_scaling is \[1\]: takes an object$"),
    "a base": ("llama", {"rope_theta": -1}, "rope_theta is -1: takes a number above 0$"),
    "a factor": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        "factor of rotary positions is '2': takes a number above 0$",
    ),
    "odd heads": ("llama", {"head_dim": 3}, "cannot be converted: .* an even width, not 3$"),
    "groups": ("llama", {"num_key_value_heads": 3}, "num_kv_heads is 3: must divide"),
    "another eos": ("gpt2", {"eos_token_id": 7}, "has 1 as eos, and source/config.json has 7$"),
    "no beginning": (
        "marian",
        {"decoder_start_token_id": ...},
        "decoder_start_token_id is None: takes a token, 0 to",
    ),
    "a beginning past the end": (
        "marian",
        {"decoder_start_token_id": 99_999},
        "decoder_start_token_id is 99999: takes a token, 0 to",
    ),
    "two vocabularies": (
        "marian",
        {"share_encoder_decoder_embeddings": False},
        "is False: takes True$",
    ),
    "several labels": (
        "labels",
        {"problem_type": "multi_label_classification"},
        "problem_type is 'multi_label_classification': takes None",
    ),
    "several numbers": (
        "labels",
        {"problem_type": "regression"},
        r"classifier.weight has shape \(3, 16\): config.json asks for \(1, 16\)$",
    ),
    "labels without a name": (
        "labels",
        {"id2label": {"0": "a", "2": "b"}},
        "id2label is .*: takes a name for each number$",
    ),
    "two labels of one name": (
        "labels",
        {"id2label": {"0": "a", "1": "b", "2": "a"}},
        "id2label is .*: takes a name for each number$",
    ),
    "labels in a list": ("labels", {"id2label": ["a", "b"]}, "id2label is .*: takes a name"),
    "a number of labels": ("labels", {"id2label": 3}, "id2label is 3: takes a name"),
    "fewer labels": (
        "labels",
        {"id2label": {"0": "a", "1": "b"}},
        r"classifier.weight has shape \(3, 16\): config.json asks for \(2, 16\)$",
    ),
}


# What these classes of transformers do not compute with, or not in this way.
HARMLESS = {
    "gpt2": [
        {"mamba": 3, "use_return_dict": False, "torchscript": True, "tie_encoder_decoder": True},
        {"summary_type": "mean", "n_ctx": 7, "reorder_and_upcast_attn": True, "is_decoder": True},
        {"quantization_config": None, "pruned_heads": {}, "transformers_weights": WEIGHTS},
        {"n_layer": ..., "num_hidden_layers": 2, "hidden_size": 16},
        {"eos_token_id": [7, 1], "add_cross_attention": None},
    ],
    "llama": [
        {"layer_types": ["full_attention"] * 2, "rope_interleaved": False, "unsloth_version": "1"},
        {"logits_scaling": 8.0, "final_logit_softcapping": 30.0, "normalize_before": True},
        {"sliding_window": 40}, {"sliding_window": 9, "use_sliding_window": False},
        {**MISTRAL, "use_sliding_window": True}, {**MISTRAL, "sliding_window": None},
        {"rope_parameters": {"rope_type": "default", "factor": 9, "partial_rotary_factor": 1.0}},
        {"transformers.js_config": {"dtype": "q4"}, "auto_map": {"AutoModel": "a.B"}},
    ],
    "bert": [{"rope_theta": 1, "chunk_size_feed_forward": 2, "num_labels": 9, "is_decoder": None}],
    "labels": [{"num_labels": 3}, {"id2label": None, "num_labels": 3}],
    "marian": [
        {"extra_pos_embeddings": 58101, "add_bias_logits": True, "_num_labels": 3},
        {"d_model": ..., "hidden_size": 16, "normalize_before": None, "num_labels": 3},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fields"), [(name, more) for name, rows in HARMLESS.items() for more in rows]
)
def test_fields_that_change_nothing(spoilt, name, fields):
    if "MistralForCausalLM" in fields.get("architectures", ()):
        fields = fields | {"attention_bias": True}
        path = spoilt(name) / WEIGHTS
        tensors, metadata = read_tensors(path)
        kept = {n: x for n, x in tensors.items() if not n.endswith(".bias")}
        write_tensors(path, kept, metadata)
    else:
        spoilt(name)
    change(Path("source/config.json"), **fields)
    read(Path("source"))


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_config_that_ours_has_no_place_for(spoilt, fault):
    name, fields, says = CONFIGS[fault]
    change(spoilt(name) / "config.json", **fields)
    refused(f"^source[:/].*{says}")


def test_a_config_without_a_type(spoilt):
    """`convert` takes such a directory for one of another program."""
    change(spoilt("gpt2") / "config.json", model_type=...)
    with pytest.raises(InputError, match="model_type is None: takes 'gpt2'$"):
        read(Path("source"))


def test_bos_past_the_vocabulary_is_that_of_nobody(spoilt):
    """As a config leaves it that was not told of a smaller vocabulary: eos begins a text then."""
    change(spoilt() / "config.json", bos_token_id=50256, eos_token_id=None)
    command.main(["source", "new"])


def test_a_tokenizer_of_another_model(spoilt, good):
    path = spoilt("bert") / "tokenizer.json"
    path.write_bytes((good("gpt2") / "tokenizer.json").read_bytes())
    refused(r"source/tokenizer.json: has \d+ tokens, and the model \d+ rows: not its tokenizer$")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "source/tokenizer.json: is not a tokenizer of the library tokenizers"),
        ("{", "source/tokenizer.json: is not a tokenizer of the library tokenizers"),
        ('{"model": {}}', "source/tokenizer.json: is not a tokenizer of the library tokenizers"),
        (b"\xff\xfe", "source/tokenizer.json: is not a tokenizer of the library tokenizers"),
    ],
)
def test_no_tokenizer(spoilt, text, says):
    path = spoilt() / "tokenizer.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(says)


def test_a_tokenizer_without_an_end(spoilt):
    path = spoilt() / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|stop|>"))
    refused("source/tokenizer.json: has no token that ends a text, as </s> or")


def test_an_encoder_without_a_mask(spoilt):
    path = spoilt("bert") / "tokenizer.json"
    path.write_text(path.read_text().replace("[MASK]", "[HIDE]"))
    refused("source/tokenizer.json: an encoder needs pad, unk, bos, eos and mask$")


def test_no_tokenizer_at_all(spoilt):
    (spoilt() / "tokenizer.json").unlink()
    refused("^source: has no tokenizer.json: save a fast tokenizer beside the model$")


def test_the_two_tokenizers_of_marian(spoilt):
    directory = spoilt("marian")
    (directory / "tokenizer.json").unlink()
    for name in ("source.spm", "target.spm", "vocab.json"):
        (directory / name).write_bytes(b"")
    refused(
        "^source: has source.spm, target.spm and no tokenizer.json: a run has one tokenizer for "
        "both languages: takes one with the ids of vocab.json$"
    )


def test_what_is_there_already(spoilt):
    spoilt()
    with pytest.raises(InputError, match=r"^workdir=.*/new\[1\]: takes a path without"):
        command.main(["source", "new[1]"])
    Path("new").mkdir()
    refused("^new is there already: takes a new directory$")
    Path("new").rmdir()
    Path("new").write_text("mine")
    refused("^new is there already: takes a new directory$")


def test_no_source(spoilt):
    directory = spoilt()
    refused("no run at none", source="none")
    (directory / "config.json").unlink()
    refused("no run at source: .*config.json")


def test_a_kind_comes_later(spoilt):
    spoilt()
    refused("^source is not a run yet: first `convert source NEW`", "--kind", "mqa")


def test_a_run_that_has_come_in_has_no_text_to_fit_on(spoilt):
    """And can have another kind all the same."""
    spoilt()
    command.main(["source", "first"])
    refused("data.train of .*first is not set, and --rows is 1000: .* takes --rows 0$",
            "--kind", "mqa", source="first")  # fmt: skip
    command.main(["first", "new", "--kind", "mqa", "--rows", "0"])
