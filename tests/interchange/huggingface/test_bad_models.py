"""Directories that are no model of ours: one line that says why, and nothing written."""

import json
import pickle
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from small_models import foreign

from mhe_jax.cli import commands
from mhe_jax.config import InputError
from mhe_jax.interchange.huggingface.reading import read
from mhe_jax.training.checkpoint.tensors import WEIGHTS, read_tensors, write_tensors

TOKENIZER = "tokenizer.json"


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
    return lambda name="gpt2": shutil.copytree(good(name), tmp_path / "source")


def change(path, **fields):
    """Other fields in a file of JSON; of `...` one less."""
    values = json.loads(path.read_text()) | fields
    kept = {name: value for name, value in values.items() if value is not ...}
    path.write_text(json.dumps(kept))


def refused(says, *flags, source="source"):
    """Runs the command, which must say one line and leave everything as it was."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=says) as caught:
        commands.main(["convert", source, "new", *flags])
    assert "\n" not in str(caught.value)
    assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


# Weights


LAYER = "transformer.h.1.mlp.c_fc.weight"
WORDS, HEAD = "transformer.wte.weight", "lm_head.weight"
# What the line must say, and the change of the tensors.
FAULTS = {
    f"no tensor {LAYER}$": lambda t: t.pop(LAYER),
    f"no tensor {WORDS} or {HEAD}$": lambda t: t.pop(WORDS),
    rf"{LAYER} is float32\[23, 16\]": lambda t: t.update({LAYER: t[LAYER].T}),
    "a tensor transformer.h.2.mlp": lambda t: t.update({LAYER.replace("1", "2"): t[LAYER]}),
    f"{LAYER} is int8": lambda t: t.update({LAYER: np.ones(t[LAYER].shape, np.int8)}),
    f"{HEAD} differs from {WORDS}": lambda t: t.update({HEAD: t[WORDS] + 1}),
}


@pytest.mark.parametrize("says", FAULTS)
def test_tensors_that_do_not_fit(spoilt, says):
    path = spoilt() / WEIGHTS
    tensors, metadata = read_tensors(path)
    FAULTS[says](tensors)
    write_tensors(path, tensors, metadata)
    refused(f"^source: .*{says}")


def test_weights_in_bfloat16_come_in(spoilt):
    """Most models of today have them."""
    path = spoilt() / WEIGHTS
    tensors, metadata = read_tensors(path)
    half = {name: np.asarray(jax.numpy.asarray(x, "bfloat16")) for name, x in tensors.items()}
    write_tensors(path, half, metadata)
    commands.main(["convert", "source", "new"])
    assert sorted(path.name for path in Path().iterdir()) == ["new", "source"]


def test_a_file_that_is_cut(spoilt):
    path = spoilt() / WEIGHTS
    path.write_bytes(path.read_bytes()[:100])
    refused(f"^source/{WEIGHTS}: ")


class Trap:
    """What a pickle executes when it is opened."""

    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


def test_pickles_are_not_opened(spoilt):
    (spoilt() / WEIGHTS).unlink()
    Path("source", "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refused(f"^source: has no {WEIGHTS}")
    assert not Path("sprung").exists()


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ([], "index.json: is not a JSON object"),
        ({"weight_map": {"x": "none.safetensors"}}, "none.safetensors: "),
    ],
    ids=str,
)
def test_several_files(spoilt, index, says):
    directory = spoilt()
    (directory / WEIGHTS).rename(directory / "part.safetensors")
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    refused(says)


# `config.json`


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
# A model, the fields that are changed, and what the line names if it is not the first of them.
CONFIGS = [
    ("gpt2", {"architectures": ["GPT2LMHead"]}, ""),
    ("gpt2", {"architectures": ...}, ""),
    ("gpt2", {"n_embd": ...}, ""),
    ("gpt2", {"n_head": 5}, "num_heads is 5"),
    ("gpt2", {"activation_function": "mish"}, ""),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ""),
    ("gpt2", {"scale_attn_weights": False}, ""),
    ("gpt2", {"quantization_config": {"bits": 4}}, ""),
    ("gpt2", {"eos_token_id": [7, 8]}, r"has 1 as eos"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rotary_scaling"),
    ("llama", {"rope_scaling": LLAMA3}, "rope_type is 'llama3'"),
    ("llama", {"sliding_window": 9}, ""),
    ("llama", {"partial_rotary_factor": 0.5}, ""),
    ("llama", {"max_position_embeddings": 4097, **MISTRAL}, "sliding_window is 4096"),
    ("bert", {"is_decoder": True}, ""),
    ("bert", {"position_embedding_type": "relative_key"}, ""),
    ("marian", {"normalize_before": True}, ""),
    ("marian", {"add_final_layer_norm": True}, ""),
    ("marian", {"scale_embedding": ...}, ""),
    ("marian", {"decoder_start_token_id": ...}, ""),
    ("marian", {"share_encoder_decoder_embeddings": False}, ""),
    ("labels", {"problem_type": "multi_label_classification"}, ""),
    ("labels", {"problem_type": "regression"}, r"classifier.weight is float32\[3, 16\]"),
    ("labels", {"id2label": {"0": "a", "1": "b"}}, r"classifier.weight is float32\[3, 16\]"),
]


@pytest.mark.parametrize(("name", "fields", "says"), CONFIGS, ids=str)
def test_a_config_that_ours_has_no_place_for(spoilt, name, fields, says):
    change(spoilt(name) / "config.json", **fields)
    says = says or f"{next(iter(fields))} is "
    refused(f"^source[:/].*{says}")


# What these classes of transformers do not compute with, or not in this way.
HARMLESS = {
    "gpt2": [
        {"quantization_config": None, "eos_token_id": [7, 1]},
        {"bos_token_id": 50256, "eos_token_id": None},  # past the vocabulary: eos begins a text
    ],
    "llama": [
        {"sliding_window": 40, "rope_parameters": {"rope_type": "default", "factor": 9}},
        {**MISTRAL, "use_sliding_window": True, "attention_bias": True},
    ],
}


@pytest.mark.parametrize(
    ("name", "fields"), [(name, more) for name, rows in HARMLESS.items() for more in rows]
)
def test_fields_that_change_nothing(spoilt, name, fields):
    path = spoilt(name) / WEIGHTS
    if "architectures" in fields:  # Mistral has no biases
        tensors, metadata = read_tensors(path)
        kept = {n: x for n, x in tensors.items() if not n.endswith(".bias")}
        write_tensors(path, kept, metadata)
    change(Path("source/config.json"), **fields)
    read(Path("source"))


# The tokenizer, and what is there already


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("gpt2", "{", "", "is not a tokenizer"),
        ("gpt2", "<|endoftext|>", "<|stop|>", "no token that ends a text"),
        ("bert", "[MASK]", "[HIDE]", "needs pad, unk, bos, eos and mask"),
    ],
)
def test_a_tokenizer_that_is_none(spoilt, name, old, new, says):
    path = spoilt(name) / TOKENIZER
    path.write_text(path.read_text().replace(old, new))
    refused(f"source/{TOKENIZER}: .*{says}")


def test_a_tokenizer_of_another_model(spoilt, good):
    shutil.copyfile(good("gpt2") / TOKENIZER, spoilt("bert") / TOKENIZER)
    refused(rf"source/{TOKENIZER}: has \d+ tokens, and the model \d+ rows")


def test_no_tokenizer(spoilt):
    (spoilt("marian") / TOKENIZER).unlink()
    refused(f"^source: has no {TOKENIZER}")


def test_what_is_there_already(spoilt):
    spoilt()
    Path("new").write_text("mine")
    refused("^new is there already")


def test_no_source(spoilt):
    directory = spoilt()
    refused("no run at none", source="none")
    (directory / "config.json").unlink()
    refused("no run at source: .*config.json")


def test_another_kind_comes_later(spoilt):
    """And there is no text to fit it on."""
    spoilt()
    refused("^source is not a run yet", "--kind", "mqa")
    commands.main(["convert", "source", "first"])
    refused(r"data\.train of .*first.*--rows is 1000", "--kind", "mqa", source="first")
