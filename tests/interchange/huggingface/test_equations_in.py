"""Models of transformers made by hand: as a run they compute the equations of their class."""

import json

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="needs the extra `export`")
pytest.importorskip("safetensors", reason="needs the extra `export`")

from foreign_arrays import FORWARDS, P, make
from foreign_tokenizers import byte_level, word_piece
from random_models import apply
from safetensors.numpy import save_file

from mhe_jax.config import InputError
from mhe_jax.data.tokenizer_json import ABSENT
from mhe_jax.interchange.huggingface import read
from mhe_jax.interchange.huggingface.reading import ARCHITECTURES, INDEX
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
EMBEDDED = "model.embed_tokens.weight"
SHARED, BERT = "model.shared.weight", "bert.embeddings.word_embeddings.weight"
ROBERTA = "roberta.embeddings.word_embeddings.weight"
TWINS = [
    *((kind, WTE, HEAD) for kind in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM")),
    ("LlamaForCausalLM", EMBEDDED, HEAD),
    ("MistralForCausalLM", EMBEDDED, HEAD),
    ("MarianMTModel", SHARED, HEAD),
    ("MarianMTModel", SHARED, "model.encoder.embed_tokens.weight"),
    ("MarianMTModel", SHARED, "model.decoder.embed_tokens.weight"),
    ("BertForMaskedLM", BERT, "cls.predictions.decoder.weight"),
    ("BertForMaskedLM", "cls.predictions.bias", "cls.predictions.decoder.bias"),
    ("RobertaForMaskedLM", ROBERTA, "lm_head.decoder.weight"),
    ("RobertaForMaskedLM", "lm_head.bias", "lm_head.decoder.bias"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "twin"), TWINS)
def test_tied_numbers_have_any_of_their_names(kind, name, twin, tmp_path):
    t, config, _ = make(kind, tmp_path, tie_word_embeddings=True)
    t |= {HEAD: t[EMBEDDED]} if EMBEDDED in t else {}
    others = {key: array for key, array in t.items() if key not in (name, HEAD)}
    for tensors in ({**others, twin: t[name]}, {**others, twin: t[name], name: t[name]}):
        save_file(tensors, tmp_path / "model.safetensors")
        check(kind, tmp_path, t, config)
    save_file({**others, name: t[name], twin: t[name] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"{twin} differs from {name}"):
        read(tmp_path)
    save_file(others, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"has no tensor {name} or .*{twin}"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_body_without_its_name_in_front(kind, tmp_path):
    t, config, _ = make(kind, tmp_path, **LABELS if "Classification" in kind else {})
    body = next(key.split(".")[0] for key in t if key.split(".")[0] in BODIES)
    bare = {key.removeprefix(f"{body}."): array for key, array in t.items()}
    assert bare.keys() != t.keys()
    save_file(bare, tmp_path / "model.safetensors")
    check(kind, tmp_path, t, config)


BODIES = ("transformer", "model", "bert", "roberta")


def test_the_bias_of_logits_that_are_not_tied(tmp_path):
    """Some files have it once, and of two the decoder's is used."""
    t, config, _ = make("BertForMaskedLM", tmp_path, tie_word_embeddings=False)
    ours, theirs = "cls.predictions.bias", "cls.predictions.decoder.bias"
    t["cls.predictions.decoder.weight"] = t[BERT]
    for tensors in (t, {**t, ours: t[ours] + 1, theirs: t[ours]}):
        save_file(tensors, tmp_path / "model.safetensors")
        check("BertForMaskedLM", tmp_path, t, config)


def test_which_of_several_files_is_read(tmp_path):
    """As transformers chooses: one file, else those of the index, whole; and no other."""
    t, config, _ = make("GPT2LMHeadModel", tmp_path)
    one, stale = tmp_path / "model.safetensors", {key: -array for key, array in t.items()}
    others = ("model-00001-of-00001", "consolidated", "model.fp16", "adapter_model")
    for name in others:
        save_file(stale, tmp_path / f"{name}.safetensors")
    index = {"weight_map": dict.fromkeys(stale, "model-00001-of-00001.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    check("GPT2LMHeadModel", tmp_path, t, config)
    one.unlink()
    check("GPT2LMHeadModel", tmp_path, stale, config)
    positions = "transformer.wpe.weight"
    second = {WTE: t[WTE], positions: t[positions]}
    save_file(second, tmp_path / "model-00002.safetensors")
    index["weight_map"][positions] = "model-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    check("GPT2LMHeadModel", tmp_path, stale | {positions: t[positions]}, config)
    (tmp_path / INDEX).unlink()
    with pytest.raises(InputError, match="has no model.safetensors"):
        read(tmp_path)
    save_file(t, one)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="has adapter_config.json"):
        read(tmp_path)


SETTINGS, TEXTS = "tokenizer_config.json", ["The Dog", "é Größe", "中文", "a dog"]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"lowercase": True}, {"do_lower_case": False}),
        ({"lowercase": False}, {"do_lower_case": True, "strip_accents": False}),
        ({"lowercase": False, "strip_accents": True}, {"strip_accents": False}),
        ({"handle_chinese_chars": True}, {"tokenize_chinese_chars": False}),
        ({}, {"do_lower_case": None, "strip_accents": None, "tokenize_chinese_chars": None}),
        ({"lowercase": False}, {"do_lower_case": True, "tokenizer_class": "TokenizersBackend"}),
        ({"add_prefix_space": True}, {"add_prefix_space": False, "do_lower_case": True}),
        ({"add_prefix_space": False}, {"add_prefix_space": True, "legacy": True}),
    ],
)
def test_what_the_settings_say_of_text_is_put_into_the_file(there, said, tmp_path):
    import tokenizers as t

    fields = {
        "do_lower_case": "lowercase",
        "tokenize_chinese_chars": "handle_chinese_chars",
        "strip_accents": "strip_accents",
    }
    if "add_prefix_space" in said:
        file, part = byte_level(tmp_path), "pre_tokenizer"
        file.pre_tokenizer = t.pre_tokenizers.ByteLevel(**there)
        right = t.pre_tokenizers.ByteLevel(add_prefix_space=said["add_prefix_space"])
    else:
        file, part = word_piece(tmp_path), "normalizer"
        file.normalizer = t.normalizers.BertNormalizer(**there)
        given = {fields[name]: value for name, value in said.items() if name in fields}
        given = {} if "tokenizer_class" in said else given
        given = {name: value for name, value in given.items() if value is not None}
        right = t.normalizers.BertNormalizer(**there | given)
    file.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / SETTINGS).write_text(json.dumps(said))
    found = read_tokenizer(tmp_path, file.get_vocab_size())
    setattr(file, part, right)
    ids = [found.of_file[found.encode(text)].tolist() for text in TEXTS]
    assert ids == [file.encode(text).ids for text in TEXTS]


