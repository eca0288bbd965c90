"""Models of transformers made by hand: as a run they compute the equations of their class."""

import json

import numpy as np
import pytest
from foreign_arrays import FORWARDS, P, make
from safetensors.numpy import save_file
from small_models import apply, byte_level, word_piece

from mhe_jax.config import InputError
from mhe_jax.interchange.huggingface.reading import ARCHITECTURES, INDEX, read
from mhe_jax.interchange.huggingface.tokenizer import read_tokenizer

LABELS = {"id2label": {str(i): f"label {i}" for i in range(3)}}
CASES = [
    *((name, LABELS if "Classification" in name else {}) for name in ARCHITECTURES),
    ("RobertaForMaskedLM", {"pad_token_id": 0}),
    ("RobertaForSequenceClassification", {"pad_token_id": 4, **LABELS}),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}),
]


def given(kind, tokenizer):
    """What a run takes, and what the class of transformers takes: a row of ordinary tokens."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(5, tokenizer.vocabulary_size, (2, 1, 11)).astype(np.int32)
    (row, other), places = tokens, np.arange(11)[None]
    ids, others = (tokenizer.of_file[one[0]] for one in tokens)
    if kind == "MarianMTModel":
        return (row, other), (ids, others)
    if kind.endswith("MaskedLM"):
        return (row, places), (ids,)
    if kind.endswith(("Classification", "Answering")):
        types = (places > 6).astype(np.int32) * kind.startswith("Bert")
        return (row, types, np.ones_like(row)), (ids, types[0])
    return (row,), (ids,)


def check(kind, directory, t, config):
    run, params, tokenizer = read(directory)
    ours, theirs = given(kind, tokenizer)
    found = apply(run, params, *ours)[0]
    expected = FORWARDS[config["model_type"]](t, config, *theirs)
    if run.task in ("lm", "mlm", "translation"):
        there = tokenizer.of_file >= 0
        found, expected = found[:, there], expected[:, tokenizer.of_file[there]]
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)
    return run


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=str)
def test_a_run_computes_the_equations_of_its_class(kind, fields, tmp_path):
    t, config, _ = make(kind, tmp_path, **fields)
    run = check(kind, tmp_path, t, config)
    assert run.model.max_length == P
    if fields is LABELS:
        assert run.data.labels == tuple(LABELS["id2label"].values())


WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
EMBEDDED, SHARED = "model.embed_tokens.weight", "model.shared.weight"
BERT = "bert.embeddings.word_embeddings.weight"
TWINS = [
    ("GPT2LMHeadModel", WTE, HEAD),
    ("LlamaForCausalLM", EMBEDDED, HEAD),
    ("MarianMTModel", SHARED, HEAD),
    ("BertForMaskedLM", BERT, "cls.predictions.decoder.weight"),
    ("BertForMaskedLM", "cls.predictions.bias", "cls.predictions.decoder.bias"),
]


@pytest.mark.parametrize(("kind", "name", "twin"), TWINS)
def test_tied_numbers_have_any_of_their_names(kind, name, twin, tmp_path):
    t, config, _ = make(kind, tmp_path, tie_word_embeddings=True)
    t |= {HEAD: t[EMBEDDED]} if EMBEDDED in t else {}
    others = {key: array for key, array in t.items() if key not in (name, HEAD)}
    save_file({**others, twin: t[name]}, tmp_path / "model.safetensors")
    check(kind, tmp_path, t, config)
    save_file({**others, name: t[name], twin: t[name] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"{twin} differs from {name}"):
        read(tmp_path)


@pytest.mark.parametrize(
    "kind", ["GPT2LMHeadModel", "BertForSequenceClassification", "MarianMTModel"]
)
def test_a_body_without_its_name_in_front(kind, tmp_path):
    t, config, _ = make(kind, tmp_path, **LABELS if "Classification" in kind else {})
    body = next(key.split(".")[0] for key in t if key.split(".")[0] in BODIES)
    bare = {key.removeprefix(f"{body}."): array for key, array in t.items()}
    assert bare.keys() != t.keys()
    save_file(bare, tmp_path / "model.safetensors")
    check(kind, tmp_path, t, config)


BODIES = ("transformer", "model", "bert", "roberta")


def test_which_of_several_files_is_read(tmp_path):
    """As transformers chooses: one file, else those of the index, whole."""
    t, config, _ = make("GPT2LMHeadModel", tmp_path)
    one, stale = tmp_path / "model.safetensors", {key: -array for key, array in t.items()}
    save_file(stale, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(stale, "model-00001-of-00001.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    check("GPT2LMHeadModel", tmp_path, t, config)
    one.unlink()
    positions = "transformer.wpe.weight"
    second = {WTE: t[WTE], positions: t[positions]}
    save_file(second, tmp_path / "model-00002.safetensors")
    index["weight_map"][positions] = "model-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    check("GPT2LMHeadModel", tmp_path, stale | {positions: t[positions]}, config)


SETTINGS, TEXTS = "tokenizer_config.json", ["The Dog", "é Größe", "中文", "a dog"]


@pytest.mark.parametrize(
    ("there", "said", "right"),
    [
        ({"lowercase": True}, {"do_lower_case": False}, {"lowercase": False}),
        (
            {"lowercase": False, "strip_accents": True},
            {"do_lower_case": True, "strip_accents": False},
            {"lowercase": True, "strip_accents": False},
        ),
        ({"add_prefix_space": False}, {"add_prefix_space": True}, {"add_prefix_space": True}),
    ],
)
def test_what_the_settings_say_of_text_is_put_into_the_file(there, said, right, tmp_path):
    import tokenizers as t

    file, part, layer = word_piece(tmp_path), "normalizer", t.normalizers.BertNormalizer
    if "add_prefix_space" in there:
        file, part, layer = byte_level(tmp_path), "pre_tokenizer", t.pre_tokenizers.ByteLevel
    setattr(file, part, layer(**there))
    file.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / SETTINGS).write_text(json.dumps(said))
    found = read_tokenizer(tmp_path, file.get_vocab_size())
    setattr(file, part, layer(**right))
    ids = [found.of_file[found.encode(text)].tolist() for text in TEXTS]
    assert ids == [file.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize(
    ("kind", "rename", "more"),
    [
        (
            "BertForMaskedLM",
            {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
            ["bert.embeddings.position_ids", "bert.pooler.dense.bias", "cls.seq_relationship.bias"],
        ),
        ("GPT2LMHeadModel", {}, ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("RobertaForSequenceClassification", {}, ["roberta.pooler.dense.weight"]),
    ],
)
def test_names_and_tensors_of_older_versions(kind, rename, more, tmp_path):
    t, config, _ = make(kind, tmp_path, **LABELS if "Classification" in kind else {})
    old = dict.fromkeys(more, np.ones(3, np.float32))
    for name, array in t.items():
        for new, before in rename.items():
            name = name.replace(new, before)
        old[name] = array
    save_file(old, tmp_path / "model.safetensors")
    check(kind, tmp_path, t, config)
