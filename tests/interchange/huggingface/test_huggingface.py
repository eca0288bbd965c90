"""Runs of ours as files of transformers and back, by what needs no torch."""

import dataclasses
import random

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from small_models import (
    LLAMA,
    apply,
    byte_level,
    model_config,
    random_params,
    tokens_of,
    word_piece,
)

from mhe_jax.config import EvaluationConfig, InputError
from mhe_jax.config.data import BOS, EOS, MASK, PAD, UNK
from mhe_jax.data import JsonTokenizer, open_source, train_tokenizer
from mhe_jax.data.tokenizer import SPACE
from mhe_jax.interchange import transformers
from mhe_jax.interchange.huggingface import OURS, convert, generation, numbering, write_files
from mhe_jax.interchange.huggingface.reading import read
from mhe_jax.interchange.huggingface.tokenizer import tokenizer_json, write_tokenizer
from mhe_jax.interchange.tables import lay_out, modules
from mhe_jax.model import unroll_layers


@pytest.fixture(scope="module")
def tokenizer():
    """A sentencepiece model of the demo's text."""
    return train_tokenizer([(open_source(("demo:train",), "pair"), 1.0)], 400)


@pytest.mark.parametrize(
    ("task", "kind", "fields"),
    [
        ("lm", "mha", {}),
        ("lm", "mqa", {"tie_embeddings": False, "scan_layers": True}),
        ("lm", "gqa", LLAMA),
        ("lm", "mqa", LLAMA | {"mlp_bias": True, "tie_embeddings": False}),
        ("mlm", "mha", {"num_token_types": 2, "tie_embeddings": False}),
        (
            "translation",
            "mha",
            {"layer_norm_epsilon": 1e-5, "num_decoder_layers": 1, "output_bias": True},
        ),
    ],
)
def test_out_and_in_is_the_same_bit_for_bit(task, kind, fields, tokenizer, tmp_path):
    """Nothing is folded, and √16 is a power of two."""
    given = {"attention__use_bias": True, "vocabulary_size": 400, **fields}
    config = model_config(task, kind, **given)
    params = random_params(config)
    tensors, values = convert(config, params)
    twins = ("lm_head.weight", "decoder.weight", "decoder.bias", "coder.embed_tokens.weight")
    assert any(name.endswith(twins) for name in tensors) != config.model.tie_embeddings
    write_files(tmp_path, tensors, values)
    write_tokenizer(tokenizer, config, OURS, tmp_path)
    found, back, theirs = read(tmp_path)

    expected = dataclasses.replace(config.model, vocabulary_multiple=1, scan_layers=False)
    if expected.positions == "rotary":  # Llama has no dropout there
        expected = dataclasses.replace(expected, dropout_rate=0.0)
    read_model = dataclasses.replace(
        found.model,
        num_decoder_layers=expected.num_decoder_layers,
        attention=dataclasses.replace(found.model.attention, qkv_features=None),
    )
    assert read_model == expected
    assert found.task == task
    assert theirs.vocabulary_size == 400
    ours, theirs = (flatten_dict(tree) for tree in (unroll_layers(params), back))
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(theirs[path], array, err_msg=str(path))


@pytest.mark.parametrize(
    ("task", "kind", "fields"),
    [
        ("lm", "sha", {}),
        ("lm", "mhe_add", {"attention__use_bias": True}),
        ("lm", "mva", {"attention__qkv_features": 8, "attention__score_features": 3}),
        ("lm", "mha", {"attention__score_features": 8}),
        ("lm", "gta", {"attention__num_kv_heads": 1}),
        ("lm", "skv", {"positions": "sinusoidal", "tie_embeddings": False}),
        ("lm", "mhe_mul", {"attention__qkv_features": 8}),
        ("lm", "gqa", LLAMA | {"rotary_pairs": "interleaved", "rotary_scaling": 3.0}),
        ("lm", "sha", LLAMA | {"rotary_base": 50.0, "attention__qkv_features": 24}),
        ("mlm", "mhe_mul", {"attention__num_groups": 2}),
        ("translation", "mha", {"layer_norm_epsilon": 0.02}),
        ("translation", "mha", {"layer_norm_epsilon": 0.02, "tie_embeddings": False}),
        ("translation", "mqa", {"positions": "sinusoidal", "num_decoder_layers": 1}),
    ],
    ids=str,
)
def test_out_and_in_is_the_same_function(task, kind, fields, tokenizer, tmp_path):
    """Where heads are folded, repeated or widened, or positions and norms are others."""
    config = model_config(task, kind, vocabulary_size=400, **fields)
    params = random_params(config)
    write_files(tmp_path, *convert(config, params))
    write_tokenizer(tokenizer, config, OURS, tmp_path)
    found, back, _ = read(tmp_path)
    rows = [tokens_of(config, (2, 11), seed) for seed in (1, 2)][: 1 + (task == "translation")]
    if task == "mlm":
        rows.append(np.repeat(np.arange(11)[None], 2, 0))
    expected = apply(config, params, *rows)[..., :400]
    np.testing.assert_allclose(apply(found, back, *rows), expected, atol=1e-4, rtol=0)
    assert np.abs(expected).max() > 1