ADDED = {"added_tokens_decoder": {"400": {"content": "<think>", "special": False}}}
UNLIKE = [
    ("BertForMaskedLM", SETTINGS, "[", "not JSON"),
    ("BertForMaskedLM", SETTINGS, [], "is not a JSON object"),
    ("BertForMaskedLM", SETTINGS, {"do_lower_case": "false"}, "do_lower_case is 'false'"),
    ("BertForMaskedLM", SETTINGS, {"cls_token": "[MASK]"}, r"cls_token is '\[MASK\]'"),
    ("BertForMaskedLM", SETTINGS, {"unk_token": {"content": "?"}}, r"unk_token is '\?'"),
    ("BertForMaskedLM", SETTINGS, {"added_tokens_decoder": [3]}, "added_tokens_decoder is"),
    ("BertForMaskedLM", SETTINGS, ADDED, "token 400 is '<think>'"),
    ("BertForMaskedLM", "added_tokens.json", {"<think>": 400}, "token 400 is '<think>'"),
    ("BertForMaskedLM", "special_tokens_map.json", {"sep_token": "."}, r"sep_token is '\.'"),
    ("GPT2LMHeadModel", SETTINGS, {"bos_token": "a"}, "bos_token is 'a'"),
    ("LlamaForCausalLM", SETTINGS, {"eos_token": "<s>"}, "eos_token is '<s>'"),
    ("LlamaForCausalLM", SETTINGS, {"add_prefix_space": 1.5}, "add_prefix_space is 1.5"),
    ("MarianMTModel", SETTINGS, {"eos_token": "<pad>"}, "eos_token is '<pad>'"),
]


@pytest.mark.parametrize(("kind", "name", "values", "says"), UNLIKE)
def test_a_file_beside_the_tokenizer_that_says_otherwise(kind, name, values, says, tmp_path):
    make(kind, tmp_path)
    (tmp_path / name).write_text(values if isinstance(values, str) else json.dumps(values))
    with pytest.raises(InputError, match=f"{name}: {says}") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("BertForMaskedLM", {"do_lower_case": False}),
        ("GPT2LMHeadModel", {"add_prefix_space": True}),
        ("GPT2LMHeadModel", {"add_prefix_space": True, "tokenizer_class": "TokenizersBackend"}),
    ],
)
def test_settings_that_no_field_of_the_file_stands_for(kind, said, tmp_path):
    import tokenizers as t

    _, _, file = make(kind, tmp_path)
    file.normalizer = t.normalizers.Sequence([t.normalizers.Lowercase()])
    file.pre_tokenizer = t.pre_tokenizers.Sequence([file.pre_tokenizer])
    file.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / SETTINGS).write_text(json.dumps(said))
    with pytest.raises(InputError, match=f"{SETTINGS}: {next(iter(said))} is "):
        read(tmp_path)


def test_settings_that_agree(tmp_path):
    make("BertForMaskedLM", tmp_path)
    before = read(tmp_path)[2].model
    agree = {"do_lower_case": True, "cls_token": "[CLS]", "mask_token": {"content": "[MASK]"}}
    decoder = {"1": {"content": "[PAD]", "special": True, "lstrip": True}}
    (tmp_path / SETTINGS).write_text(json.dumps({**agree, "added_tokens_decoder": decoder}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "[UNK]"}))
    tokenizer = read(tmp_path)[2]
    assert tokenizer.model == before
    assert ABSENT not in tokenizer.of_file


@pytest.mark.parametrize(
    ("kind", "rename", "more"),
    [
        (
            "BertForMaskedLM",
            {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
            ["bert.embeddings.position_ids", "bert.pooler.dense.bias", "cls.seq_relationship.bias"],
        ),
        ("GPT2LMHeadModel", {}, ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("LlamaForCausalLM", {}, ["model.layers.1.self_attn.rotary_emb.inv_freq"]),
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
