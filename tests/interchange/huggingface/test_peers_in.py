"""Models of transformers as runs of ours: the same logits as by torch."""

import json

import numpy as np
import pytest
from foreign_tokenizers import byte_level, word_piece
from random_models import apply

from mhe_jax.config.data import PAD
from mhe_jax.data import JsonTokenizer
from mhe_jax.interchange.huggingface.fields import read_object
from mhe_jax.interchange.huggingface.reading import read, read_weights
from mhe_jax.interchange.huggingface.writing import convert, numbering

torch = pytest.importorskip("torch", reason="needs torch and transformers: see `make peers`")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(kind, config, directory, **how):
    """A model with random parameters, none of which is 0 or 1, in a directory."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
        if kind == "MarianMTModel":
            model.final_logits_bias.add_(0.2 * torch.randn_like(model.final_logits_bias))
    model.save_pretrained(directory, **how)
    return model


def logits(model, **inputs):
    with torch.no_grad():
        found = model(**{name: torch.tensor(value).long() for name, value in inputs.items()})
    return found.logits.numpy()


def in_file(tokenizer, tokens):
    """Ids of the file for ids of ours, of which 0 is padding."""
    return np.where(tokens == PAD, max(0, tokenizer.of_file[PAD]), tokenizer.of_file[tokens])


def check_same(ours, theirs, tokenizer, where=...):
    """Logits in the order of our ids, and -inf of those that are ours alone."""
    there = tokenizer.of_file >= 0
    expected = theirs[..., tokenizer.of_file[there]]
    np.testing.assert_allclose(ours[..., there][where], expected[where], atol=1e-4, rtol=0)
    assert (ours[..., ~there] == -np.inf).all()
    assert np.abs(expected).max() > 1


# Fields of `config.json` that have several names or values of one meaning, or of the search alone.
OTHERS = {
    "architectures",
    "model_type",
    "activation_function",
    "bos_token_id",
    "forced_eos_token_id",
}


def check_back(run, params, tokenizer, directory):
    """What goes out again has the tensors that came in, bit for bit: the width is 16."""
    tensors, values = convert(run, params, *numbering(tokenizer, run, params))
    came, said = read_weights(directory), read_object(directory / "config.json")
    for name in set(values) - OTHERS:
        if said.get(name) is not None:
            assert values[name] == said[name], name
    if not run.model.output_bias and "final_logits_bias" in came:  # which adds nothing
        assert not came.pop("final_logits_bias").any()
    assert set(came) <= set(tensors)
    for name, array in came.items():
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)


def draw(tokenizer, shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(5, tokenizer.vocabulary_size, shape).astype(np.int32)


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "GPTBigCodeForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt2(kind, tied, tmp_path):
    theirs_of_file = byte_level(tmp_path)
    names = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 23, "n_positions": 13}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    size = theirs_of_file.get_vocab_size() + 3  # rows without a token
    config = getattr(
        transformers, "GPT2Config" if kind == "GPT2LMHeadModel" else "GPTBigCodeConfig"
    )
    config = config(vocab_size=size, tie_word_embeddings=tied, **names, **ends)
    model = saved(kind, config, tmp_path, max_shard_size="20KB" if tied else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == tied

    run, params, tokenizer = read(tmp_path)
    assert run.task == "lm"
    assert run.model.attention.kind == ("mha" if kind == "GPT2LMHeadModel" else "mqa")
    assert run.model.absent_tokens == (0, 1, 2, 4)
    tokens = draw(tokenizer, (2, 12))
    tokens[:, 0] = 2  # our bos has the row of theirs
    ids = np.concatenate([np.zeros((2, 1), int), in_file(tokenizer, tokens[:, 1:])], 1)
    check_same(apply(run, params, tokens), logits(model, input_ids=ids), tokenizer)
    check_back(run, params, tokenizer, tmp_path)

    text = "The dog's <|endoftext|> GRÖSSE 🙂\n"
    ours = tokenizer.encode(text)
    theirs_of_file.encode_special_tokens = True
    assert tokenizer.of_file[ours].tolist() == theirs_of_file.encode(text).ids
    assert tokenizer.decode(ours) == text


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "RobertaForMaskedLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_encoders(kind, tied, tmp_path):
    roberta = kind == "RobertaForMaskedLM"
    if roberta:
        special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
        theirs_of_file = byte_level(tmp_path, special)
        ends = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "type_vocab_size": 1}
    else:
        theirs_of_file = word_piece(tmp_path)
        ends = {"pad_token_id": 1, "type_vocab_size": 2}
    size = theirs_of_file.get_vocab_size()
    positions = 13 + 2 * roberta
    config = getattr(transformers, kind.replace("ForMaskedLM", "Config"))(
        vocab_size=size,
        intermediate_size=23,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        layer_norm_eps=1e-3,
        **SMALL,
        **ends,
    )
    model = saved(kind, config, tmp_path)

    run, params, tokenizer = read(tmp_path)
    assert (run.task, run.model.absent_tokens, run.model.max_length) == ("mlm", (), 13)
    tokens = draw(tokenizer, (2, 13))
    tokens[1, 9:] = PAD
    places = np.repeat(np.arange(13)[None], 2, 0)
    ours = apply(run, params, tokens, places)
    given = {"input_ids": in_file(tokenizer, tokens), "attention_mask": tokens != PAD}
    check_same(ours, logits(model, **given), tokenizer, tokens != PAD)
    if not roberta and tied:
        check_back(run, params, tokenizer, tmp_path)
    text = "The dog [MASK] runs, größer <mask>"
    theirs_of_file.encode_special_tokens = True
    assert tokenizer.of_file[tokenizer.encode(text)].tolist() == theirs_of_file.encode(text).ids


@pytest.mark.parametrize(
    ("family", "head", "labels"),
    [
        ("Bert", "SequenceClassification", ["no", "perhaps", "yes"]),
        ("Bert", "SequenceClassification", ["LABEL_0", "LABEL_1"]),  # which files leave out
        ("Bert", "SequenceClassification", ["LABEL_0"]),
        ("Bert", "QuestionAnswering", ["LABEL_0", "LABEL_1"]),
        ("Roberta", "SequenceClassification", ["no", "perhaps", "yes"]),
        ("Roberta", "QuestionAnswering", ["LABEL_0", "LABEL_1"]),
    ],
)
def test_encoders_with_the_head_of_a_task(family, head, labels, tmp_path):
    if family == "Roberta":
        file = byte_level(tmp_path, ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
        ends = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "type_vocab_size": 1}
    else:
        file = word_piece(tmp_path)
        ends = {"pad_token_id": 1, "type_vocab_size": 2}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=file.get_vocab_size(),
        intermediate_size=23,
        max_position_embeddings=222,
        id2label=dict(enumerate(labels)),
        **SMALL,
        **ends,
    )
    model = saved(f"{family}For{head}", config, tmp_path)
    run, params, tokenizer = read(tmp_path)
    tokens = draw(tokenizer, (2, 13))
    tokens[1, 9:] = PAD
    types = draw(tokenizer, (2, 13), 3) % ends["type_vocab_size"]
    marks = (tokens != PAD).astype(np.int32)
    given = {
        "input_ids": in_file(tokenizer, tokens),
        "attention_mask": marks,
        "token_type_ids": types,
    }
    with torch.no_grad():
        theirs = model(**{name: torch.tensor(value).long() for name, value in given.items()})
    ours = apply(run, params, tokens, types, marks)
    if head == "QuestionAnswering":
        assert run.task == "span"
        expected = np.stack([theirs.start_logits.numpy(), theirs.end_logits.numpy()], 1)
        where = np.repeat((marks > 0)[:, None], 2, 1)
        np.testing.assert_allclose(ours[where], expected[where], atol=1e-4, rtol=0)
    else:
        number = len(labels) == 1
        assert run.task == ("regression" if number else "classification")
        assert run.data.labels == (() if number else tuple(labels))
        expected = theirs.logits.numpy().reshape(ours.shape)
        np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    if family == "Bert":
        check_back(run, params, tokenizer, tmp_path)


def test_roberta_has_two_eos_between_two_texts(tmp_path):
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    file = byte_level(tmp_path, special)
    vocabulary, merges = (json.loads(file.to_str())["model"][part] for part in ("vocab", "merges"))
    theirs = transformers.RobertaTokenizerFast(
        vocab=vocabulary, merges=[tuple(pair) for pair in merges]
    )
    theirs.save_pretrained(tmp_path)
    tokenizer = JsonTokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.separators == 2
    assert theirs("a", "dog")["input_ids"].count(theirs.eos_token_id) == 3


@pytest.mark.parametrize("biased", [True, False])
def test_marian(biased, tmp_path):
    theirs_of_file = byte_level(tmp_path, ("</s>", "<unk>", "<pad>"))
    config = transformers.MarianConfig(
        vocab_size=theirs_of_file.get_vocab_size(),
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=23,
        decoder_ffn_dim=23,
        max_position_embeddings=13,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=2,
        decoder_start_token_id=2,
        eos_token_id=0,
        forced_eos_token_id=0,
    )
    model = saved("MarianMTModel", config, tmp_path)
    if not biased:
        model.final_logits_bias.zero_()
        model.save_pretrained(tmp_path)

    run, params, tokenizer = read(tmp_path)
    assert (run.task, run.model.output_bias) == ("translation", biased)
    sources, targets = draw(tokenizer, (2, 9)), draw(tokenizer, (2, 12), 1)
    sources[1, 6:] = PAD
    targets[:, 0] = 2
    decoded = np.concatenate([np.full((2, 1), 2), in_file(tokenizer, targets[:, 1:])], 1)
    theirs = logits(
        model,
        input_ids=in_file(tokenizer, sources),
        attention_mask=sources != PAD,
        decoder_input_ids=decoded,
    )
    check_same(apply(run, params, sources, targets), theirs, tokenizer)
    check_back(run, params, tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("LlamaForCausalLM", {"num_key_value_heads": 2}),
        ("LlamaForCausalLM", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
        ("LlamaForCausalLM", {"head_dim": 6, "tie_word_embeddings": True, "rms_norm_eps": 0.1}),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 70.0}},
        ),
        ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": None}),
    ],
)
def test_llama(kind, fields, tmp_path):
    theirs_of_file = byte_level(tmp_path, ("<unk>", "<s>", "</s>"))
    config = getattr(transformers, kind.replace("ForCausalLM", "Config"))(
        vocab_size=theirs_of_file.get_vocab_size(),
        intermediate_size=23,
        max_position_embeddings=13,
        bos_token_id=1,
        eos_token_id=2,
        **SMALL | fields,
    )
    model = saved(kind, config, tmp_path)
    run, params, tokenizer = read(tmp_path)
    assert run.model.absent_tokens == (0, 4)
    tokens = draw(tokenizer, (2, 12))
    tokens[:, 0] = 2
    theirs = logits(model, input_ids=in_file(tokenizer, tokens))
    check_same(apply(run, params, tokens), theirs, tokenizer)
    check_back(run, params, tokenizer, tmp_path)