def test_mva_without_its_key_bias_is_written_as_plain_heads():
    """Of the model's own class, which has a key bias, its weights would be drawn at random."""
    for bias, kind in ((None, "mva"), (False, "heads")):
        config = model_config("lm", "mva", attention__use_key_bias=bias)
        tensors, values = transformers.convert(config, random_params(config))
        assert values["attention"]["decoder"]["kind"] == kind
        assert any("key_bias" in name for name in tensors) == (kind == "mva")


NOISE = [*("  ", "\t", "🙂", "é", "e\u0301", SPACE, "漢", "\x00", "\u200d", "\u00a0", "</s>")]


def noisy_lines(count):
    """Lines of the demo, half of them with noise in them."""
    draw = random.Random(1)
    text = [line for pair in open_source(["demo:train"], "pair") for line in pair]
    for number in range(count):
        line = list(text[number])
        for _ in range(draw.randrange(4) * (number // 2 % 2)):
            line.insert(draw.randrange(len(line) + 1), draw.choice(NOISE))
        yield "".join(line)


def test_the_tokenizer_gives_the_same_ids_and_texts(tokenizer):
    lines = [*noisy_lines(2000), "", " ", "a" * 99, "ab" * 50, "anan" * 20 + "a"]
    written = tokenizer_json(tokenizer, model_config("lm"))
    theirs = JsonTokenizer(written.encode())
    ours = tokenizer.encode_batch(lines)
    assert theirs.encode_batch(lines) == ours
    assert [theirs.decode(ids) for ids in ours] == lines
    assert theirs.absent == ()


POST, PRE = {"norm_position": "post"}, {"norm_position": "pre"}


@pytest.mark.parametrize(
    ("task", "kind", "fields", "named"),
    [
        ("lm", "mha", POST, "model.norm_position is 'post': GPT-2"),
        ("lm", "mha", {"attention__normalize_qk": True}, "normalize_qk"),
        ("lm", "mva", {"attention__score_features": 4}, "features / num_heads, 16 / 4: .* width 5"),
        ("lm", "mha", {"output_bias": True}, "model.output_bias is True"),
        ("lm", "mha", LLAMA | {"num_token_types": 1}, "model.num_token_types is 1: Llama"),
        ("lm", "mhe_add", LLAMA, "kind is 'mhe_add': .* Llama"),
        ("lm", "mva", LLAMA | {"attention__score_features": 4}, "kind is 'mva'"),
        ("lm", "mha", LLAMA | {"attention__score_features": 8}, "kind is 'mha': .* Llama"),
        ("lm", "mla", LLAMA, "mla"),
        ("lm", "mha", {"positions": "rotary"}, "model.norm is 'layer'"),
        ("mlm", "mha", PRE, "model.norm_position is 'pre': BERT"),
        ("mlm", "mha", {"context": "token"}, "model.context is 'token'"),
        ("mlm", "mha", {"hashing": "md_emb"}, "hashing is 'md_emb'"),
        ("shuffle_random", "mha", {}, "task is 'shuffle_random'"),
        ("classification", "mha", {"pooling": "mean"}, "model.pooling is 'mean'"),
        ("translation", "mha", PRE, "model.norm_position is 'pre': Marian"),
        ("translation", "mha", {"attention_by_role__cross__num_heads": 2}, "are 2 and 4"),
    ],
)
def test_what_has_no_home_is_refused(task, kind, fields, named):
    config = model_config(task, kind, **fields)
    with pytest.raises(InputError, match=named) as caught:
        convert(config, random_params(config))
    assert "\n" not in str(caught.value)


def test_a_parameter_without_a_place_is_refused():
    """Rather than left out in silence, so that the file computes something else."""
    tensors = {"up/kernel": np.ones((2, 3)), "down/kernel": np.ones((3, 2))}
    with pytest.raises(InputError, match="^down/kernel "):
        lay_out(modules("", "", {"fc": "up"}), tensors, "GPT-2")


@pytest.mark.parametrize("task", ["classification", "span"])
def test_a_table_of_logits_that_the_task_never_reads_is_left_out(task):
    config = model_config(task, tie_embeddings=False)
    params = random_params(config)
    assert "output" in params["embeddings"]
    tensors, _ = convert(config, params)
    assert not [name for name in tensors if "decoder" in name]


@pytest.mark.parametrize(
    ("task", "labels"), [("classification", ("no", "yes", "who knows")), ("regression", ())]
)
def test_names_of_labels(task, labels):
    config = model_config(task)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, labels=labels))
    _, values = convert(config, random_params(config))
    labels = labels or ("LABEL_0",)
    assert values["id2label"] == {str(i): label for i, label in enumerate(labels)}
    assert values["label2id"] == {label: i for i, label in enumerate(labels)}
    assert values["problem_type"].endswith(task)


def written_by(tokenizer, config, directory):
    """The tokenizer of `config`'s run as its export leaves it."""
    import tokenizers

    special = numbering(tokenizer, config, {})[1]
    write_tokenizer(tokenizer, config, special, directory)
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("task", ["lm", "translation", "mlm", "classification"])
def test_a_file_puts_around_a_text_what_the_run_does(task, tmp_path):
    """Not what it put there before: the rows of a run are made by its task."""
    import tokenizers

    file = word_piece(tmp_path)
    ends = [(name, file.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    file.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=ends
    )
    tokenizer = JsonTokenizer(file.to_str().encode())
    size, types = tokenizer.vocabulary_size, 2 * (task == "classification")
    config = model_config(task, vocabulary_size=size, num_token_types=types)
    written = written_by(tokenizer, config, tmp_path)
    first, second = (tokenizer.encode(text) for text in ("a small dog", "red hat"))
    row = {"lm": [BOS, *first], "translation": [*first, EOS]}.get(task, [BOS, *first, EOS])
    assert written.encode("a small dog").ids == tokenizer.of_file[row].tolist()
    if task == "classification":
        both = written.encode("a small dog", "red hat")
        row, begun = [BOS, *first, EOS, EOS, *second, EOS], len(first) + 2
        assert both.ids == tokenizer.of_file[row].tolist()
        assert both.type_ids == [0] * begun + [1] * (len(row) - begun)


def test_the_file_of_a_run_that_was_imported_stays_as_it_is(tmp_path):
    file = byte_level(tmp_path, ("<s>", "</s>"))
    tokenizer = JsonTokenizer(file.to_str().encode())
    config = model_config("lm", vocabulary_size=tokenizer.vocabulary_size)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=()))
    assert written_by(tokenizer, config, tmp_path).encode("a dog").ids == file.encode("a dog").ids
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer.model


@pytest.mark.parametrize(
    ("task", "special", "named"),
    [
        ("lm", ("<s>",), "has no eos"),
        ("translation", ("<s>", "</s>"), "has no pad"),
        ("span", ("<|endoftext|>",), "has no pad"),
        ("mlm", ("<pad>", "<s>", "</s>"), "has no mask"),
    ],
)
def test_a_file_without_the_tokens_of_the_rows_is_refused(task, special, named, tmp_path):
    tokenizer = JsonTokenizer(byte_level(tmp_path, special).to_str().encode())
    with pytest.raises(InputError, match=f"^tokenizer.json: {named}"):
        numbering(tokenizer, model_config(task), {})


def test_absent_tokens_that_the_file_has_are_refused(tmp_path):
    """Its model would give them probability, which the run does not."""
    tokenizer = JsonTokenizer(word_piece(tmp_path).to_str().encode())
    with pytest.raises(InputError, match=r"absent_tokens is \(4,\)"):
        numbering(tokenizer, model_config("lm", absent_tokens=(MASK,)), {})


SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9}


@pytest.mark.parametrize(
    ("task", "evaluation", "expected"),
    [
        ("lm", {}, {"min_new_tokens": 1}),
        ("lm", {"min_length": 0, "temperature": 0.7, "top_p": 0.9}, SAMPLING),
        (
            "translation",
            {"beam_size": 3, "length_penalty": 0.0, "min_length": 3},
            {"num_beams": 3, "length_penalty": 0.0, "min_new_tokens": 3},
        ),
        (
            "translation",
            {"length_penalty": 0.7},
            {"num_beams": 5, "length_penalty": 0.7, "min_new_tokens": 1},
        ),
    ],
)
def test_the_search_is_that_of_the_run(task, evaluation, expected):
    """As far as transformers has it: a length penalty is another formula there."""
    config = model_config(task)
    config = dataclasses.replace(config, evaluation=EvaluationConfig(**evaluation))
    found = generation(config, OURS)
    ends = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    if task == "translation":
        ends |= {"decoder_start_token_id": BOS, "max_length": 14, "early_stopping": "never"}
    assert found == {**ends, "suppress_tokens": [PAD, UNK, BOS, MASK], **expected}
